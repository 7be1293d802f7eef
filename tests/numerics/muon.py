"""The resident runs that Muon is compared with: `torch.optim.Muon`, and AdamW for the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

import offloadtrain as ot
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels.codec import random_bits, round_bf16
from offloadtrain.runtime.kernels.scalars import random_key
from tests import torch_kernels
from tests.numerics.reference import NEVER, SEED, DelayedRun
from tests.runtime.kernels.test_rules import made

REST = ot.AdamW(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
RULE = ot.Muon(lr=0.02, weight_decay=0.05, rest=REST)


def is_hidden(name: str, param: Tensor) -> bool:
    return name.startswith("layers.") and param.ndim == 2


class _Both:
    """torch's two optimizers over the masters of a `ResidentRun`, which are flat and padded."""

    def __init__(self, run: MuonRun) -> None:
        self.matrices = {
            name: nn.Parameter(run.master(name))
            for name, param in run.trained.items()
            if is_hidden(name, param)
        }
        self.flat = {name: run.masters[name] for name in self.matrices}
        rest = [master for name, master in run.masters.items() if name not in self.matrices]
        self.muon = torch.optim.Muon(self.matrices.values(), **run.rule.defaults())
        self.adamw = torch.optim.AdamW(rest, **run.rule.rest.defaults(), fused=True)

    def step(self) -> None:
        for name, matrix in self.matrices.items():
            grad = self.flat[name].grad
            assert grad is not None
            matrix.grad = grad[: matrix.numel()].view(matrix.shape)
        self.muon.step()
        self.adamw.step()


@dataclass
class MuonRun(DelayedRun):
    """Without delay unless `warmup` is set."""

    rule: Any = RULE
    warmup: int = NEVER

    def __post_init__(self) -> None:
        super().__post_init__()
        self.adam: Any = _Both(self)

    def moments(self, name: str) -> tuple[str, ...]:
        return self.rule.moments if name in self.adam.matrices else self.rule.rest.moments

    def moment(self, name: str, key: str) -> Tensor:
        both, param = self.adam, self.trained[name]
        if name in both.matrices:
            state = both.muon.state[both.matrices[name]]
            return state.get(key, torch.zeros_like(param, dtype=torch.float32))
        state = both.adamw.state[self.masters[name]]
        return state.get(key, torch.zeros_like(self.masters[name]))[: param.numel()].view(
            param.shape
        )


@dataclass
class NarrowMuonRun(MuonRun):
    """With split16 state: the masters are exact, moments are rounded to bf16 by known bits."""

    steps: int = 0
    states: dict[str, kernels.State] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ids = {name: index for index, name in enumerate(self.params)}
        for name, param in self.trained.items():
            values = [self.master(name).reshape(-1)]
            if is_hidden(name, param):
                self.buffers[name] = torch.zeros(param.shape, dtype=torch.bfloat16)
            else:
                zeros = [torch.zeros(param.numel()) for _ in self.rule.rest.moments]
                self.states[name] = made("split16", self.rule.rest.moments, [*values, *zeros])
            param.data.copy_(self._upper_half(self.master(name)))

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        self.steps += 1
        rest = self.rule.rest
        scalars = rest.scalars(rest.defaults(), step=self.steps, grad_scale=factor, seed=SEED)
        for name, param in self.trained.items():
            if name in self.buffers:
                self._muon(name, sums[name] * factor)
                param.data.copy_(self._upper_half(self.master(name)))
            else:
                state, grad = self.states[name], sums[name].reshape(-1)
                layout = kernels.Layout.of_one(grad.numel(), self.ids[name])
                torch_kernels.update(state, state, grad, None, layout, scalars)
                param.data.copy_(state[0].view_as(param))

    def _muon(self, name: str, grad: Tensor) -> None:
        """`_single_tensor_muon` of torch, with the buffer rounded behind it."""
        rule, master = self.rule, self.master(name)
        buffer = self.buffers[name].float()
        buffer.lerp_(grad, 1 - rule.momentum)
        update = grad.lerp(buffer, rule.momentum)
        update = _zeropower_via_newtonschulz(update, rule.ns_coefficients, rule.ns_steps, rule.eps)
        master.mul_(1 - rule.lr * rule.weight_decay)
        master.add_(update, alpha=-_adjust_lr(rule.lr, rule.adjust_lr_fn, master.shape))
        drawn = random_bits(
            random_key(SEED, self.steps, self.ids[name], 0), torch.arange(buffer.numel())
        )
        rounded = round_bf16(buffer.reshape(-1), drawn & 0xFFFF)
        self.buffers[name] = rounded.view(buffer.shape)

    @staticmethod
    def _upper_half(master: Tensor) -> Tensor:
        """What split16 keeps as the working weight: see [Note: State formats]."""
        weight, _ = kernels.codec.split(master.reshape(-1))
        return weight.view(master.shape)
