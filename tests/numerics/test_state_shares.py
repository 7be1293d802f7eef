"""A share of the state on the device: the bits of any other placement, bytes where they were asked
for, checkpoints that another split reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.config.errors import DeviceMemoryError
from offloadtrain.engine.salvage import SalvageError
from offloadtrain.runtime.lanes import SequentialLanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.layout import step_spec as spec
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.proof.prove import prove
from tests.engine.test_proof import CASES, MODES, options_of, run
from tests.numerics.models import MODELS, Chain, MixedReentrant, batches, loss_of
from tests.numerics.test_offload import assert_same, compare, make, pair, train

HALF = {"state_on": {"device": 0.5}}


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": False, "clip": None}], ids=str)
def test_the_bits_of_a_resident_run(options: dict[str, Any]) -> None:
    compare("unusual", "bf16", **({"clip": 0.5} | HALF | options))


@pytest.mark.slow
@pytest.mark.cover(2)
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("state", "precision"), CASES)
def test_every_mode_and_format_has_the_bits_of_the_host(
    state: str, precision: str, mode: str, accum: int, share: float
) -> None:
    options = options_of(mode, precision)
    expected = run(SequentialLanes(), "tied", state, precision, accum=accum, **options)
    shared = {"state_on": {"device": share}}
    found = run(ThreadLanes(), "tied", state, precision, accum=accum, **options, **shared)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_buckets_in_pieces(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "STAGING_BYTES", 1000)
    expected = run(SequentialLanes(), "unusual", **MODES[mode])
    found = run(SequentialLanes(), "unusual", **MODES[mode], **HALF)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.slow
@pytest.mark.cover(2)
@pytest.mark.parametrize("split", ["host", {"device": 0.5}], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("state", "precision"), CASES)
def test_sums_on_the_device_have_the_bits_of_the_host(
    state: str, precision: str, mode: str, split: Any
) -> None:
    options = options_of(mode, precision) | {"accum": 3}
    expected = run(SequentialLanes(), "tied", state, precision, **options)
    found = run(
        ThreadLanes(), "tied", state, precision, **options, sums_on="device", state_on=split
    )
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("split", ["host", {"device": 0.5}], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ["tied", "unusual"])
def test_rounded_sums_have_the_bits_of_a_resident_run_that_rounds_them(
    name: str, precision: str, split: Any
) -> None:
    """Once, before their norm, wherever their update runs."""
    keys: dict[str, Any] = {"sums_on": "device", "sums_down": "working", "state_on": split}
    resident, optimizer, model = pair(make(name), precision, accum=3, clip=0.5, **keys)
    resident.rounds_sums = True
    stream = batches(24)
    for at in range(0, 24, 3):
        expected = resident.step(stream[at : at + 3], loss_of)
        assert train(optimizer, model, stream[at : at + 3]) == expected
        assert optimizer.grad_norm == resident.norms[-1]
    assert_same(resident, optimizer, model)
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("state", "precision"), CASES)
def test_rounded_sums_in_any_order_and_without_a_race(
    state: str, precision: str, mode: str
) -> None:
    options = options_of(mode, precision) | {"accum": 3, "sums_on": "device"}
    options |= {"sums_down": "working", "working": "host"}
    recorder = RecordingLanes(SequentialLanes())
    expected = run(recorder, "chain", state, precision, **options)
    assert prove(recorder.program) == []
    lanes = SeededLanes(5)
    lanes.poison = True
    found = run(lanes, "chain", state, precision, **options)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("made", [MixedReentrant, MODELS["skipping"]])
def test_sums_on_the_device_of_gradients_that_come_twice_or_not_at_all(made: Any) -> None:
    found = []
    for sums_on in ("host", "device"):
        torch.manual_seed(0)
        _, optimizer, model = pair(made(), accum=2, clip=0.5, sums_on=sums_on)
        stream = batches(8)
        losses = [train(optimizer, model, stream[at : at + 2]) for at in range(0, 8, 2)]
        found.append((losses, optimizer.grad_norm))
        optimizer.close()
    assert found[0] == found[1]


def test_one_sum_goes_down_for_any_number_of_microbatches() -> None:
    found = {}
    cases: list[tuple[int, str, str]]
    cases = [(1, "host", "fp32"), (4, "host", "fp32"), (4, "device", "fp32")]
    for accum, sums_on, sums_down in (*cases, (4, "device", "working")):
        optimizer = optimizer_of(grad_accum_steps=accum, sums_on=sums_on, sums_down=sums_down)
        for _ in range(2):
            train(optimizer, optimizer.model, batches(accum))
        report = optimizer.last_step
        assert report is not None
        sums = bytes_of(optimizer, Tier.DEVICE, "gradient sums")
        found[accum, sums_on, sums_down] = (report.d2h_bytes, report.h2d_bytes, sums)
        optimizer.close()
    down, up, _ = found[1, "host", "fp32"]
    assert found[4, "host", "fp32"] == (4 * down, up, 0)
    # fp32 instead of bf16, once.
    assert found[4, "device", "fp32"] == (2 * down, up, 2 * down)
    assert found[4, "device", "working"] == (down, up, 2 * down)


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
    found = {}
    for share in (0.0, 0.5):
        optimizer = optimizer_of(state_on={"device": share})
        for tokens in batches(2):
            train(optimizer, optimizer.model, [tokens])
        report = optimizer.last_step
        assert report is not None
        on_device, on_host = bytes_of(optimizer, Tier.DEVICE), bytes_of(optimizer, Tier.HOST)
        found[share] = (on_device, on_host, report.d2h_bytes, report.h2d_bytes)
        optimizer.close()
    whole, down, up = found[0.0][1:]
    device, host, less_down, less_up = found[0.5]
    assert found[0.0][0] == 0 and device + host == whole and 0.3 * whole < device < 0.7 * whole
    assert less_down / down == less_up / up == host / whole


def test_the_first_blocks_of_the_forward_are_on_the_device() -> None:
    optimizer = optimizer_of(**HALF)
    tiers = [bucket.state_tier for bucket in optimizer._engine.program.spec.buckets]
    assert tiers == sorted(tiers) and {*tiers} == {Tier.DEVICE, Tier.HOST}
    optimizer.close()


def test_auto_fills_the_limit() -> None:
    held = {}
    for share in (0.0, 1.0):
        whole = optimizer_of(state_on={"device": share})
        held[share] = whole.ledger.total(Tier.DEVICE)
        whole.close()
    limit = (held[0.0] + held[1.0]) // 2
    optimizer = optimizer_of(state_on="auto", device_memory_limit=limit)
    within = optimizer.ledger.total(Tier.DEVICE)
    optimizer.close()
    assert held[0.0] < within <= limit
    with pytest.raises(DeviceMemoryError, match="of the state on the device: raise it, or lower"):
        optimizer_of(state_on="device", device_memory_limit=limit)


def resumed(splits: list[Any], update: str) -> list[list[float]]:
    """Losses of two steps in each split, which goes on from the state of the one before."""
    stream, found, saved = iter(batches(2 * len(splits))), [], None
    for split in splits:
        torch.manual_seed(0)
        _, optimizer, model = pair(Chain(), update=update, state_on=split)
        if saved is not None:
            optimizer.load_state_dict(saved)
        found += [train(optimizer, model, [next(stream)]) for _ in range(2)]
        saved = optimizer.state_dict()
    return found


@pytest.mark.parametrize("update", ["exact", pytest.param("delayed", marks=pytest.mark.slow)])
def test_a_state_of_one_split_goes_on_in_another_to_the_bit(update: str) -> None:
    splits = [{"device": 0.6}, "host", {"device": 0.3}, "device"]
    assert resumed(splits, update) == resumed(["host"] * 4, update)


def test_a_lost_device_takes_its_state_with_it() -> None:
    optimizer = optimizer_of(**HALF)
    optimizer.backward(loss_of(optimizer.model, batches(1)[0]))
    optimizer.step()
    with pytest.raises(SalvageError, match=r"the state of \d of \d buckets was on the device"):
        optimizer.salvage(RuntimeError("lost"))
