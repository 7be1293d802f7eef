"""Proof that a program of lanes has no race, for every speed of the lanes.

[Note: The proof]
Every lane has a vector clock: the operations of each lane that are known to be complete when its
next operation starts. `record` copies it, `wait` merges it. Two accesses to common bytes, one of
them a write, are ordered if the later one's clock includes the earlier one. If not, some speed of
the lanes runs them in the other order: a race. A step has no branch that depends on timing, so one
program represents all its interleavings. A deadlock cannot be written: an event exists once it is
recorded, so every wait refers to an earlier launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import Lane, Operation
from offloadtrain.step.proof.recording import (
    APART_BITS,
    Bytes,
    Closed,
    Entry,
    Launched,
    Opened,
    Recorded,
    Undefined,
    Waited,
    trace,
)

_LANES = tuple(Lane)
_INDEX = {lane: index for index, lane in enumerate(_LANES)}
_PAGE_BITS = 16
Clock = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """A "race", or an "uninitialised" read, an "unrecorded" event or an "unclosed" span."""

    kind: str
    message: str


@dataclass(slots=True, eq=False)
class _Access:
    bytes: Bytes
    writes: bool
    lane: int
    time: int
    """Position on its lane; for an open span, that of its start, as its end is unknown."""
    name: str
    open: bool = False
    undefined: bool = False


class _Memory:
    """Accesses that a later access may conflict with, by page."""

    def __init__(self, page_bits: int) -> None:
        self._page_bits = page_bits
        self._pages: dict[int, list[_Access]] = {}

    def overlapping(self, bytes_: Bytes) -> dict[_Access, None]:
        """Return each access to these bytes once, in the order in which they were added."""
        return {
            access: None
            for page in self._of(bytes_)
            for access in self._pages.get(page, ())
            if access.bytes.overlaps(bytes_)
        }

    def add(self, access: _Access) -> None:
        for page in self._of(access.bytes):
            self._pages.setdefault(page, []).append(access)

    def remove(self, accesses: Iterable[_Access]) -> None:
        for access in accesses:
            for page in self._of(access.bytes):
                self._pages[page].remove(access)

    def _of(self, bytes_: Bytes) -> range:
        first, last = bytes_.lo >> self._page_bits, (bytes_.hi - 1) >> self._page_bits
        return range(first, last + 1) if bytes_.hi > bytes_.lo else range(0)


class _Proof:
    def __init__(self, page_bits: int) -> None:
        self.faults: list[Fault] = []
        self.clocks: list[Clock] = []
        """The clock of each operation and each span's start, in the order of launch."""
        self._lanes = [(0,) * len(_LANES) for _ in _LANES]
        self._thread: Clock = (0,) * len(_LANES)
        self._events: dict[int, Clock] = {}
        self._memory = _Memory(page_bits)
        self._spans: dict[int, list[_Access]] = {}

    def take(self, entry: Entry) -> None:
        match entry:
            case Launched(lane, name, reads, writes):
                clock = self._advance(lane)
                self.clocks.append(clock)
                self._touch(lane, name, reads, writes, clock)
            # The recording thread has seen everything that it waited for: the event covers that
            # too.
            case Recorded(lane, event):
                self._events[event] = _merged(self._lanes[_INDEX[lane]], self._thread)
            case Waited(lane, event, why):
                recorded = self._events.get(event)
                if recorded is None:
                    self.faults.append(
                        Fault("unrecorded", f"wait for an event never recorded: {why}")
                    )
                # A wait of the launching thread orders all of its later launches, on every lane.
                elif lane is None:
                    self._thread = _merged(self._thread, recorded)
                else:
                    self._lanes[_INDEX[lane]] = _merged(self._lanes[_INDEX[lane]], recorded)
            case Opened(span, name, reads, writes):
                clock = self._advance(Lane.COMPUTE)
                self.clocks.append(clock)
                self._spans[span] = self._touch(Lane.COMPUTE, name, reads, writes, clock, open=True)
            case Closed(span):
                ended = self._advance(Lane.COMPUTE)[_INDEX[Lane.COMPUTE]]
                for access in self._spans.pop(span):
                    access.open, access.time = False, ended
            case Undefined(bytes_):
                mark = _Access(bytes_, False, 0, 0, "undefined", undefined=True)
                self._memory.add(mark)

    def end(self) -> None:
        for accesses in self._spans.values():
            if accesses:
                self.faults.append(Fault("unclosed", f"{accesses[0].name} was never closed"))

    def _advance(self, lane: Lane) -> Clock:
        index = _INDEX[lane]
        clock = list(_merged(self._lanes[index], self._thread))
        clock[index] += 1
        self._lanes[index] = tuple(clock)
        return self._lanes[index]

    def _touch(
        self,
        lane: Lane,
        name: str,
        reads: Sequence[Bytes],
        writes: Sequence[Bytes],
        clock: Clock,
        *,
        open: bool = False,
    ) -> list[_Access]:
        index, made = _INDEX[lane], []
        for bytes_, is_write in [*((r, False) for r in reads), *((w, True) for w in writes)]:
            access = _Access(bytes_, is_write, index, clock[index], name, open)
            self._check(access, clock)
            self._memory.add(access)
            made.append(access)
        return made

    def _check(self, access: _Access, clock: Clock) -> None:
        earlier = self._memory.overlapping(access.bytes)
        if not access.writes and any(e.undefined for e in earlier):
            self._fault("uninitialised", access, "reads what nobody has written")
        for other in earlier:
            conflict = (access.writes or other.writes) and not other.undefined
            if conflict and other.lane != access.lane and not _before(other, clock):
                self._fault("race", access, f"is not ordered after '{other.name}'")
        # A write that covers an access and is ordered after it replaces it: accesses ordered
        # after the write are ordered after both. Only the write is stored.
        if access.writes:
            self._memory.remove(
                e
                for e in earlier
                if e.undefined or (access.bytes.covers(e.bytes) and _before(e, clock))
            )
            for mark in (e for e in earlier if e.undefined):
                for rest in mark.bytes.without(access.bytes):
                    self._memory.add(replace(mark, bytes=rest))

    def _fault(self, kind: str, access: _Access, what: str) -> None:
        lane = _LANES[access.lane].value
        message = f"'{access.name}' on {lane} {what}: both touch {access.bytes.name}"
        self.faults.append(Fault(kind, message))


def prove(program: Iterable[Entry]) -> list[Fault]:
    """Return every race, uninitialised read, wait without an event and unclosed span of a recorded
    program."""
    return _proof(program).faults


def prove_operations(spec: StepSpec, operations: Iterable[Operation], rank: int = 0) -> list[Fault]:
    """Return the faults of a rank's program that was not run, at its real size."""
    return _proof(trace(spec, operations, rank), APART_BITS).faults


def order(program: Iterable[Entry]) -> list[Clock]:
    """Return the clock with which each operation and span starts: the happens-before relation."""
    return _proof(program).clocks


def _proof(program: Iterable[Entry], page_bits: int = _PAGE_BITS) -> _Proof:
    proof = _Proof(page_bits)
    for entry in program:
        proof.take(entry)
    proof.end()
    return proof


def _before(access: _Access, clock: Clock) -> bool:
    """Return True if an access has ended when an operation with this clock starts."""
    return not access.open and clock[access.lane] >= access.time


def _merged(a: Clock, b: Clock) -> Clock:
    return tuple(map(max, a, b))
