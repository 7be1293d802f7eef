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

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from offloadtrain.step.operations import (
    Event,
    HostWait,
    Kind,
    Lane,
    Launch,
    Operations,
    Reason,
    Record,
    Ref,
    Undefined,
    Wait,
)

_AT = {lane: at for at, lane in enumerate(Lane)}
"""The place of each lane in clocks."""
_LATE = frozenset({Kind.NO_GRADIENT, Kind.FORWARD, Kind.BACKWARD, Kind.DECIDE})

_Cell = tuple[object, ...]
"""Of a `Ref`: memory, owner and copy. Its elements are not told apart."""


@dataclass(slots=True)
class _Use:
    """Of one piece of memory: the events behind its last write, and behind the last read of each
    lane since."""

    written: Event | None = None
    read: dict[Lane, Event] = field(default_factory=dict)


class Dependencies:
    """Puts waits before launches and events behind them."""

    def __init__(self) -> None:
        self.operations: Operations = []
        """Since the last `take`."""
        self._known = {lane: [0] * len(Lane) for lane in Lane}
        """Lane → its clock: what is done when its next operation starts."""
        self._uses: defaultdict[_Cell, _Use] = defaultdict(_Use)
        self._recorded: dict[Lane, Event] = {}
        """Of `record`, where the lane was given nothing since."""

    def take(self) -> Operations:
        """What has been said since the last call."""
        taken, self.operations = self.operations, []
        self._recorded.clear()  # code that is not launched may run before the next one
        return taken

    def launch(self, op: Launch, *, fresh: Ref | None = None) -> None:
        """After what its memory asks for.

        Args:
            fresh: memory that is used again: what it held is undefined once the waits are over.
        """
        uses, lane = self._uses, op.lane
        reads = [uses[ref[:3]] for ref in op.reads]
        writes = [uses[ref[:3]] for ref in op.writes]
        self._wait_for(lane, reads, writes, op)
        if fresh is not None:
            self.operations.append(Undefined(fresh, lane))
        self.operations.append(op)
        event = self._advance(lane, op.kind, op.owner, say=op.kind not in _LATE)
        for use in reads:
            use.read[lane] = event
        for use in writes:
            use.written = event
            use.read.clear()

    def record(self, lane: Lane, what: str) -> Event:
        """The event of all that was launched on the lane so far, and of code that ran there: `what`
        it did."""
        if lane not in self._recorded:
            self._recorded[lane] = self._advance(lane, None, what, say=True)
        return self._recorded[lane]

    def wait(self, lane: Lane, event: Event, why: str) -> None:
        """Nothing if the lane knows already that the event has happened."""
        if event.position > self._known[lane][event.at]:
            self._wait(lane, event, why)

    def host_wait(self, event: Event, why: str) -> None:
        """The launching thread waits, and with it all that it launches from here on."""
        if not event.recorded:
            self._say(event)
        for known in self._known.values():
            known[:] = map(max, known, event.clock)
        self.operations.append(HostWait(event, why))

    def written(self, ref: Ref) -> Event | None:
        """The event behind its last write."""
        return self._uses[ref[:3]].written

    def synchronized(self) -> None:
        """The launching thread has seen every lane empty."""
        done = [self._known[lane][at] for lane, at in _AT.items()]
        for known in self._known.values():
            known[:] = done

    def reset(self) -> None:
        """The same, and not all that was said has been done: nobody waits for it any more."""
        self.synchronized()
        self._uses.clear()
        self.operations.clear()

    def needs(self, lane: Lane, refs: Iterable[Ref], reader: str) -> None:
        """Before code that is not launched reads this memory on the lane."""
        self._wait_for(lane, [self._uses[ref[:3]] for ref in refs], (), reader)

    def overwrites(self, lane: Lane, refs: Iterable[Ref], writer: str) -> None:
        """Before code that is not launched writes this memory on the lane."""
        self._wait_for(lane, (), [self._uses[ref[:3]] for ref in refs], writer)

    def was_written(self, refs: Iterable[Ref], event: Event) -> None:
        """Code that was not launched has written this memory before the event."""
        for ref in refs:
            self._uses[ref[:3]] = _Use(event)

    def forget(self, refs: Iterable[Ref]) -> None:
        """This memory is not named again."""
        for ref in refs:
            self._uses.pop(ref[:3], None)

    def was_read(self, refs: Iterable[Ref], event: Event) -> None:
        """Code that was not launched has read this memory before the event."""
        for ref in refs:
            self._uses[ref[:3]].read[event.lane] = event

    def reuse(self, refs: Iterable[Ref], of: Iterable[Ref]) -> None:
        """The memory of `of` becomes that of `refs`: their first writer waits for all who used
        it."""
        last: dict[Lane, Event] = {}
        for ref in of:
            use = self._uses.pop(ref[:3], _Use())
            for event in (use.written, *use.read.values()):
                if event is not None:
                    known = last.get(event.lane)
                    if known is None or known.position < event.position:
                        last[event.lane] = event
        for ref in refs:
            self._uses[ref[:3]] = _Use(read=last.copy())

    def _wait_for(
        self, lane: Lane, reads: Iterable[_Use], writes: Iterable[_Use], who: Launch | str
    ) -> None:
        """For the last write of what is read, for all users of what is written. Whoever knows most
        is waited for first: those that it knows need no wait of their own."""
        known, before = self._known[lane], list[tuple[Event, str, str]]()
        for use in reads:
            if (event := use.written) is not None and event.position > known[event.at]:
                before.append((event, "reads", "writes"))
        for use in writes:
            if (event := use.written) is not None and event.position > known[event.at]:
                before.append((event, "overwrites", "writes"))
            for event in use.read.values():
                if event.position > known[event.at]:
                    before.append((event, "overwrites", "reads"))
        if len(before) > 1:
            before.sort(key=lambda one: self._knowledge(one[0]), reverse=True)
        for event, does, did in before:
            if event.position > known[event.at]:
                self._wait(lane, event, Reason(who, does, event, did))

    def _wait(self, lane: Lane, event: Event, why: Reason | str) -> None:
        if not event.recorded:
            self._say(event)
        known = self._known[lane]
        known[:] = map(max, known, event.clock)
        self.operations.append(Wait(lane, event, why))

    def _advance(self, lane: Lane, kind: Kind | None, owner: str, *, say: bool) -> Event:
        """The lane is given one operation more; `say`: the event behind it is recorded now."""
        self._recorded.pop(lane, None)
        at, known = _AT[lane], self._known[lane]
        known[at] += 1
        event = Event(lane, tuple(known), at, known[at], say, kind, owner)
        if say:
            self.operations.append(Record(event))
        return event

    def _knowledge(self, event: Event) -> int:
        """How much is known by who waits for it; recorded late, it stands for its lane as it is."""
        return sum(event.clock if event.recorded else self._known[event.lane])

    def _say(self, event: Event) -> None:
        """Record it now: from here on it stands for all that its lane was given."""
        event.recorded = True
        event.clock = tuple(self._known[event.lane])
        event.position = event.clock[event.at]
        self.operations.append(Record(event))
