"""An optimizer state that is not offloaded: the same engine, the same bits, nothing on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Fp32State, Layout, on_device
from tests import levels
from tests.numerics.comparison import pair, train
from tests.numerics.models import Chain, batches


def test_only_norms_are_on_the_host_and_nothing_else_crosses_the_bus() -> None:
    _, optimizer, model = pair(Chain(), state_on="device")
    for tokens in batches(2):
        train(optimizer, model, [tokens])
    report = optimizer.last_step
    assert report is not None and report.d2h_bytes == report.h2d_bytes == 0
    assert {row.owner for row in optimizer.ledger.rows() if row.tier == "host"} == {
        "norms",
        "padding",
    }
    assert {"master weights", "exp_avg", "exp_avg_sq", "gradients"} <= {
        row.owner for row in optimizer.ledger.rows() if row.tier == "device"
    }
    optimizer.close()


def test_block_inputs_cross_the_bus_all_the_same() -> None:
    _, optimizer, model = pair(Chain(), state_on="device", activation="offload")
    for tokens in batches(2):
        train(optimizer, model, [tokens])
    report, rows = optimizer.last_step, optimizer.ledger.rows()
    (inputs,) = (row.bytes for row in rows if row.owner == "block inputs")
    assert report is not None and report.d2h_bytes == report.h2d_bytes == inputs > 0
    optimizer.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"working": "host"}, "working = 'device'"),
        (
            {"state_on": {"device": 0.9}, "working": "host"},
            "asks for 0.9 of the state",
        ),
    ],
)
def test_what_has_no_meaning_there(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ot.offload(Chain(), device="cpu", **{"state_on": "device"} | options)


# ---- the kernels that a GPU's memory is given, on the CPU


def fields(numel: int) -> Fp32State:
    return Fp32State(torch.randn(numel), torch.randn(numel) * 0.1, torch.rand(numel) * 0.01)


RULES: dict[str, Any] = {
    "adam": ot.Adam(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    "adamw": ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
    "lion": ot.Lion(lr=1e-2, weight_decay=0.1),
    "sgd": ot.SGD(lr=1e-2, weight_decay=0.1),
    "nesterov": ot.SGD(lr=1e-2, momentum=0.9, nesterov=True),
    "dampened": ot.SGD(lr=1e-2, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "adagrad": ot.Adagrad(lr=1e-2, lr_decay=0.1, weight_decay=0.1),
}


@levels.each("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", RULES)
def test_rules_are_those_of_the_host(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam and SGD, fused in torch, to the bit, in pieces of whole vector registers; the others
    within a rounding of each operation."""
    monkeypatch.setattr(on_device, "_PIECE", 1024)
    torch.manual_seed(0)
    rule, numel = RULES[name], 5 * 1024 + 64
    on_host = Fp32State(*fields(numel)[: 1 + len(rule.moments)])
    two = Fp32State(*(field.clone() for field in on_host))
    if name == "adagrad":
        for state in (on_host, two):
            state[1].abs_()
    weights = [torch.empty(numel, dtype=dtype) for _ in range(2)]
    for step in (1, 2, 9):
        grad = torch.randn(numel).to(dtype)
        scalars = rule.scalars(rule.defaults(), step=step, grad_scale=0.5, seed=0)
        kernels.update(on_host, grad, scalars, working=weights[0])
        on_device.update(two, grad, weights[1], scalars)
        for host_value, device_value in zip(
            (*on_host, weights[0]), (*two, weights[1]), strict=True
        ):
            if isinstance(rule, ot.Adam | ot.AdamW | ot.SGD):
                assert torch.equal(host_value, device_value)
            near = {} if host_value.dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
            assert torch.allclose(host_value, device_value, **({"rtol": 1e-5, "atol": 1e-6} | near))


def test_sums_and_norms_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums to the bit; norms within fp64 rounding, whose segments are added in another order."""
    monkeypatch.setattr(on_device, "_PIECE", 4096)
    torch.manual_seed(0)
    grad = torch.randn(20_000).bfloat16()
    totals = [torch.randn(20_000)] * 2
    totals[1] = totals[0].clone()
    for first in (False, True, False):
        kernels.accumulate(totals[0], grad, first)
        on_device.accumulate(totals[1], grad, first)
        assert torch.equal(*totals)
    layout = Layout([0, 512, 8960], [500, 7000, 11_000], [2, 0, 1], [0, 0, 0])
    squares = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
    kernels.sum_squares_many(totals[0], layout, squares[0])
    on_device.sum_squares(totals[1], layout, squares[1])
    assert torch.allclose(*squares, rtol=1e-14, atol=0.0) and bool((squares[0] > 0).all())
