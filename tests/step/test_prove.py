"""The prover says yes and no as somebody who tries every order would."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.step.layout.buffers import Memory
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import (
    HostWait,
    Kind,
    Lane,
    Launch,
    Operation,
    Ref,
    Wait,
)
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.prove import prove, prove_operations
from offloadtrain.step.proof.recording import (
    Bytes,
    Closed,
    Entry,
    Launched,
    Opened,
    Recorded,
    Waited,
)
from offloadtrain.step.proof.recording import Undefined as Undefine
from tests import levels
from tests.step.specs import chain

STREAMED = chain(3, "exact", 2, working="host", zero_stage=3, reduction="fp32", grad_accum_steps=2)
RESIDENT = chain(3, "delayed", sizes=(300, 200))
SUMMED = chain(3, sizes=(300, 200), grad_accum_steps=2)


@cache
def driven(spec: StepSpec) -> tuple[Operation, ...]:
    return tuple(steps(Program(spec), 3))


def faults(spec: StepSpec, operations: Sequence[Operation]) -> set[str]:
    return {fault.kind for fault in prove_operations(spec, operations)}


# ---- traced programs that somebody has spoiled


def pairs(spec: StepSpec) -> list[tuple[Lane, Lane]]:
    """(who, for whom) of its waits."""
    fault_kinds = {(op.lane, op.event.lane): None for op in driven(spec) if isinstance(op, Wait)}
    return sorted(fault_kinds)


@pytest.mark.parametrize(
    ("spec", "who", "whom"),
    [
        pytest.param(spec, *pair, id=f"{name}: {' for '.join(pair)}")
        for name, spec in (("streamed", STREAMED), ("resident", RESIDENT))
        for pair in pairs(spec)
    ],
)
def test_a_kind_of_wait_left_out_is_a_race(spec: StepSpec, who: Lane, whom: Lane) -> None:
    def left_out(op: Operation) -> bool:
        return isinstance(op, Wait) and (op.lane, op.event.lane) == (who, whom)

    assert faults(spec, [op for op in driven(spec) if not left_out(op)]) == {"race"}


@pytest.mark.parametrize(
    ("spec", "tier", "lane"), [(SUMMED, "host", Lane.COMPUTE), (RESIDENT, "device", Lane.HOST)]
)
def test_who_reads_the_norm_needs_the_wait_of_the_thread(
    spec: StepSpec, tier: str, lane: Lane
) -> None:
    """The thread's wait orders what the lane that measures does anyway: its reader on another lane
    is what needs it."""
    operations = list(driven(spec))
    at = next(i for i, op in enumerate(operations) if isinstance(op, HostWait))
    norms = Ref(Memory.NORMS, tier, 0, 0, spec.num_tensors, "float64")
    reader = Launch(Kind.DECIDE, lane, "", (norms,))
    assert faults(spec, [*operations[: at + 1], reader]) == set()
    assert faults(spec, [*operations[:at], reader]) == {"race"}


@pytest.mark.parametrize(
    ("spec", "kind"),
    [(RESIDENT, Kind.GATHER), (STREAMED, Kind.GRAD_DOWN), (STREAMED, Kind.ROUND)],
    ids=["staging", "host staging", "rounded"],
)
def test_memory_that_nobody_has_written_is_not_read(spec: StepSpec, kind: Kind) -> None:
    """A launch that is left out leaves what it should have written as it was."""

    def left_out(op: Operation) -> bool:
        return isinstance(op, Launch) and op.kind is kind

    operations = [op for op in driven(spec) if not left_out(op)]
    assert "uninitialised" in faults(spec, operations)


ON_DISK = chain(4, state_on="disk")


@pytest.mark.parametrize(
    ("spec", "rank", "left_out", "reader"),
    [
        (STREAMED, 0, Kind.GATHER, Kind.REDUCE_SCATTER),
        (STREAMED, 0, Kind.LOAD, Kind.ALL_GATHER),
        (STREAMED, 1, Kind.LOAD, Kind.ALL_GATHER),
        (ON_DISK, 0, Kind.READ_STATE, Kind.ADAM),
    ],
)
def test_what_an_operation_changes_in_place_was_written(
    spec: StepSpec, rank: int, left_out: Kind, reader: Kind
) -> None:
    operations = steps(Program(spec, rank), 3)
    assert prove_operations(spec, operations, rank) == []
    remaining = [op for op in operations if not (isinstance(op, Launch) and op.kind is left_out)]
    messages = {
        fault.message for fault in prove_operations(spec, remaining, rank) if fault.kind != "race"
    }
    assert any(
        f"'{reader} " in item and "reads what nobody has written" in item for item in messages
    )


# ---- entries, one by one


def piece(lo: int, hi: int) -> Bytes:
    return Bytes("memory", lo, hi)


def launched(lane: Lane, *, reads: Sequence[Bytes] = (), writes: Sequence[Bytes] = ()) -> Launched:
    return Launched(lane, lane.value, tuple(reads), tuple(writes))


def fault_kinds(*entries: Entry) -> list[str]:
    return [fault.kind for fault in prove(entries)]


def test_a_span_lasts_until_it_is_closed() -> None:
    opened = Opened(1, "forward", (piece(0, 4),), ())
    writes = launched(Lane.H2D, writes=[piece(0, 4)])
    ordered = Recorded(Lane.COMPUTE, 1), Waited(Lane.H2D, 1, "forward")
    assert fault_kinds(opened, Closed(1), *ordered, writes) == []
    assert fault_kinds(opened, *ordered, Closed(1), writes) == ["race"]
    assert fault_kinds(opened, *ordered, writes, Closed(1)) == ["race"]
    assert fault_kinds(opened) == ["unclosed"]
    assert fault_kinds(Opened(1, "empty", (), ())) == []


# ---- any program, against every order


@st.composite
def programs(draw: st.DrawFn) -> list[Entry]:
    """Launches, spans, events and waits over eight bytes."""
    ends = st.tuples(st.integers(0, 7), st.integers(1, 3)).map(lambda e: piece(e[0], e[0] + e[1]))
    touched = st.lists(ends, max_size=2)
    lane = st.sampled_from([Lane.COMPUTE, Lane.HOST, Lane.H2D])
    made: list[Entry] = []
    events = spans = 0
    open_spans: list[int] = []
    for _ in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from("lllrrwwhsu"))
        if kind == "l":
            made.append(launched(draw(lane), reads=draw(touched), writes=draw(touched)))
        elif kind == "r":
            made.append(Recorded(draw(lane), events))
            events += 1
        elif kind in "wh" and events:
            who = None if kind == "h" else draw(lane)
            made.append(Waited(who, draw(st.integers(0, events - 1)), "why"))
        elif kind == "s" and open_spans and draw(st.booleans()):
            made.append(Closed(open_spans.pop(draw(st.integers(0, len(open_spans) - 1)))))
        elif kind == "s":
            made.append(Opened(spans, "span", tuple(draw(touched)), tuple(draw(touched))))
            open_spans.append(spans)
            spans += 1
        elif kind == "u":
            made.append(Undefine(draw(ends)))
    return [*made, *map(Closed, open_spans)]


def raced(program: Sequence[Entry]) -> bool:
    """By the definition: points in time, the arrows between them, and who reaches whom."""
    after: list[set[int]] = []
    """Entry → all entries that are done before it starts."""
    last: dict[Lane, set[int]] = {lane: set() for lane in Lane}
    thread: set[int] = set()
    events: dict[int, set[int]] = {}
    opened: dict[int, int] = {}
    touched: list[tuple[int, int, Lane, Bytes, bool]] = []
    """First and last entry, lane, bytes, whether they are written."""
    for number, entry in enumerate(program):
        before: set[int] = set()
        match entry:
            case Launched(lane, _, reads, writes):
                before = last[lane] | thread
                last[lane] = before | {number}
                touched += [(number, number, lane, r, False) for r in reads]
                touched += [(number, number, lane, w, True) for w in writes]
            case Opened(span, _, reads, writes):
                before = last[Lane.COMPUTE] | thread
                last[Lane.COMPUTE] = before | {number}
                opened[span] = number
                end = next(
                    i for i, e in enumerate(program) if isinstance(e, Closed) and e.span == span
                )
                touched += [(number, end, Lane.COMPUTE, r, False) for r in reads]
                touched += [(number, end, Lane.COMPUTE, w, True) for w in writes]
            case Closed():
                before = last[Lane.COMPUTE] | thread
                last[Lane.COMPUTE] = before | {number}
            case Recorded(lane, event):
                events[event] = last[lane] | thread
            case Waited(None, event, _):
                thread = thread | events[event]
            case Waited(lane, event, _):
                assert lane is not None
                last[lane] = last[lane] | events[event]
        after.append(before)
    return any(
        (a_writes or b_writes)
        and a_lane is not b_lane
        and a.overlaps(b)
        and a_last not in after[b_first]
        and b_last not in after[a_first]
        for a_first, a_last, a_lane, a, a_writes in touched
        for b_first, b_last, b_lane, b, b_writes in touched
    )


def reads_nothing(program: Sequence[Entry]) -> bool:
    """Whether a byte is read behind the mark that it is undefined and in front of its next write,
    in the order of launch."""
    undefined: set[int] = set()
    for entry in program:
        if isinstance(entry, Undefine):
            undefined |= set(range(entry.bytes.lo, entry.bytes.hi))
        elif isinstance(entry, Launched | Opened):
            if any(undefined & set(range(r.lo, r.hi)) for r in entry.reads):
                return True
            undefined -= {byte for w in entry.writes for byte in range(w.lo, w.hi)}
    return False


@levels.examples(600)
@given(programs())
def test_faults_are_those_of_the_definition(program: list[Entry]) -> None:
    kinds = {fault.kind for fault in prove(program)}
    assert ("race" in kinds) == raced(program)
    if "race" not in kinds:
        assert ("uninitialised" in kinds) == reads_nothing(program)
    assert kinds <= {"race", "uninitialised"}
