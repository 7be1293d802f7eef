"""What of a recorded program counts, as lines of text.

[Note: Canonical programs]
Two programs are the same where each lane does the same operations in the same order, over the same
bytes, and each operation knows the same of the other lanes to be done when it starts. Not compared
are the order of launches *between* lanes, events, and waits: what an operation waits for is said by
what is known to be done, which a wait that follows from others does not change. A line is

    lane name | reads … | writes … | undefined … | after …

"after" names the last operation of each other lane that is known to be done and that the operation
before it, of the same lane, did not know; `name~3` is the third of this name on its lane. A span is
an operation where it opens and another one ("end …") where it closes.

Memory has no addresses: bytes are counted from the beginning of their *place*, all bytes that are
joined by accesses which overlap. A place bears the name of the buffer that the lanes, one after the
other, touch first in it; another buffer in it is "other in first", and the second place of a name
is `name#2`. So which of the shared slots a buffer lies in counts, and how an arena is packed does
not.

Bytes that `alloc` made undefined belong to the operation that touches them next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from offloadtrain.runtime.lanes import Lane
from offloadtrain.step.proof.prove import Clock, order
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

END = "the program ends"


@dataclass(frozen=True, slots=True)
class _Operation:
    lane: Lane
    name: str
    reads: tuple[Bytes, ...] = ()
    writes: tuple[Bytes, ...] = ()
    undefined: tuple[Bytes, ...] = ()

    @property
    def accesses(self) -> tuple[Bytes, ...]:
        return (*self.reads, *self.writes, *self.undefined)


def canonical(program: Sequence[Entry]) -> list[str]:
    """One line per operation, lane after lane."""
    operations = list(_operations(program))
    clocks = order(_without_accesses(program))
    by_lane: dict[Lane, list[tuple[_Operation, Clock]]] = {lane: [] for lane in Lane}
    for operation, clock in zip(operations, clocks, strict=True):
        by_lane[operation.lane].append((operation, clock))
    labels = {lane: _labels(op.name for op, _ in ran) for lane, ran in by_lane.items()}
    places = _Places([op for ran in by_lane.values() for op, _ in ran])
    return [line for lane, ran in by_lane.items() for line in _lines(lane, ran, labels, places)]


def _operations(program: Iterable[Entry]) -> Iterator[_Operation]:
    """In the order of launch; the last one shows what the launching thread knows in the end."""
    spans: dict[int, str] = {}
    undefined: list[Bytes] = []
    for entry in program:
        match entry:
            case Launched(lane, name, reads, writes):
                used = _touched(undefined, (*reads, *writes))
                yield _Operation(lane, name, reads, writes, used)
            case Opened(span, name, reads, writes):
                spans[span] = name
                used = _touched(undefined, (*reads, *writes))
                yield _Operation(Lane.COMPUTE, name, reads, writes, used)
            case Closed(span):
                yield _Operation(Lane.COMPUTE, f"end {spans[span]}")
            case Undefined(bytes_):
                undefined.append(bytes_)
            case _:
                pass
    yield _Operation(Lane.COMPUTE, END, undefined=tuple(undefined))


def _touched(undefined: list[Bytes], accesses: Sequence[Bytes]) -> tuple[Bytes, ...]:
    """Takes what the accesses touch out of `undefined`."""
    used = tuple(u for u in undefined if any(u.overlaps(access) for access in accesses))
    undefined[:] = [u for u in undefined if u not in used]
    return used


def _without_accesses(program: Iterable[Entry]) -> Iterator[Entry]:
    """The same lanes and waits; the ends of spans are operations, so that they have clocks."""
    for entry in program:
        match entry:
            case Launched(lane, name, _, _):
                yield Launched(lane, name, (), ())
            case Opened() | Closed():
                yield Launched(Lane.COMPUTE, "", (), ())
            case Recorded() | Waited():
                yield entry
            case _:
                pass
    yield Launched(Lane.COMPUTE, END, (), ())


def _labels(names: Iterable[str]) -> list[str]:
    counts: Counter[str] = Counter()
    result = []
    for name in names:
        counts[name] += 1
        result.append(f"{name}~{counts[name]}")
    return result


def _lines(
    lane: Lane,
    ran: Sequence[tuple[_Operation, Clock]],
    labels: dict[Lane, list[str]],
    places: _Places,
) -> Iterator[str]:
    known: Clock = (0,) * len(Lane)
    for operation, clock in ran:
        after = [
            f"{other} {labels[other][now - 1]}"
            for other, before, now in zip(Lane, known, clock, strict=True)
            if other is not lane and now > before
        ]
        parts = {
            "reads": [places.text(b) for b in operation.reads],
            "writes": [places.text(b) for b in operation.writes],
            "undefined": [places.text(b) for b in operation.undefined],
            "after": after,
        }
        parts_text = [f" | {part} {', '.join(texts)}" for part, texts in parts.items() if texts]
        yield f"{lane} {operation.name}{''.join(parts_text)}"
        known = clock


class _Places:
    """Bytes that are joined by overlapping accesses, named in the order of the lanes."""

    def __init__(self, operations: Sequence[_Operation]) -> None:
        accesses = [b for operation in operations for b in operation.accesses if b.hi > b.lo]
        self._starts: list[int] = []
        end = -1
        for lo, hi in sorted({(b.lo, b.hi) for b in accesses}):
            if lo >= end:
                self._starts.append(lo)
            end = max(end, hi)
        self._names: dict[int, str] = {}
        counts: Counter[str] = Counter()
        for access in accesses:
            start = self._start(access)
            if start not in self._names:
                counts[access.name] += 1
                count = counts[access.name]
                self._names[start] = f"{access.name}#{count}" if count > 1 else access.name

    def text(self, access: Bytes) -> str:
        if access.hi == access.lo:
            return f"{access.name}[]"
        start = self._start(access)
        place = self._names[start]
        where = access.name if place == access.name else f"{access.name} in {place}"
        return f"{where}[{access.lo - start}:{access.hi - start}]"

    def _start(self, access: Bytes) -> int:
        return self._starts[bisect_right(self._starts, access.lo) - 1]
