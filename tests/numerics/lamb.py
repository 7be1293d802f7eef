"""LAMB twice, without code of ours: as the paper writes it, in fp64; and by torch's fused AdamW.

Algorithm 2 of You et al. (arXiv:1904.00962), with bias correction:

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
    w = w - lr * min(|w|, max_norm) / |r + decay w| * (r + decay w)

The factor of lr, the trust ratio, is 1 where either norm is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import offloadtrain as ot
from offloadtrain.runtime.kernels.state import Layout
from tests import torch_kernels
from tests.numerics.reference import SEED, NarrowRuleRun, RuleRun, segment_squares

LAMB = ot.LAMB(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
CAPPED = ot.LAMB(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_norm=0.5)


def paper_step(w: Tensor, m: Tensor, v: Tensor, g: Tensor, step: int, rule: ot.LAMB) -> None:
    """One step of one tensor, in place; all fp64."""
    b1, b2 = rule.betas
    m.mul_(b1).add_(g * (1 - b1))
    v.mul_(b2).add_(g * g * (1 - b2))
    r = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + rule.eps) + rule.weight_decay * w
    norms = w.norm().item(), r.norm().item()
    ratio = min(norms[0], rule.max_norm) / norms[1] if all(norms) else 1.0
    w.sub_(rule.lr * ratio * r)


def fused_adamw(
    values: Iterable[Tensor], g: Tensor, step: int, rule: ot.LAMB, **changed: float
) -> None:
    """One step of torch's fused AdamW over (weight, exp_avg, exp_avg_sq), in place."""
    weight, exp_avg, exp_avg_sq = values
    options: dict[str, Any] = {"lr": rule.lr, "weight_decay": rule.weight_decay, **changed}
    torch._fused_adamw_(
        [weight],
        [g],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(step))],
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
        **options,
    )


def ratio_of(weight: Tensor, direction: Tensor, rule: ot.LAMB) -> float:
    """`direction`: what AdamW subtracts from weights of zero at lr = 1."""
    squares = segment_squares(weight), segment_squares(weight * rule.weight_decay + direction)
    if not all(squares):
        return 1.0
    return min(math.sqrt(squares[0]), rule.max_norm) / math.sqrt(squares[1])


class TorchLamb(torch.optim.Optimizer):
    """Every parameter by torch's fused AdamW, with lr times the tensor's trust ratio."""

    def __init__(self, groups: Any, *, rule: ot.LAMB) -> None:
        super().__init__(groups, {})
        self.rule, self.steps = rule, 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.state[param]
            for key in self.rule.moments:
                state.setdefault(key, torch.zeros_like(param))
            tried = [torch.zeros_like(param), *(state[key].clone() for key in self.rule.moments)]
            fused_adamw(tried, param.grad, self.steps, self.rule, lr=1.0, weight_decay=0.0)
            lr = self.rule.lr * ratio_of(param, -tried[0], self.rule)
            values = [param, *(state[key] for key in self.rule.moments)]
            fused_adamw(values, param.grad, self.steps, self.rule, lr=lr)


@dataclass
class LambRun(RuleRun):
    """The resident run."""

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return TorchLamb([{"params": group["params"]} for group in groups], rule=self.rule)


@dataclass
class NarrowLambRun(NarrowRuleRun):
    """In a narrow format: decoded, tried for the trust ratio, and updated by the readable kernels.
    A parameter is whole, so the bits of its rounding are those of its own layout."""

    def optimizer_of(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return TorchLamb([{"params": group["params"]} for group in groups], rule=self.rule)

    def update(self, sums: dict[str, Tensor], factor: float) -> None:
        self.steps += 1
        times: dict[str, Any] = {"step": self.steps, "grad_scale": factor, "seed": SEED}
        tried = self.rule.scalars(self.rule.defaults() | {"lr": 1.0, "weight_decay": 0.0}, **times)
        for name in self.trained:
            state, grad = self.states[name], sums[name].reshape(-1)
            layout = Layout.of_one(grad.numel(), self.ids[name])
            scratch = type(state)(field.clone() for field in state)
            scratch[0].zero_(), scratch[1].zero_()
            torch_kernels.update(scratch, scratch, grad, None, layout, tried)
            direction = -torch_kernels.to_fp32(scratch)[0]
            lr = self.rule.lr * ratio_of(torch_kernels.to_fp32(state)[0], direction, self.rule)
            scalars = self.rule.scalars(self.rule.defaults() | {"lr": lr}, **times)
            torch_kernels.update(state, state, grad, None, layout, scalars)
        self.publish_weights()
