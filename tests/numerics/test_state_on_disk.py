"""State, gradients and weights on the disk: the same engine, the same bits, and a few slots on the
host."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch

import offloadtrain as ot
from offloadtrain.config.errors import DiskError
from offloadtrain.engine.salvage import SalvageError
from offloadtrain.runtime import disk_arena
from offloadtrain.runtime.lanes import Lane, LaneError, Lanes, SequentialLanes, on_lanes
from offloadtrain.runtime.lanes.recorder import RecordingLanes
from offloadtrain.runtime.lanes.seeded import SeededLanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.layout.step_spec import STATE_SLOTS
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.operations import Kind, Launch
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.prove import order, prove
from offloadtrain.step.proof.recording import Launched, Waited, trace
from tests.engine.test_proof import MODES, options_of, run, waits
from tests.numerics.models import MODELS, STREAMED, Chain, batches
from tests.numerics.muon import RULE
from tests.numerics.test_offload import compare, train
from tests.step.specs import chain
from tests.step.test_drive import OPTIONS, STEPS, compared

LANES: dict[str, Callable[[], Lanes]] = {
    "in order": SequentialLanes,
    "threads": lambda: ThreadLanes(seed=3, longest_delay_ms=1.0),
    "seeded": lambda: SeededLanes(7),
    "late": lambda: SeededLanes(8, late=True),
}
EXACT = [mode for mode in MODES if "speculative" not in mode]
FORMATS = ["fp32", "split16", "int8"]
TIERS: dict[str, dict[str, Any]] = {
    "state": {},
    "state, working": {"working": "disk"},
    "state, grad": {"grad_on": "disk"},
    "state, grad, working": {"working": "disk", "grad_on": "disk"},
    "half, grad, working": {"working": "disk", "grad_on": "disk", "state_on": {"disk": 0.5}},
    "three tiers, working": {
        "working": "disk",
        "resident_blocks": 2,
        "state_on": {"device": 0.3, "disk": 0.4},
    },
    "working": {"working": "disk", "state_on": "host"},
}
"""What is on the disk."""


def tiers_for(tiers: str, mode: str) -> dict[str, Any]:
    """Options of `offload`: mode "delayed" has its gradients on the host."""
    given = TIERS[tiers]
    return {key: one for key, one in given.items() if mode != "delayed" or key != "grad_on"}


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    """Options of `offload`; the folder of temporary files may be in memory."""
    return {"state_on": "disk", "scratch_dir": str(tmp_path), "scratch_in_memory": True}


@pytest.mark.slow
@pytest.mark.cover(1, 1)
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_a_resident_run(
    disk: dict[str, Any], name: str, precision: str, accum: int
) -> None:
    compare(name, precision, accum=accum, clip=0.5, **disk)


@pytest.mark.slow
def test_the_bits_of_a_resident_run_on_threads(disk: dict[str, Any]) -> None:
    lanes = ThreadLanes()
    lanes.poison = True
    with on_lanes(lanes):
        compare("tied", "bf16", clip=0.5, **disk)


@pytest.mark.slow
@pytest.mark.cover(1, 1)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("working", ["device", "host"])
@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("state", FORMATS)
def test_any_legal_order_has_the_bits_of_state_on_the_host(
    disk: dict[str, Any], state: str, mode: str, working: str, accum: int, lanes: str
) -> None:
    options = options_of(mode, "bf16") | {"working": working, "accum": accum, "steps": 4}
    chosen = LANES[lanes]()
    chosen.poison = True
    expected = run(SequentialLanes(), "chain", state, **options)
    found = run(chosen, "chain", state, **options, **disk)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.slow
@pytest.mark.parametrize("mode", EXACT)
def test_matrices_have_the_same_bits(disk: dict[str, Any], mode: str) -> None:
    expected = run(SequentialLanes(), "chain", rule=RULE, **MODES[mode])
    found = run(LANES["seeded"](), "chain", rule=RULE, **MODES[mode], **disk)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.slow
@pytest.mark.cover(1, 1)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("rule", [None, RULE], ids=["adamw", "muon"])
@pytest.mark.parametrize("tiers", [one for one in TIERS if one != "state"])
@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("state", FORMATS)
def test_gradients_and_weights_on_the_disk_have_the_same_bits(
    disk: dict[str, Any], state: str, mode: str, tiers: str, rule: Any, accum: int, lanes: str
) -> None:
    chosen, kept = LANES[lanes](), "fp32" if rule else state
    chosen.poison = True
    options = {**MODES[mode], "accum": accum, "steps": 4, **({"rule": rule} if rule else {})}
    expected = run(SequentialLanes(), "chain", kept, **options)
    found = run(chosen, "chain", kept, **options, **disk | tiers_for(tiers, mode))
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.slow
@pytest.mark.cover(1, 1)
@pytest.mark.parametrize("sums_on", ["host", "device"])
@pytest.mark.parametrize("name", STREAMED)
def test_gradients_and_weights_on_the_disk_of_any_model(
    disk: dict[str, Any], name: str, sums_on: str
) -> None:
    """Shared, frozen and skipped blocks; two microbatches."""
    there = disk | TIERS["state, grad, working"]
    compare(name, "bf16", accum=2, clip=0.5, sums_on=sums_on, **there)


SHARES: dict[str, Any] = {
    "half": {"state_on": {"disk": 0.5}},
    "three tiers": {"state_on": {"device": 0.3, "disk": 0.4}},
}


@pytest.mark.slow
@pytest.mark.cover(1, 1)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_a_share_of_the_state_has_the_same_bits(
    disk: dict[str, Any], state: str, share: str, mode: str, lanes: str
) -> None:
    chosen, options = LANES[lanes](), options_of(mode, "bf16")
    chosen.poison = True
    expected = run(SequentialLanes(), "chain", state, accum=2, **options)
    found = run(chosen, "chain", state, accum=2, **options, **disk | SHARES[share])
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    program = recorded(disk | SHARES[share], state, accum=2, **options).program
    assert prove(program) == []


def test_a_share_is_spread_over_the_buckets(disk: dict[str, Any]) -> None:
    optimizer = trained(6, **disk | SHARES["half"])
    spec = optimizer._engine.program.spec
    on_disk = [bucket.is_on_disk for bucket in spec.buckets]
    sizes = [bucket.numel for bucket in spec.buckets]
    found = sum(size for size, there in zip(sizes, on_disk, strict=True) if there)
    assert abs(found / sum(sizes) - 0.5) <= max(sizes) / sum(sizes)
    assert [True, True, True] not in [on_disk[i : i + 3] for i in range(len(on_disk) - 2)]
    assert bytes_of(optimizer, Tier.HOST)["exp_avg"] > 0 < bytes_of(optimizer, Tier.DISK)["exp_avg"]
    optimizer.close()


def recorded(disk: dict[str, Any], *args: Any, **options: Any) -> RecordingLanes:
    lanes = RecordingLanes(SequentialLanes())
    run(lanes, "chain", *args, steps=4, **options, **disk)
    return lanes


@pytest.mark.slow
@pytest.mark.cover(1, 1)
@pytest.mark.parametrize("rule", [ot.AdamW(lr=1e-2), RULE], ids=["adamw", "muon"])
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("working", ["device", "host"])
@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("state", FORMATS)
def test_no_race(
    disk: dict[str, Any], state: str, mode: str, working: str, accum: int, rule: Any
) -> None:
    chosen = "fp32" if rule is RULE else state
    lanes = recorded(disk, chosen, accum=accum, working=working, rule=rule, **MODES[mode])
    assert prove(lanes.program) == []


def test_an_exact_step_has_no_race_and_each_kind_of_wait_is_needed(disk: dict[str, Any]) -> None:
    program = recorded(disk, "split16").program
    assert prove(program) == []
    for waiter, awaited in (
        (Lane.HOST, Lane.DISK_READ),  # Adam, for its state
        (Lane.DISK_WRITE, Lane.HOST),  # the file, for Adam
        (Lane.DISK_READ, Lane.DISK_WRITE),  # the slot's next bucket; and the next step
        (Lane.DISK_READ, Lane.H2D),  # a slot whose weights go up
    ):
        left_out = waits(program, waiter, awaited)
        assert left_out, (waiter, awaited)
        faults = prove([entry for i, entry in enumerate(program) if i not in left_out])
        assert any(fault.kind == "race" for fault in faults), (waiter, awaited)


@pytest.mark.parametrize("state", ["fp32", pytest.param("int8", marks=pytest.mark.slow)])
def test_with_gradients_and_weights_there_each_kind_of_wait_is_needed(
    disk: dict[str, Any], state: str
) -> None:
    program = recorded(disk | TIERS["state, grad, working"], state, accum=2).program
    assert prove(program) == []
    for waiter, awaited in (
        (Lane.LOAD, Lane.DISK_LOAD),  # a load, for its weights
        (Lane.DISK_LOAD, Lane.LOAD),  # their slot's next bucket
        (Lane.DISK_LOAD, Lane.DISK_WRITE),  # weights, for their update
        (Lane.HOST, Lane.DISK_READ),  # a sum, for what it adds to; Adam, for gradient and state
        (Lane.DISK_WRITE, Lane.HOST),  # a gradient, for its sum
        (Lane.DISK_READ, Lane.DISK_WRITE),  # a slot's next bucket; a gradient, for its own write
    ):
        left_out = waits(program, waiter, awaited)
        assert left_out, (waiter, awaited)
        faults = prove([entry for i, entry in enumerate(program) if i not in left_out])
        assert any(fault.kind == "race" for fault in faults), (waiter, awaited)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["state", "state, grad, working"])
def test_every_wait_is_needed_or_follows_from_others(disk: dict[str, Any], tiers: str) -> None:
    whole = recorded(disk | TIERS[tiers], "split16").program
    before, needed = order(whole), 0
    for index, entry in enumerate(whole):
        if isinstance(entry, Waited):
            without = whole[:index] + whole[index + 1 :]
            if prove(without):
                assert order(without) != before
                needed += 1
    assert needed > 40


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in OPTIONS if mode != "speculative"])
@pytest.mark.parametrize("tiers", ["state", "state, grad, working"])
@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_driven_without_a_model_it_is_what_the_engine_does(
    disk: dict[str, Any], mode: str, tiers: str, state: str
) -> None:
    options = {"state": state, **disk, **tiers_for(tiers, mode)}
    assert compared(mode, 1, options, batches(STEPS)) == ""


def test_no_update_waits_for_the_write_of_the_bucket_before() -> None:
    """While the host updates a bucket, the next is read and the one before is written."""
    spec = chain(6, state_on="disk", scratch_dir="x")
    program = trace(spec, steps(Program(spec), 3))
    reads, writes = (list(Lane).index(lane) for lane in (Lane.DISK_READ, Lane.DISK_WRITE))
    clocks = zip((e for e in program if isinstance(e, Launched)), order(program), strict=True)
    updates = [at for e, at in clocks if e.name.startswith(Kind.ADAM)]
    # The n-th update has waited for the n-th read, and for no write but those that free its slot.
    assert [at[reads] for at in updates] == list(range(1, 19))
    assert min(at[reads] - at[writes] for at in updates[1:]) == 2


def test_no_load_of_weights_waits_for_the_update_of_later_blocks() -> None:
    """All reads of an update are launched before the next forward."""
    spec = chain(6, state_on="disk", working="disk", grad_on="disk", state="int8", scratch_dir="x")
    program = trace(spec, steps(Program(spec), 3))
    updates = list(Lane).index(Lane.DISK_WRITE)
    clocks = zip((e for e in program if isinstance(e, Launched)), order(program), strict=True)
    loads = [at for e, at in clocks if e.name.startswith(Kind.READ_WEIGHTS)]
    # Of the last step's forward: each one waits for the write of its own state, and of no other.
    forward = [at[updates] for at in loads[-16:-10]]
    assert forward == sorted(forward) and forward[0] < forward[-1]


def test_updated_at_once_a_gradient_is_not_written() -> None:
    spec = chain(6, "early", state_on="disk", working="disk", grad_on="disk", scratch_dir="x")
    launches = [op for op in steps(Program(spec), 3) if isinstance(op, Launch)]
    first = next(at for at, op in enumerate(launches) if op.kind is Kind.DECIDE)
    kinds = {op.kind for op in launches[:first]}
    assert Kind.WRITE_GRADIENT in kinds, "no update runs inside the first backward"
    later = [op.kind for op in launches[first + 30 :]]
    assert Kind.WRITE_GRADIENT not in later and Kind.READ_GRADIENT not in later


def test_the_slots_are_filled_before_the_norm_is_known() -> None:
    spec = chain(6, state_on="disk", scratch_dir="x")
    launches = [op for op in steps(Program(spec), 2) if isinstance(op, Launch)]
    last = max(at for at, op in enumerate(launches) if op.kind is Kind.DECIDE)
    read = [op.owner for op in launches[:last] if op.kind is Kind.READ_STATE]
    assert read == [b.name for b in spec.buckets] + [b.name for b in spec.buckets[:STATE_SLOTS]]


def trained(depth: int, **options: Any) -> ot.OffloadOptimizer:
    torch.manual_seed(0)
    model = Chain(depth)
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", clip_norm=0.5, **options)
    for tokens in batches(3):
        train(optimizer, model, [tokens])
    optimizer.synchronize()
    return optimizer


def bytes_of(optimizer: ot.OffloadOptimizer, tier: Tier) -> dict[str, int]:
    return {row.owner: row.bytes for row in optimizer.ledger.rows() if row.tier == tier}


@pytest.mark.parametrize(
    "state",
    [one if one == "int8" else pytest.param(one, marks=pytest.mark.slow) for one in FORMATS],
)
def test_host_memory_does_not_grow_with_the_model(disk: dict[str, Any], state: str) -> None:
    sizes = []
    there = disk | TIERS["state, grad, working"]
    for depth in (4, 12):
        optimizer = trained(depth, state=state, **there)
        host, on_disk = bytes_of(optimizer, Tier.HOST), bytes_of(optimizer, Tier.DISK)
        slots = sum(size for owner, size in host.items() if owner.endswith("slots"))
        sizes.append((slots, sum(on_disk.values())))
        assert set(host) <= {"state slots", "gradient slots", "weight slots", "norms", "padding"}
        assert {"exp_avg", "gradients"} <= on_disk.keys()
        optimizer.close()
        assert optimizer.ledger.total(Tier.DISK) == optimizer.ledger.total(Tier.HOST) == 0
    (few_slots, few), (many_slots, many) = sizes
    assert many_slots == few_slots and many > 2 * few


def test_a_state_goes_to_the_disk_and_back(disk: dict[str, Any]) -> None:
    """A state dict of either placement continues in the other to the bit."""
    whole = trained(3)
    expected = {name: state["exp_avg"].clone() for name, state in whole.named_state()}
    whole.close()
    for before, after in (({}, disk), (disk, {})):
        first = trained_for(1, None, **before)
        second = trained_for(2, first.state_dict(), **after)
        for name, state in second.named_state():
            assert torch.equal(state["exp_avg"], expected[name]), name
        first.close()
        second.close()


def trained_for(steps: int, begun: dict[str, Any] | None, **options: Any) -> ot.OffloadOptimizer:
    """The first of three steps, or, behind its state, the other two."""
    torch.manual_seed(0)
    model = Chain(3)
    optimizer = ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", clip_norm=0.5, **options)
    if begun is not None:
        optimizer.load_state_dict(begun)
    for tokens in batches(3)[-steps:] if begun else batches(3)[:steps]:
        train(optimizer, model, [tokens])
    optimizer.synchronize()
    return optimizer


@pytest.mark.slow
def test_the_file_has_no_name(disk: dict[str, Any], tmp_path: Path) -> None:
    optimizer = trained(3, **disk)
    assert list(tmp_path.iterdir()) == []
    optimizer.close()


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("pwrite", errno.ENOSPC),
        pytest.param("pwrite", errno.EIO, marks=pytest.mark.slow),
        ("preadv", errno.EIO),
    ],
)
def test_a_full_or_failing_disk_is_named(
    disk: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    optimizer = trained(3, **disk)
    model = optimizer.model

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises((DiskError, LaneError)) as raised:
            for tokens in batches(2):
                train(optimizer, model, [tokens])
            optimizer.synchronize()
    said = str(raised.value)
    verb = "reading" if call == "preadv" else "writing"
    assert re.search(rf"{verb} [\d.]+ KiB of optimizer state in scratch_dir = '{tmp_path}'", said)
    assert errno.errorcode[code] in said and "state_on = 'host'" in said
    optimizer.close()


def test_requests_refused_at_once_go_through_the_page_cache(
    disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with memory that the device does not take: each of them is tried again."""
    optimizer, real, refused = trained(3, **disk), os.pwrite, Barrier(2)

    def pwrite(*given: Any) -> int:
        if fcntl.fcntl(given[0], fcntl.F_GETFL) & os.O_DIRECT:
            with suppress(BrokenBarrierError):
                refused.wait(0.2)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(*given)

    monkeypatch.setattr(os, "pwrite", pwrite)
    train(optimizer, optimizer.model, [batches(1)[0]])
    optimizer.synchronize()
    optimizer.close()


