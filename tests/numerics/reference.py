"""The plain loops that every offloaded run is compared with.

`ResidentRun` is plain torch: working weights in the compute dtype, fp32 masters padded to 16
elements under `torch.optim.AdamW(fused=True)`, microbatches summed in fp32 (`rounds_sums`: and then
rounded once), the global norm as offloadtrain defines it (fp64 sums of squares over segments of
2,048 elements, each a halving tree, added in order). `DelayedRun` uses each update a step later.
`RuleRun` runs another optimizer of torch. `NarrowRuleRun` has narrow state, each parameter's for
itself, and updates it by the readable kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from offloadtrain.runtime import kernels
from tests import torch_kernels
from tests.runtime.kernels.test_rules import TORCHS, made

Batch = TypeVar("Batch")
SEGMENT = 2048
SEED, NEVER = 7, 1 << 30


def segment_squares(values: Tensor) -> float:
    """One parameter's sum of squares as defined."""
    flat = values.detach().double().reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % SEGMENT)).square().view(-1, SEGMENT)
    while flat.shape[1] > 1:
        half = flat.shape[1] // 2
        flat = flat[:, :half] + flat[:, half:]
    total = 0.0
    for value in flat[:, 0].tolist():
        total += value
    return total


@dataclass
class ResidentRun:
    """A model trained in place. `loss_of(model, batch)` returns a scalar."""

    model: nn.Module
    dtype: torch.dtype
    lr: float = 1e-2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float | None = None
    clips: Sequence[float] = ()
    scale: float = 1.0
    rounds_sums: bool = False
    fp32_sums: Collection[str] = ()
    """Parameters whose sums are not rounded: those on the host."""
    groups: Callable[[str], dict[str, float]] = lambda name: {}
    state: str = "fp32"
    skipped: int = 0
    norms: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    """The norm that each clipping found."""

    def __post_init__(self) -> None:
        self.params = dict(self.model.named_parameters())
        self.trained = {n: p for n, p in self.params.items() if p.requires_grad}
        self.masters = {n: self._master(p) for n, p in self.trained.items()}
        for param in self.params.values():
            param.data = param.data.to(self.dtype)
        entries = [
            {"params": [m], "lr": self.lr, "weight_decay": self.weight_decay, **self.groups(n)}
            for n, m in self.masters.items()
        ]
        self.adam = self.optimizer_of(entries)

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=self.betas, eps=1e-8, fused=True)

    @staticmethod
    def _master(param: Tensor) -> nn.Parameter:
        flat = param.detach().float().reshape(-1).clone()
        return nn.Parameter(torch.nn.functional.pad(flat, (0, -flat.numel() % 16)))

    def step(
        self, batches: Sequence[Batch], loss_of: Callable[[nn.Module, Batch], Tensor]
    ) -> list[float]:
        """One optimizer step over microbatches; returns their losses."""
        sums: dict[str, Tensor] = {}
        losses = []
        for batch in batches:
            loss = loss_of(self.model, batch)
            losses.append(loss.item())
            if len(batches) > 1:
                loss = loss / len(batches)
            (loss * self.scale if self.scale != 1.0 else loss).backward()
            for name, param in self.trained.items():
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                sums[name] = sums[name] + grad.float() if name in sums else grad.float().clone()
                param.grad = None
        self.apply(sums)
        return losses

    def apply(self, sums: dict[str, Tensor]) -> None:
        if self.rounds_sums:
            sums = {
                name: total if name in self.fp32_sums else total.to(self.dtype).float()
                for name, total in sums.items()
            }
        total = 0.0
        for name in self.trained:
            total += segment_squares(sums[name])
        norm = math.sqrt(total) / self.scale
        self.norms.append(norm)
        if not math.isfinite(norm):
            self.skipped += 1
            self.scale /= 2
            return
        self.update(sums, float(np.float32(self.coef(norm) / self.scale)))

    def coef(self, norm: float) -> float:
        """Of `clips`, one after the other, then of `clip_norm`; each sees what was left before."""
        coef = 1.0
        for max_norm in (*self.clips, *([] if self.clip_norm is None else [self.clip_norm])):
            self.clipped.append(norm * coef)
            coef *= min(1.0, max_norm / (norm * coef + 1e-6))
        return coef

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        for name, master in self.masters.items():
            grad = sums[name].reshape(-1) * factor
            master.grad = torch.nn.functional.pad(grad, (0, master.numel() - grad.numel()))
        self.adam.step()
        self.publish_weights()

    def publish_weights(self) -> None:
        """Set the working weights from the masters."""
        for name, param in self.trained.items():
            param.data.copy_(self.newest(name))

    def newest(self, name: str) -> Tensor:
        """Return the working weight after the last update."""
        return self.master(name)

    def master(self, name: str) -> Tensor:
        param = self.trained[name]
        return self.masters[name].detach()[: param.numel()].view(param.shape)

    def moments(self, name: str) -> tuple[str, ...]:
        """Return the names of a parameter's moments."""
        return ("exp_avg", "exp_avg_sq")

    def moment(self, name: str, key: str) -> Tensor:
        param = self.trained[name]
        state = self.adam.state[self.masters[name]]
        flat = state.get(key, torch.zeros_like(self.masters[name]))  # until the first update
        return flat[: param.numel()].view(param.shape)


