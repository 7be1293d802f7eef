"""Which launches need a wait between them: the order that memory asks for, and no more.

[Note: Dependencies]
Nobody writes a wait. Each launch says what it reads and writes; the lane that runs it waits for
whoever wrote what it reads, and for whoever wrote or still reads what it writes, unless it knows
already that they are done. A lane knows what it has waited for, what the lane that it waited for
knew then, and all that the launching thread had waited for: a vector clock for each lane. So a
step's order follows from its table of reads and writes, a wait that adds nothing is never made, and
a new kind of operation brings its waits with it.

An event stands for everything launched on its lane before it, so it is recorded right behind the
operation that somebody may wait for later. Behind the few that nobody waits for while more is
launched (`_LATE`) it is recorded when it is needed, or never.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from offloadtrain.step.operations import (
    Event,
    HostWait,
    Kind,
    Lane,
    Launch,
    Operations,
    Record,
    Ref,
    Undefined,
    Wait,
)

_LANES = tuple(Lane)
_INDEX = {lane: index for index, lane in enumerate(_LANES)}
_START = (0,) * len(_LANES)
_LATE = frozenset({Kind.NO_GRADIENT, Kind.FORWARD, Kind.BACKWARD, Kind.DECIDE})

Cell = tuple[object, ...]


@dataclass(slots=True)
class _Use:
    """Of one piece of memory: the event of its last write, and those of its reads since."""

    written: Event | None = None
    writer: str = ""
    read: dict[Lane, tuple[Event, str]] = field(default_factory=dict)


class Dependencies:
    """Puts waits before launches and events behind them."""

    def __init__(self) -> None:
        self.operations: Operations = []
        """Since the last `take`."""
        self._known = [_START] * len(_LANES)
        self._thread = _START
        self._uses: dict[Cell, _Use] = {}

    def take(self) -> Operations:
        """What has been said since the last call."""
        taken, self.operations = self.operations, []
        return taken

    def launch(self, op: Launch, *, fresh: Ref | None = None) -> Event:
        """After what its memory asks for; returns the event behind it.

        Args:
            fresh: memory that is used again: what it held is undefined once the waits are over.
        """
        cells = {_cell(ref): False for ref in op.reads}
        cells |= {_cell(ref): True for ref in op.writes}
        for cell, writes in cells.items():
            self._wait_for(op.lane, cell, op.name, writes=writes)
        if fresh is not None:
            self.operations.append(Undefined(fresh, op.lane))
        self.operations.append(op)
        event = self._advance(op.lane)
        if op.kind not in _LATE:
            self._say(event)
        for cell, writes in cells.items():
            self._note(cell, event, op.name, writes=writes)
        return event

    def record(self, lane: Lane) -> Event:
        """The event of all that was launched on the lane so far, and of code that ran there."""
        event = self._advance(lane)
        self._say(event)
        return event

    def wait(self, lane: Lane, event: Event, why: str) -> None:
        """Nothing if the lane knows already that the event has happened."""
        index, at = _INDEX[lane], _INDEX[event.lane]
        if max(self._known[index][at], self._thread[at]) < event.clock[at]:
            self._say(event)
            self._known[index] = _merged(self._known[index], event.clock)
            self.operations.append(Wait(lane, event, why))

    def host_wait(self, event: Event, why: str) -> None:
        """The launching thread waits, and with it all that it launches from here on."""
        self._say(event)
        self._thread = _merged(self._thread, event.clock)
        self.operations.append(HostWait(event, why))

    def _advance(self, lane: Lane) -> Event:
        index = _INDEX[lane]
        clock = list(_merged(self._known[index], self._thread))
        clock[index] += 1
        self._known[index] = tuple(clock)
        return Event(lane, self._known[index])

    def _say(self, event: Event) -> None:
        """Record it, unless it is: from here on it stands for all that its lane was given."""
        if not event.recorded:
            event.recorded = True
            event.clock = self._known[_INDEX[event.lane]]
            self.operations.append(Record(event))

    def written(self, ref: Ref) -> Event | None:
        """The event behind its last write."""
        return self._uses.get(_cell(ref), _Use()).written

    def synchronized(self) -> None:
        """The launching thread has seen every lane empty."""
        for known in self._known:
            self._thread = _merged(self._thread, known)

    def needs(self, lane: Lane, refs: Iterable[Ref], reader: str) -> None:
        """Before code that is not launched reads this memory on the lane."""
        for ref in reversed(list(refs)):  # the last was written last: its event stands for all
            self._wait_for(lane, _cell(ref), reader, writes=False)

    def was_read(self, refs: Iterable[Ref], event: Event, reader: str) -> None:
        """Code that was not launched has read this memory before the event."""
        for ref in refs:
            self._note(_cell(ref), event, reader, writes=False)

    def was_written(self, refs: Iterable[Ref], event: Event, writer: str) -> None:
        """Code that was not launched has written this memory before the event."""
        for ref in refs:
            self._note(_cell(ref), event, writer, writes=True)

    def reuse(self, refs: Iterable[Ref], of: Iterable[Ref]) -> None:
        """The memory of `of` becomes that of `refs`: their first writer waits
        for all who used it."""
        last: dict[Lane, tuple[Event, str]] = {}
        for ref in of:
            use = self._uses.pop(_cell(ref), _Use())
            written = [(use.written, use.writer)] if use.written is not None else []
            for event, name in [*written, *use.read.values()]:
                known = last.get(event.lane)
                if known is None or _at(known[0]) < _at(event):
                    last[event.lane] = (event, name)
        for ref in refs:
            self._uses[_cell(ref)] = _Use(read=dict(last))

    def _wait_for(self, lane: Lane, cell: Cell, name: str, *, writes: bool) -> None:
        use = self._uses.get(cell)
        if use is None:
            return
        if use.written is not None and use.written.lane is not lane:
            what = "overwrites" if writes else "reads"
            self.wait(lane, use.written, f"{name} {what} what {use.writer} writes")
        if writes:
            for event, reader in use.read.values():
                if event.lane is not lane:
                    self.wait(lane, event, f"{name} overwrites what {reader} reads")

    def _note(self, cell: Cell, event: Event, name: str, *, writes: bool) -> None:
        if writes:
            self._uses[cell] = _Use(event, name)
        else:
            self._uses.setdefault(cell, _Use()).read[event.lane] = (event, name)


def _at(event: Event) -> int:
    return event.clock[_INDEX[event.lane]]


def _cell(ref: Ref) -> Cell:
    return (ref.memory, ref.owner, ref.copy)


def _merged(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return a if a == b else tuple(map(max, a, b))
