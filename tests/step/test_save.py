"""A checkpoint is written beside the next steps: only the next update of a bucket waits for it, and
none for what the spill holds."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.hardware.direct_io import BLOCK
from offloadtrain.step.layout.formats import ITEMSIZE
from offloadtrain.step.layout.step_spec import SPILL_BLOCK, Fields, SpillPart, StepSpec, spill
from offloadtrain.step.program.operations import Kind, Lane, Launch, Operation, Operations, Wait
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.prove import prove_operations
from offloadtrain.step.proof.simulate import simulated, steady, timed
from tests import levels
from tests.step.specs import UPDATES, Case, cases, chain

PLACED: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": {"working": "host"},
    "state on the device": {"state_on": "device"},
    "narrow": {"state": "int8"},
    "microbatches": {"grad_accum_steps": 2},
    "spilled": {"checkpoint_spill": 8 * SPILL_BLOCK},
    "narrow, spilled": {"state": "split16", "checkpoint_spill": 5 * SPILL_BLOCK},
    "streamed, all spilled": {"working": "host", "checkpoint_spill": 1 << 30},
}
"""A bucket of these blocks has fields of three blocks, the other one of one."""


def driven(spec: StepSpec, rank: int = 0) -> Operations:
    return steps(Program(spec, rank), 5, saved={2, 3})


def made(update: str, placed: str, ranks: int = 1, **options: Any) -> StepSpec:
    return chain(3, update, ranks, sizes=(3000, 200), **PLACED[placed], **options)


def specs(update: str) -> list[StepSpec]:
    """In every placement that this way to update can have."""
    early = update in ("exact", "early")
    return [made(update, name) for name in PLACED if early or name != "state on the device"]


@levels.examples(100)
@given(cases())
def test_a_save_of_any_model_has_no_race(case: Case) -> None:
    assert prove_operations(case.spec, case.driven(4, saved={2, 3}), case.rank) == []


@levels.examples(100)
@given(cases())
def test_an_average_of_any_model_has_no_race(case: Case) -> None:
    operations = case.driven(4, averaged={1, 2, 3}, saved={2})
    assert prove_operations(case.spec, operations, case.rank) == []


@levels.each("update", UPDATES)
def test_an_average_is_after_all_updates_and_holds_up_no_upload(update: str) -> None:
    """On the host, whose lane it is, it waits for nothing; from the device, each update waits for
    its own bucket's."""
    for spec in specs(update):
        operations = steps(Program(spec), 3, averaged={1, 2})
        averages = [op for op in launched(operations) if op.kind is Kind.AVERAGE]
        assert len(averages) == 2 * len(spec.save_order)
        if {op.lane for op in averages} == {Lane.HOST}:
            assert named_waits(operations) == named_waits(steps(Program(spec), 3))
        for op in operations:
            if isinstance(op, Wait) and op.event.kind is Kind.AVERAGE:
                assert isinstance(op.who, Launch) and op.who.kind in (Kind.ADAM, Kind.CAST)
                assert op.who.owner == op.event.owner


@levels.each("placed", ["resident", "spilled"])
@levels.each("update", UPDATES)
def test_each_wait_of_a_save_is_needed(update: str, placed: str) -> None:
    spec = made(update, placed)
    operations = driven(spec)
    waits = [op for op in operations if isinstance(op, Wait) and _of_writes(op)]
    # In mode "delayed" the upload waits, over the weights that are written, and Adam for that.
    waiting = Lane.H2D if update == "delayed" else Lane.HOST
    expected = {(Lane.WRITE, Lane.HOST), (waiting, Lane.WRITE)}
    if placed == "spilled":
        # The next save copies over what the one before it has written.
        expected.add((Lane.HOST, Lane.WRITE))
        # Where all state is in the spill, only the weights in use are read in place.
        expected |= {(Lane.WRITE, Lane.H2D)} if update == "delayed" else set()
    assert {(op.lane, op.event.lane) for op in waits} == expected
    for left_out in waits:
        remaining: list[Operation] = [op for op in operations if op is not left_out]
        assert {fault.kind for fault in prove_operations(spec, remaining)} == {"race"}


def named_waits(operations: Operations) -> list[tuple[Lane, Lane, str]]:
    return [(op.lane, op.event.lane, op.event.name) for op in operations if isinstance(op, Wait)]


def launched(operations: Operations) -> list[Launch]:
    return [op for op in operations if isinstance(op, Launch)]


def _of_writes(op: Wait) -> bool:
    return Lane.WRITE in (op.lane, op.event.lane)


@levels.each("update", UPDATES)
def test_a_save_writes_every_value_once(update: str) -> None:
    for spec in specs(update):
        check_written(spec)


