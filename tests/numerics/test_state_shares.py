"""A share of the state on the device: the bits of any other placement, bytes where they were asked
for, checkpoints that another split reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.config.errors import DeviceMemoryError
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import Fp32State, Layout, on_device
from offloadtrain.step.layout.tiers import Tier
from tests import levels
from tests.numerics.comparison import pair, train
from tests.numerics.models import Chain, batches

HALF = {"state_on": {"device": 0.5}}


def test_one_sum_goes_down_for_any_number_of_microbatches() -> None:
    results = {}
    cases: list[tuple[int, str, str]]
    cases = [(1, "host", "fp32"), (4, "host", "fp32"), (4, "device", "fp32")]
    for accum, sums_on, sums_down in (*cases, (4, "device", "working")):
        optimizer = optimizer_of(grad_accum_steps=accum, sums_on=sums_on, sums_down=sums_down)
        for _ in range(2):
            train(optimizer, optimizer.model, batches(accum))
        report = optimizer.last_step
        assert report is not None
        sums = bytes_of(optimizer, Tier.DEVICE, "gradient sums")
        results[accum, sums_on, sums_down] = (report.d2h_bytes, report.h2d_bytes, sums)
        optimizer.close()
    down, up, _ = results[1, "host", "fp32"]
    assert results[4, "host", "fp32"] == (4 * down, up, 0)
    # fp32 instead of bf16, once.
    assert results[4, "device", "fp32"] == (2 * down, up, 2 * down)
    assert results[4, "device", "working"] == (down, up, 2 * down)


def optimizer_of(**options: Any) -> ot.OffloadOptimizer:
    torch.manual_seed(0)
    return ot.offload(Chain(), ot.AdamW(lr=1e-2), device="cpu", **options)


def bytes_of(optimizer: ot.OffloadOptimizer, tier: Tier, owner: str = "master weights") -> int:
    rows = optimizer.ledger.rows()
    return sum(row.bytes for row in rows if (row.tier, row.owner) == (tier, owner))


def test_bytes_are_where_they_were_asked_for_and_the_rest_crosses_the_bus() -> None:
    results = {}
    for share in (0.0, 0.5):
        optimizer = optimizer_of(state_on={"device": share})
        for tokens in batches(2):
            train(optimizer, optimizer.model, [tokens])
        report = optimizer.last_step
        assert report is not None
        on_device, on_host = bytes_of(optimizer, Tier.DEVICE), bytes_of(optimizer, Tier.HOST)
        results[share] = (on_device, on_host, report.d2h_bytes, report.h2d_bytes)
        optimizer.close()
    total, down, up = results[0.0][1:]
    device, host, less_down, less_up = results[0.5]
    assert results[0.0][0] == 0 and device + host == total and 0.3 * total < device < 0.7 * total
    assert less_down / down == less_up / up == host / total


def test_the_first_blocks_of_the_forward_are_on_the_device() -> None:
    optimizer = optimizer_of(**HALF)
    tiers = [bucket.state_tier for bucket in optimizer._engine.program.spec.buckets]
    assert tiers == sorted(tiers) and {*tiers} == {Tier.DEVICE, Tier.HOST}
    optimizer.close()


def test_auto_fills_the_limit() -> None:
    device_bytes = {}
    for share in (0.0, 1.0):
        optimizer_in_full = optimizer_of(state_on={"device": share})
        device_bytes[share] = optimizer_in_full.ledger.total(Tier.DEVICE)
        optimizer_in_full.close()
    limit = (device_bytes[0.0] + device_bytes[1.0]) // 2
    optimizer = optimizer_of(state_on="auto", device_memory_limit=limit)
    within = optimizer.ledger.total(Tier.DEVICE)
    optimizer.close()
    assert device_bytes[0.0] < within <= limit
    with pytest.raises(DeviceMemoryError, match="of the state on the device: raise it, or lower"):
        optimizer_of(state_on="device", device_memory_limit=limit)


# An optimizer state that is not offloaded: the same engine, the same bits, nothing on the host.


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


# ---- the kernels that a GPU's memory is given, on the CPU


def fields(numel: int) -> Fp32State:
    return Fp32State((torch.randn(numel), torch.randn(numel) * 0.1, torch.rand(numel) * 0.01))


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
    on_host = Fp32State(fields(numel)[: 1 + len(rule.moments)])
    two = Fp32State(field.clone() for field in on_host)
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
