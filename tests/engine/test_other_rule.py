"""Another optimizer fits: a rule with one moment, on fp32 state, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import offloadtrain as ot
from offloadtrain.optim import StateFormat
from offloadtrain.runtime.kernels import Layout
from tests.numerics.models import Chain, batches, loss_of


@dataclass(frozen=True)
class Lion:
    """Lion (Chen et al. 2023): the sign of an interpolated moment, decoupled decay."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    calls_only_kernels: ClassVar[bool] = False
    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def defaults(self) -> dict[str, Any]:
        return asdict(self)

    def check(self, group: Mapping[str, Any]) -> None:
        assert group["lr"] >= 0

    def update(
        self,
        format: StateFormat,
        state: tuple[Tensor, ...],
        grad: Tensor,
        working: Tensor | None,
        layout: Layout,
        *,
        group: Mapping[str, Any],
        step: int,
        grad_scale: float,
        seed: int,
        out: tuple[Tensor, ...] | None = None,
    ) -> None:
        master, exp_avg = state
        if out is not None:
            master, exp_avg = (new.copy_(old) for new, old in zip(out, state, strict=True))
        lion_step(master, exp_avg, grad.float() * grad_scale, group)
        assert working is not None
        working.copy_(master)

    def set_master(self, format: StateFormat, state: tuple[Tensor, ...], master: Tensor) -> None:
        state[0].copy_(master)

    def convert(
        self,
        source: StateFormat,
        given: tuple[Tensor, ...],
        format: StateFormat,
        state: tuple[Tensor, ...],
    ) -> None:
        raise ValueError("Lion keeps fp32 state only")


def lion_step(master: Tensor, exp_avg: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    direction = torch.sign(beta1 * exp_avg + (1 - beta1) * grad)
    master.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
    exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)


@pytest.mark.parametrize("update", ["exact", "speculative"])
def test_a_rule_of_ones_own(update: str) -> None:
    torch.manual_seed(0)
    model, rule = Chain(), Lion()
    masters = {n: p.detach().clone() for n, p in model.named_parameters()}
    moments = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    optimizer = ot.offload(model, rule, device="cpu", update=update)
    twin = Chain().bfloat16()
    for tokens in batches(4):
        with torch.no_grad():
            for name, param in twin.named_parameters():
                param.copy_(masters[name])
        expected = loss_of(twin, tokens)
        loss = loss_of(model, tokens)
        assert loss.item() == expected.item()
        expected.backward()
        optimizer.backward(loss)
        optimizer.step()
        for name, param in twin.named_parameters():
            assert param.grad is not None
            lion_step(masters[name], moments[name], param.grad.float(), rule.defaults())
            param.grad = None
    for name, state in optimizer.named_state():
        assert set(state) == {"master", "exp_avg"}
        assert torch.equal(state["master"], masters[name]), name
        assert torch.equal(state["exp_avg"], moments[name]), name
