"""Which launches need a wait between them: the order that memory asks for, and no more.

[Note: Dependencies]
Nobody writes a wait. Each launch says what it reads and writes; the lane that runs it waits for
whoever wrote what it reads, and for whoever wrote or still reads what it writes, unless it knows
already that they are done. A lane knows what it has waited for, what the lane that it waited for
knew then, and all that the launching thread had waited for: a vector clock for each lane. So a
step's order follows from its table of reads and writes, nobody waits for what it knows already, and
a new kind of operation brings its waits with it.

An event stands for everything launched on its lane before it, so it is recorded right behind the
operation that somebody may wait for later. Behind the few that nobody waits for while more is
launched (`_LATE`) it is recorded when it is needed, or never.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
Clock = tuple[int, ...]
_Before = tuple[Event, str, "Launch | str", str]
"""(event, what is done now, who did something before, what)."""


@dataclass(slots=True)
class _Use:
    """Of one piece of memory: the event of its last write, and those of its reads since; each with
    who it was."""

    written: Event | None = None
    writer: Launch | str = ""
    read: dict[Lane, tuple[Event, Launch | str]] = field(default_factory=dict)


class Dependencies:
    """Puts waits before launches and events behind them."""

    def __init__(self) -> None:
        self.operations: Operations = []
        """Since the last `take`."""
        self._known: dict[Lane, Clock] = dict.fromkeys(Lane, _START)
        """Lane → what is done when its next operation starts, but for what the thread knows."""
        self._thread = _START
        self._uses: dict[Cell, _Use] = {}
        self._recorded: dict[Lane, Event] = {}
        """Of `record`, where the lane was given nothing since."""

    def take(self) -> Operations:
        """What has been said since the last call."""
        taken, self.operations = self.operations, []
        self._recorded.clear()  # code that is not launched may run before the next one
        return taken

    def launch(self, op: Launch, *, fresh: Ref | None = None) -> Event:
        """After what its memory asks for; returns the event behind it.

        Args:
            fresh: memory that is used again: what it held is undefined once the waits are over.
        """
        lane, reads = op.lane, [self._use(ref) for ref in op.reads]
        writes = [self._use(ref) for ref in op.writes]
        before = [one for use in reads for one in self._writer(lane, use, "reads")]
        before += [one for use in writes for one in self._users(lane, use)]
        self._wait_for(lane, before, op)
        if fresh is not None:
            self.operations.append(Undefined(fresh, lane))
        self.operations.append(op)
        event = self._advance(lane)
        if op.kind not in _LATE:
            self._say(event)
        for use in reads:
            use.read[lane] = (event, op)
        for use in writes:
            use.written, use.writer = event, op
            use.read.clear()
        return event

    def record(self, lane: Lane) -> Event:
        """The event of all that was launched on the lane so far, and of code that ran there."""
        if lane not in self._recorded:
            event = self._advance(lane)
            self._say(event)
            self._recorded[lane] = event
        return self._recorded[lane]

    def wait(self, lane: Lane, event: Event, why: str) -> None:
        """Nothing if the lane knows already that the event has happened."""
        if not self._knows(lane, event):
            self._wait(lane, event, why)

    def host_wait(self, event: Event, why: str) -> None:
        """The launching thread waits, and with it all that it launches from here on."""
        self._say(event)
        self._thread = _merged(self._thread, event.clock)
        self.operations.append(HostWait(event, why))

    def written(self, ref: Ref) -> Event | None:
        """The event behind its last write."""
        return self._use(ref).written

    def synchronized(self) -> None:
        """The launching thread has seen every lane empty."""
        for known in self._known.values():
            self._thread = _merged(self._thread, known)

    def reset(self) -> None:
        """The same, and not all that was said has been done: nobody waits for it any more."""
        self.synchronized()
        self._uses.clear()
        self.operations.clear()

    def needs(self, lane: Lane, refs: Sequence[Ref], reader: str) -> None:
        """Before code that is not launched reads this memory on the lane."""
        before = [one for ref in refs for one in self._writer(lane, self._use(ref), "reads")]
        self._wait_for(lane, before, reader)

    def was_read(self, refs: Iterable[Ref], event: Event, reader: str) -> None:
        """Code that was not launched has read this memory before the event."""
        for ref in refs:
            self._use(ref).read[event.lane] = (event, reader)

    def reuse(self, refs: Iterable[Ref], of: Iterable[Ref]) -> None:
        """The memory of `of` becomes that of `refs`: their first writer waits for all who used
        it."""
        last: dict[Lane, tuple[Event, Launch | str]] = {}
        for ref in of:
            use = self._uses.pop(_cell(ref), _Use())
            written = [(use.written, use.writer)] if use.written is not None else []
            for event, who in [*written, *use.read.values()]:
                known = last.get(event.lane)
                if known is None or known[0].position < event.position:
                    last[event.lane] = (event, who)
        for ref in refs:
            self._uses[_cell(ref)] = _Use(read=dict(last))

    def _use(self, ref: Ref) -> _Use:
        cell = _cell(ref)
        found = self._uses.get(cell)
        if found is None:
            found = self._uses[cell] = _Use()
        return found

    def _knows(self, lane: Lane, event: Event) -> bool:
        at, position = _INDEX[event.lane], event.position
        of_lane, of_thread = self._known[lane][at], self._thread[at]
        return lane is event.lane or position <= of_lane or position <= of_thread

    def _wait(self, lane: Lane, event: Event, why: str) -> None:
        self._say(event)
        self._known[lane] = _merged(self._known[lane], event.clock)
        self.operations.append(Wait(lane, event, why))

    def _writer(self, lane: Lane, use: _Use, does: str) -> list[_Before]:
        """Its last write, where the lane does not know it to be done."""
        event = use.written
        if event is None or self._knows(lane, event):
            return []
        return [(event, does, use.writer, "writes")]

    def _users(self, lane: Lane, use: _Use) -> list[_Before]:
        """The same, and its reads since."""
        reads = [(e, w) for e, w in use.read.values() if not self._knows(lane, e)]
        found: list[_Before] = [(event, "overwrites", who, "reads") for event, who in reads]
        return self._writer(lane, use, "overwrites") + found

    def _wait_for(self, lane: Lane, before: list[_Before], who: Launch | str) -> None:
        """Whoever knows most is waited for first: those that it knows need no wait of their own."""
        if len(before) > 1:
            before.sort(key=lambda one: sum(one[0].clock), reverse=True)
        for event, does, other, did in before:
            if not self._knows(lane, event):
                self._wait(lane, event, f"{_name(who)} {does} what {_name(other)} {did}")

    def _advance(self, lane: Lane) -> Event:
        self._recorded.pop(lane, None)
        index, clock = _INDEX[lane], list(_merged(self._known[lane], self._thread))
        clock[index] += 1
        known = self._known[lane] = tuple(clock)
        return Event(lane, known, clock[index])

    def _say(self, event: Event) -> None:
        """Record it, unless it is: from here on it stands for all that its lane was given."""
        if not event.recorded:
            event.recorded = True
            event.clock = self._known[event.lane]
            event.position = event.clock[_INDEX[event.lane]]
            self.operations.append(Record(event))


def _name(who: Launch | str) -> str:
    return who if isinstance(who, str) else who.name


def _cell(ref: Ref) -> Cell:
    return ref[:3]


def _merged(a: Clock, b: Clock) -> Clock:
    return a if a == b else tuple(map(max, a, b))
