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
    Clock,
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

_LATE = frozenset({Kind.NO_GRADIENT, Kind.FORWARD, Kind.BACKWARD, Kind.DECIDE})

_Done = tuple[Event, "Launch | str"]
"""What was done, and the event behind it."""
_Cell = tuple[object, ...]
"""Of a `Ref`: memory, owner and copy. Its elements are not told apart."""


@dataclass(slots=True)
class _Use:
    """Of one piece of memory: its last write, and the last read of each lane since."""

    written: _Done | None = None
    read: dict[Lane, _Done] = field(default_factory=dict)


class Dependencies:
    """Puts waits before launches and events behind them."""

    def __init__(self) -> None:
        self.operations: Operations = []
        """Since the last `take`."""
        self._known = {lane: dict.fromkeys(Lane, 0) for lane in Lane}
        """Lane → its clock: how many operations of each lane are done when its next one starts."""
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
        done = self._advance(lane, say=op.kind not in _LATE), op
        for use in reads:
            use.read[lane] = done
        for use in writes:
            use.written = done
            use.read.clear()

    def record(self, lane: Lane) -> Event:
        """The event of all that was launched on the lane so far, and of code that ran there."""
        if lane not in self._recorded:
            self._recorded[lane] = self._advance(lane, say=True)
        return self._recorded[lane]

    def wait(self, lane: Lane, event: Event, why: str) -> None:
        """Nothing if the lane knows already that the event has happened."""
        if event.position > self._known[lane][event.lane]:
            self._wait(lane, event, why)

    def host_wait(self, event: Event, why: str) -> None:
        """The launching thread waits, and with it all that it launches from here on."""
        if not event.recorded:
            self._say(event)
        for known in self._known.values():
            _learn(known, event.clock)
        self.operations.append(HostWait(event, why))

    def written(self, ref: Ref) -> Event | None:
        """The event behind its last write."""
        done = self._uses[ref[:3]].written
        return done[0] if done is not None else None

    def synchronized(self) -> None:
        """The launching thread has seen every lane empty."""
        done = {lane: known[lane] for lane, known in self._known.items()}
        for known in self._known.values():
            known.update(done)

    def begin_anew(self) -> None:
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

    def was_written(self, refs: Iterable[Ref], event: Event, writer: str) -> None:
        """Code that was not launched has written this memory before the event."""
        for ref in refs:
            self._uses[ref[:3]] = _Use((event, writer))

    def forget(self, refs: Iterable[Ref]) -> None:
        """This memory is not named again."""
        for ref in refs:
            self._uses.pop(ref[:3], None)

    def was_read(self, refs: Iterable[Ref], event: Event, reader: str) -> None:
        """Code that was not launched has read this memory before the event."""
        for ref in refs:
            self._uses[ref[:3]].read[event.lane] = event, reader

    def reuse(self, refs: Iterable[Ref], of: Iterable[Ref]) -> None:
        """The memory of `of` becomes that of `refs`: their first writer waits for all who used
        it."""
        last: dict[Lane, _Done] = {}
        for ref in of:
            use = self._uses.pop(ref[:3], _Use())
            for done in (use.written, *use.read.values()):
                if done is not None:
                    known = last.get(done[0].lane)
                    if known is None or known[0].position < done[0].position:
                        last[done[0].lane] = done
        for ref in refs:
            self._uses[ref[:3]] = _Use(read=last.copy())

    def _wait_for(
        self, lane: Lane, reads: Iterable[_Use], writes: Iterable[_Use], who: Launch | str
    ) -> None:
        """For the last write of what is read, for all users of what is written. Whoever knows most
        is waited for first: those that it knows need no wait of their own."""
        known, before = self._known[lane], list[tuple[_Done, str, str]]()
        for use in reads:
            if (done := use.written) is not None and done[0].position > known[done[0].lane]:
                before.append((done, "reads", "writes"))
        for use in writes:
            if (done := use.written) is not None and done[0].position > known[done[0].lane]:
                before.append((done, "overwrites", "writes"))
            for done in use.read.values():
                if done[0].position > known[done[0].lane]:
                    before.append((done, "overwrites", "reads"))
        if len(before) > 1:
            before.sort(key=lambda one: sum(one[0][0].clock.values()), reverse=True)
        for (event, other), does, did in before:
            if event.position > known[event.lane]:
                self._wait(lane, event, Reason(who, does, other, did))

    def _wait(self, lane: Lane, event: Event, why: Reason | str) -> None:
        if not event.recorded:
            self._say(event)
        _learn(self._known[lane], event.clock)
        self.operations.append(Wait(lane, event, why))

    def _advance(self, lane: Lane, *, say: bool) -> Event:
        """The lane is given one operation more; `say`: the event behind it is recorded now."""
        self._recorded.pop(lane, None)
        known = self._known[lane]
        known[lane] += 1
        event = Event(lane, known.copy(), known[lane], say)
        if say:
            self.operations.append(Record(event))
        return event

    def _say(self, event: Event) -> None:
        """Record it now: from here on it stands for all that its lane was given."""
        event.recorded = True
        event.clock = self._known[event.lane].copy()
        event.position = event.clock[event.lane]
        self.operations.append(Record(event))


def _learn(known: dict[Lane, int], clock: Clock) -> None:
    """From here on `known` knows what `clock` does."""
    for lane, position in clock.items():
        if position > known[lane]:
            known[lane] = position
