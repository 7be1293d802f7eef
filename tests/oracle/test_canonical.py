"""What the canonical form of a program tells apart, and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from offloadtrain.runtime.lanes import Buffer, Lane, SequentialLanes
from offloadtrain.step.proof.prove import prove
from offloadtrain.step.proof.recording import (
    Bytes,
    Closed,
    Entry,
    Launched,
    Opened,
    Recorded,
    Undefined,
    Waited,
)
from tests.oracle import runs
from tests.oracle.canonical import END, canonical
from tests.oracle.cases import Case
from tests.recording_lanes import RecordingLanes

EXAMPLES = [
    Case(mode=mode, placement=placement, accum=accum)
    for mode, placement, accum in (
        ("exact", "on the device", 1),
        ("early", "streamed, 2 slots", 2),
        ("speculative, wrong", "partly streamed", 1),
        ("delayed", "streamed, inputs offloaded", 2),
    )
]
each_example = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case.mode in ("early", "delayed") else [])
        for case in EXAMPLES
    ],
    ids=lambda case: case.mode,
)


@cache
def program(case: Case) -> tuple[Entry, ...]:
    lanes = runs.KeepingLanes()
    loop = runs.offloaded(case, lambda: lanes)
    loop.step()
    loop.step()
    loop.optimizer.synchronize()
    loop.optimizer.close()
    return tuple(lanes.program)


def moved(entry: Entry, by: Callable[[Bytes], Bytes]) -> Entry:
    match entry:
        case Launched() | Opened():
            reads, writes = (tuple(map(by, bytes_)) for bytes_ in (entry.reads, entry.writes))
            return replace(entry, reads=reads, writes=writes)
        case Undefined(bytes_):
            return Undefined(by(bytes_))
        case _:
            return entry


def lane_of(entry: Entry) -> Lane | None:
    match entry:
        case Launched(lane=lane) | Recorded(lane=lane) | Waited(lane=lane):
            return lane
        case Opened() | Closed():
            return Lane.COMPUTE
        case _:
            return None


@each_example
def test_a_wait_left_out_counts_where_it_is_needed(case: Case) -> None:
    entries, needed = program(case), 0
    expected = canonical(entries)
    for index, entry in enumerate(entries):
        if isinstance(entry, Waited):
            without = [*entries[:index], *entries[index + 1 :]]
            if prove(without):
                assert canonical(without) != expected, entry
                needed += 1
    assert needed > 10


@each_example
def test_another_order_on_a_lane_counts(case: Case) -> None:
    """Every launch changes its place with the next one of its lane, if they differ."""
    entries, changed = program(case), 0
    expected = canonical(entries)
    last: dict[Lane, int] = {}
    for index, entry in enumerate(entries):
        if not isinstance(entry, Launched):
            continue
        before = last.get(entry.lane)
        last[entry.lane] = index
        if before is not None and entries[before] != entry:
            swapped = list(entries)
            swapped[before], swapped[index] = entry, entries[before]
            assert canonical(swapped) != expected, entry
            changed += 1
    assert changed > 10


def recorded(body: Callable[[RecordingLanes], None]) -> list[str]:
    lanes = RecordingLanes(SequentialLanes())
    body(lanes)
    return canonical(lanes.program)


def touch(*_: torch.Tensor) -> None: ...


def in_turn(memories: Sequence[torch.Tensor]) -> Callable[[RecordingLanes], None]:
    """Buffers of four names over these memories."""
    buffers = [Buffer(f"block {i}", memory) for i, memory in enumerate(memories)]

    def body(lanes: RecordingLanes) -> None:
        for buffer in buffers:
            lanes.undefine(buffer.whole, Lane.LOAD)
            lanes.launch(Lane.LOAD, "load", touch, [], [buffer.whole])

    return body


def test_which_slot_counts() -> None:
    a, b, c, d = (torch.zeros(8) for _ in range(4))
    taking_turns, other_slots = recorded(in_turn([a, b, a, b])), recorded(in_turn([c, d, c, d]))
    assert taking_turns == other_slots
    assert taking_turns != recorded(in_turn([a, b, b, a]))
    assert taking_turns != recorded(in_turn([a, b, c, d]))
    assert taking_turns[3] == (
        "load load | writes block 2 in block 0[0:32] | undefined block 2 in block 0[0:32]"
    )


def test_what_is_known_is_named() -> None:
    buffer = Buffer("b", torch.zeros(8))

    def body(lanes: RecordingLanes) -> None:
        for _ in range(2):
            lanes.close_span(lanes.open_span("forward", [buffer.whole]))
        lanes.wait(Lane.D2H, lanes.record(Lane.COMPUTE), "computed")
        lanes.launch(Lane.D2H, "down", touch, [buffer.first(2)], [])
        lanes.host_wait(lanes.record(Lane.D2H), "down")

    assert recorded(body) == [
        "compute forward | reads b[0:32]",
        "compute end forward",
        "compute forward | reads b[0:32]",
        "compute end forward",
        f"compute {END} | after d2h down~1",
        "d2h down | reads b[0:8] | after compute end forward~2",
    ]
