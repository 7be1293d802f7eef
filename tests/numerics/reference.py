"""The resident trainer that every offloaded run is compared with: plain torch, no code of ours.

Working weights in the compute dtype, fp32 masters padded to 16 elements under
`torch.optim.AdamW(fused=True)`, microbatches summed in fp32 (`rounds_sums`: and then rounded once),
the global norm as offloadtrain defines it (fp64 sums of squares over segments of 2,048 elements,
each a halving tree, added in order).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Batch = TypeVar("Batch")
SEGMENT = 2048


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
    groups: Callable[[str], dict[str, float]] = lambda name: {}
    skipped: int = 0
    norms: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)

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
            sums = {name: one.to(self.dtype).float() for name, one in sums.items()}
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
            self.seen.append(norm * coef)
            coef *= min(1.0, max_norm / (norm * coef + 1e-6))
        return coef

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        for name, master in self.masters.items():
            grad = sums[name].reshape(-1) * factor
            master.grad = torch.nn.functional.pad(grad, (0, master.numel() - grad.numel()))
        self.adam.step()
        for name, param in self.trained.items():
            param.data.copy_(self.master(name))

    def master(self, name: str) -> Tensor:
        param = self.trained[name]
        return self.masters[name].detach()[: param.numel()].view(param.shape)

    def moment(self, name: str, key: str) -> Tensor:
        param = self.trained[name]
        state = self.adam.state[self.masters[name]]
        flat = state.get(
            key, torch.zeros_like(self.masters[name])
        )  # none yet: every step was skipped
        return flat[: param.numel()].view(param.shape)
