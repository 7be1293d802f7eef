"""A share of the state on the device: the bits of any other placement, bytes where they were asked
for, checkpoints that another split reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.config.errors import DeviceMemoryError
from offloadtrain.engine.interpreter import SalvageError
from offloadtrain.step.layout.tiers import Tier
from tests.numerics.comparison import pair, train
from tests.numerics.models import MODELS, Chain, MixedReentrant, batches, loss_of

HALF = {"state_on": {"device": 0.5}}


@pytest.mark.slow
@pytest.mark.parametrize("made", [MixedReentrant, MODELS["skipping"]])
def test_sums_on_the_device_of_gradients_that_come_twice_or_not_at_all(made: Any) -> None:
    results = []
    for sums_on in ("host", "device"):
        torch.manual_seed(0)
        _, optimizer, model = pair(made(), accum=2, clip=0.5, sums_on=sums_on)
        stream = batches(8)
        losses = [train(optimizer, model, stream[at : at + 2]) for at in range(0, 8, 2)]
        results.append((losses, optimizer.grad_norm))
        optimizer.close()
    assert results[0] == results[1]


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


def test_a_step_that_was_decided_by_sums_on_a_lost_device_is_not_salvaged() -> None:
    optimizer = optimizer_of(grad_accum_steps=2, sums_on="device")
    train(optimizer, optimizer.model, batches(2))
    with pytest.raises(SalvageError, match="gradients were summed on the device"):
        optimizer.salvage(RuntimeError("lost"))


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


def test_a_lost_device_takes_its_state_with_it() -> None:
    optimizer = optimizer_of(**HALF)
    optimizer.backward(loss_of(optimizer.model, batches(1)[0]))
    optimizer.step()
    with pytest.raises(SalvageError, match=r"the state of \d of \d buckets was on the device"):
        optimizer.salvage(RuntimeError("lost"))
