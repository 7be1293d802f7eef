"""A share of the sums of microbatches on the device: the bits of a resident run, whatever the
share; the bytes where they were asked for; state that another share goes on with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.config.errors import DeviceMemoryError
from offloadtrain.step.layout.tiers import Tier
from tests.numerics.comparison import ADAMW, assert_same, follow, make, pair, train
from tests.numerics.models import Chain, batches

ACCUM = 3


def names_on(optimizer: ot.OffloadOptimizer, tier: Tier) -> set[str]:
    """Return the names of parameters whose microbatches are summed on a tier."""
    spec = optimizer._engine.program.spec
    return {
        slot.name
        for block in optimizer._engine.residency.blocks.values()
        for bucket in block.buckets
        for slot in bucket.slots
        if spec.sum_tier(bucket.spec) is tier
    }


def bytes_of(optimizer: ot.OffloadOptimizer, tier: Tier, owner: str) -> int:
    rows = optimizer.ledger.rows()
    return sum(row.bytes for row in rows if (row.tier, row.owner) == (tier, owner))


@pytest.mark.parametrize(
    ("state", "options"),
    [
        pytest.param("fp32", {}, id="fp32"),
        pytest.param("split16", {"working": "host", "device_slots": 1}, id="split16, streamed"),
        pytest.param("int8", {"state_on": {"device": 0.3}}, id="int8, some state on the device"),
        pytest.param("fp32", {"update": "speculative"}, id="fp32, speculative"),
        pytest.param("fp32", {"update": "delayed"}, id="fp32, delayed"),
    ],
)
def test_the_bits_of_a_resident_run(state: str, options: dict[str, Any]) -> None:
    """With clipping: norms and losses of each step, and weights and state at the end. None and all
    of the sums are in `test_bits`."""
    stream = batches(3 * ACCUM)
    for share in (0.3, 0.7):
        keys = options | {"state": state, "sums_on": {"device": share}}
        run, optimizer, model = pair(make("tied"), accum=ACCUM, clip=0.3, **keys)
        assert names_on(optimizer, Tier.HOST) and names_on(optimizer, Tier.DEVICE)
        follow(run, optimizer, model, stream, ACCUM)
        assert_same(run, optimizer, model)
        optimizer.close()


def test_only_sums_of_the_share_are_rounded_wherever_their_state_is() -> None:
    keys: dict[str, Any] = {"sums_on": {"device": 0.5}, "sums_down": "working"}
    fp32_sums: set[str] = set()
    for state_on in (0.0, 0.5, 1.0):
        keys["state_on"] = {"device": state_on}
        run, optimizer, model = pair(make("chain"), accum=ACCUM, clip=0.3, **keys)
        fp32_sums = fp32_sums or names_on(optimizer, Tier.HOST)
        assert state_on or (fp32_sums and names_on(optimizer, Tier.DEVICE))
        run.fp32_sums = fp32_sums
        follow(run, optimizer, model, batches(4 * ACCUM), ACCUM)
        assert_same(run, optimizer, model)
        optimizer.close()


def test_the_sums_of_the_share_are_on_the_device_and_cross_the_bus_once() -> None:
    total, down = {}, {}
    for share in (0.0, 0.4, 1.0):
        optimizer = ot.offload(
            Chain(10), ADAMW, device="cpu", grad_accum_steps=ACCUM, sums_on={"device": share}
        )
        for _ in range(2):
            train(optimizer, optimizer.model, batches(ACCUM))
        report = optimizer.last_step
        assert report is not None
        total[share] = bytes_of(optimizer, Tier.DEVICE, "gradient sums")
        down[share] = report.d2h_bytes
        spec = optimizer._engine.program.spec
        layers = spec.buckets[1:-2]
        flags = "".join("-#"[spec.sums_on_device(bucket)] for bucket in layers)
        # Spread: no two neighbours, nor three of the others in a row.
        assert share != 0.4 or ("##" not in flags and "----" not in flags)
        optimizer.close()
    assert total[0.0] == 0 and 0.3 * total[1.0] < total[0.4] < 0.5 * total[1.0]
    # bf16 of each microbatch, or fp32 once.
    on_device = total[0.4] / total[1.0]
    assert down[0.4] == pytest.approx((1 - on_device) * down[0.0] + on_device * down[1.0])
    assert down[1.0] == total[1.0] == down[0.0] * 4 / (2 * ACCUM)


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_state_saved_with_one_share_goes_on_with_another(share: float) -> None:
    keys: dict[str, Any] = {"accum": ACCUM, "clip": 0.3}
    run, first, model = pair(make("chain"), sums_on={"device": 0.4}, **keys)
    stream = batches(4 * ACCUM)
    half = len(stream) // 2
    follow(run, first, model, stream[:half], ACCUM)
    saved = first.state_dict()
    _, second, other = pair(make("chain", 1), sums_on={"device": share}, **keys)
    second.load_state_dict(saved)
    first.close()
    follow(run, second, other, stream[half:], ACCUM)
    assert_same(run, second, other)
    second.close()


def test_sums_are_spread_anew_when_layers_are_frozen_and_trained_again() -> None:
    ends = []
    for sums_on in ("host", {"device": 0.5}):
        torch.manual_seed(0)
        model = Chain(6)
        optimizer = ot.offload(
            model, ADAMW, device="cpu", grad_accum_steps=2, sums_on=sums_on, clip_norm=0.3
        )
        on_device = [names_on(optimizer, Tier.DEVICE)]
        stream = batches(8)
        for at, trains in enumerate((True, False, False, True)):
            model.layers[:3].requires_grad_(trains)
            train(optimizer, model, stream[2 * at : 2 * at + 2])
            on_device.append(names_on(optimizer, Tier.DEVICE))
        optimizer.synchronize()
        ends.append([param.detach().clone() for param in model.parameters()])
        if sums_on != "host":
            all_trained, _, frozen, _, unfrozen = on_device
            assert all_trained == unfrozen and frozen not in (set(), all_trained)
        optimizer.close()
    for expected, actual in zip(*ends, strict=True):
        assert torch.equal(expected, actual)


def test_a_limit_of_the_device_counts_sums_before_any_memory_is_allocated() -> None:
    options: dict[str, Any] = {"grad_accum_steps": ACCUM, "working": "host"}
    optimizer = ot.offload(Chain(6), ADAMW, device="cpu", **options)
    limit = optimizer.ledger.total(Tier.DEVICE)
    optimizer.close()
    options["device_memory_limit"] = limit + 4096
    ot.offload(Chain(6), ADAMW, device="cpu", **options).close()
    with pytest.raises(DeviceMemoryError, match="for gradient staging, sums and blocks"):
        ot.offload(Chain(6), ADAMW, device="cpu", sums_on={"device": 0.5}, **options)


@pytest.mark.parametrize("option", ["sums_on", "state_on"])
def test_a_share_too_small_for_any_layer_is_reported(
    option: str, caplog: pytest.LogCaptureFixture
) -> None:
    for share, count in ((0.5, 0), (0.001, 1)):
        options = {option: {"device": share}, "grad_accum_steps": 2}
        ot.offload(Chain(4), device="cpu", **options).close()
        assert caplog.text.count(f"{option} = {{'device': {share:g}}}") == count