@pytest.mark.slow
@pytest.mark.default_lanes  # the seeded ones go on after a failure
def test_a_short_read_is_a_failure(disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = trained(3, **disk)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises((DiskError, LaneError), match="EIO"):
        train(optimizer, optimizer.model, [batches(1)[0]])
        optimizer.synchronize()
    optimizer.close()


def test_too_little_space_is_told_before_host_memory_is_mapped(
    disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_arena, "free_bytes", lambda folder: 4096)
    monkeypatch.setattr("offloadtrain.runtime.arena._Slab", lambda *_, **__: pytest.fail("mapped"))
    with pytest.raises(DiskError, match=r"needs .* KiB in scratch_dir = .*: 4.0 KiB is free"):
        trained(3, **disk)


def test_a_folder_in_memory_is_refused(
    disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_arena, "kind_of", lambda folder: "tmpfs")
    with pytest.raises(DiskError, match="is on tmpfs, which is host memory"):
        trained(3, **disk | {"scratch_in_memory": False})
    trained(3, **disk).close()


@pytest.mark.slow
def test_state_on_the_disk_is_not_salvaged(disk: dict[str, Any]) -> None:
    optimizer = trained(3, **disk)
    with pytest.raises(SalvageError, match=r"the state of (\d+) of \1 buckets was on the disk"):
        optimizer.salvage(RuntimeError("lost"))
    optimizer.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"update": "speculative"}, "a second copy of the state in host memory"),
        ({"checkpoint_spill": 1 << 20}, "none is there"),
        ({"scratch_dir": None}, "without scratch_dir"),
        ({"scratch_dir": None, "state_on": {"disk": 0.5}}, "without scratch_dir"),
        ({"state_on": "host"}, "is for state on the disk"),
        ({"state_on": "host", "working": "disk", "update": "speculative"}, "working = 'disk'"),
        ({"state_on": "host", "working": "disk", "scratch_dir": None}, "without scratch_dir"),
        ({"state_on": "host", "working": "disk", "grad_on": "disk"}, "where its state is"),
        ({"grad_on": "disk", "update": "delayed"}, "grad_on = 'host'"),
        ({"grad_on": "dist"}, "did you mean disk"),
        ({"state_on": "device", "working": "disk"}, "updated on the host"),
    ],
)
def test_what_has_no_meaning_there(
    disk: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ot.offload(Chain(), device="cpu", **disk | options)