class DelayedRun(ResidentRun):
    """W(t+1) = W(t) - update(gradient at W(t-1)): what Adam makes of step t is used from step t+2
    on, after `warmup` steps without delay; `flush` uses it at once. So does the loss scale, which
    does not count what a step says of a scale that is not in use any more."""

    warmup = 0
    waiting = False
    overflowed = 0.0
    """The scale of the step before, if it overflowed and the scale does not follow it yet."""

    def apply(self, sums: dict[str, Tensor]) -> None:
        self.flush()
        used, skipped = self.scale, self.skipped
        late = len(self.norms) - skipped >= self.warmup
        super().apply(sums)
        if late:
            self.scale = used / 2 if self.overflowed == used else used
            self.overflowed = used if self.skipped > skipped else 0.0

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        before = {name: param.detach().clone() for name, param in self.trained.items()}
        super().update(sums, factor)
        self.waiting = len(self.norms) - self.skipped > self.warmup
        if self.waiting:
            for name, param in self.trained.items():
                param.data.copy_(before[name])

    def flush(self) -> None:
        if self.waiting:
            self.publish_weights()
        self.waiting = False


@dataclass
class RuleRun(DelayedRun):
    """Under torch's optimizer for a rule; without delay unless `warmup` is set."""

    rule: Any = None
    warmup: int = NEVER

    def moments(self, name: str) -> tuple[str, ...]:
        moments: tuple[str, ...] = self.rule.moments
        return moments

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        defaults = {"fused": True, **self.rule.defaults()}
        params = [{"params": group["params"]} for group in groups]
        return TORCHS[type(self.rule)](params, **defaults)


@dataclass
class NarrowRun(ResidentRun):
    """In a narrow format."""

    steps: int = 0
    states: dict[str, kernels.State] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ids = {name: index for index, name in enumerate(self.params)}
        self.trained = {name: param for name, param in self.trained.items() if param.numel()}
        for name, param in self.trained.items():
            zeros = [torch.zeros(param.numel()) for _ in self.rule.moments]
            values = [self.master(name).reshape(-1), *zeros]
            state = made(self.state, self.rule.moments, values, self.dtype)
            for moment in state[len(state.format.master) :]:
                moment.zero_()  # what a run starts with; a codec makes scales of zeros
            self.states[name] = state
        self.publish_weights()

    def newest(self, name: str) -> Tensor:
        return self.states[name][0].view_as(self.trained[name])

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        self.steps += 1
        scalars = self.rule.scalars(
            self.rule.defaults(), step=self.steps, grad_scale=factor, seed=SEED
        )
        for name in self.trained:
            state, grad = self.states[name], sums[name].reshape(-1)
            layout = kernels.Layout.of_one(grad.numel(), self.ids[name])
            torch_kernels.update(state, state, grad, None, layout, scalars)
        self.publish_weights()


@dataclass
class NarrowRuleRun(RuleRun, NarrowRun):
    """In a narrow format, with delay if `warmup` is set."""