def check_written(spec: StepSpec) -> None:
    written: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for op in launched(steps(Program(spec), 3, saved={2})):
        for part, ref in zip(op.written, op.reads, strict=True) if op.kind is Kind.WRITE else ():
            # What it reads begins with the part, and holds all of it.
            assert ref.hi - ref.lo >= part.hi - part.lo > 0
            written.setdefault((op.owner, part.buffer), []).append((part.lo, part.hi))
    ends = {key: sorted(parts)[-1][1] for key, parts in written.items()}
    for key, parts in written.items():
        lows, highs = zip(*sorted(parts), strict=True)
        assert [*lows, ends[key]] == [0, *highs]
    sizes = {
        (bucket.name, number): numel
        for bucket in spec.buckets
        for number, (numel, _) in enumerate(bucket.field_sizes)
    }
    assert {key: ends[key] for key in sizes} == sizes


RATE = 1e4
"""Bytes of the disk per second: a bucket of 3,072 values is written in 3.7 s."""


def _seconds(op: Launch) -> float:
    if op.kind is Kind.WRITE:
        parts = zip(op.written, op.reads, strict=True)
        return sum((part.hi - part.lo) * ITEMSIZE[ref.dtype] for part, ref in parts) / RATE
    usual = {Kind.FORWARD: 0.5, Kind.BACKWARD: 1.0, Kind.ADAM: 0.2}
    return usual.get(op.kind, 0.02)


@pytest.mark.parametrize(("update", "blocks"), levels.array([*UPDATES], [0, 4, 9, 20, 200]))
def test_a_save_stalls_no_longer_than_the_disk_is_slower(update: str, blocks: int) -> None:
    """Stall of a save: the time of writing, less one step and what the spill takes. A tenth more is
    for what comes behind the last wait."""
    spec = chain(8, update, sizes=(3000,), checkpoint_spill=blocks * SPILL_BLOCK)
    operations = launched(steps(Program(spec), 12, saved={4}))
    write_s = sum(_seconds(op) for op in operations if op.kind is Kind.WRITE)
    step_s = steady(spec, _seconds).seconds
    spill_s = sum(spec.spill_bytes(bucket) for bucket in spec.buckets) / RATE
    stall_s = _last_compute(spec, {4}) - _last_compute(spec, ())
    assert stall_s <= 1.1 * max(0.0, write_s - step_s - spill_s)


def _last_compute(spec: StepSpec, saved: Container[int]) -> float:
    program = timed(steps(Program(spec), 12, saved=saved))
    ends = [end for end, _ in simulated(program, _seconds)]
    timeline = zip(program, ends, strict=True)
    return max(end for step, end in timeline if step.op.lane is Lane.COMPUTE)


# A save copies the end of what it writes, as much as the spill holds.


FIELDS = st.lists(st.tuples(st.integers(0, 9000), st.sampled_from([1, 2, 4])), max_size=4)


def test_a_field_is_cut_where_disks_need_no_copy() -> None:
    assert SPILL_BLOCK % BLOCK == 0


def test_the_last_bytes_are_copied() -> None:
    buckets = [("first", [(2048, 4)]), ("last", [(4096, 4), (1000, 2), (1024, 4)])]
    result = spill(buckets, 5 * SPILL_BLOCK + 100)
    assert result == {
        "last": [
            SpillPart(0, 1024, 4096, 2048, 3),
            SpillPart(1, 0, 1000, 2048, 1),
            SpillPart(2, 0, 1024, 0, 1),
        ]
    }
    assert spill(buckets, 7 * SPILL_BLOCK)["first"] == [SpillPart(0, 1024, 2048, 0, 1)]
    assert spill(buckets, SPILL_BLOCK - 1) == {}


@given(st.lists(FIELDS, max_size=5), st.integers(0, 60 * SPILL_BLOCK))
def test_parts_lie_apart_and_use_the_room(buckets: list[Fields], limit: int) -> None:
    result = spill([(str(number), fields) for number, fields in enumerate(buckets)], limit)
    num_blocks, left = 0, 0
    for number, fields in enumerate(buckets):
        parts = {part.field: part for part in result.get(str(number), ())}
        for field, (numel, size) in enumerate(fields):
            part = parts.pop(field, None)
            # What is left of a field lies in front of what is copied, and nothing behind it is
            # left: the copied parts are the end of all that is written.
            rest = numel if part is None else part.lo
            assert not (rest and left < 0)
            if part is not None:
                assert part.hi == numel and part.lo * size % SPILL_BLOCK == 0
                assert 0 < (numel - part.lo) * size <= part.blocks * SPILL_BLOCK
                left = -1
            num_blocks += 0 if part is None else part.blocks
        assert not parts
        places = sorted((p.offset * fields[p.field][1], p) for p in result.get(str(number), ()))
        ends = [at + part.blocks * SPILL_BLOCK for at, part in places]
        assert [at for at, _ in places] == [0, *ends[:-1]][: len(places)]
    every = sum(-(-numel * size // SPILL_BLOCK) for fields in buckets for numel, size in fields)
    assert num_blocks == min(every, limit // SPILL_BLOCK)
