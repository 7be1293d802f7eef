"""The waits between launches, derived from the memory that they read and write.

[Note: Dependencies]
No wait is written by hand. Each launch declares the memory that it reads and writes. Its lane waits
for the last write of memory it reads, and for the last write and all later reads of memory it
writes, unless these are known to be done. Each lane has a vector clock: it knows what it has waited
for, what the awaited lane knew at that point, and everything that the launching thread has waited
for. The order of a step thus follows from its reads and writes, no wait is redundant, and a new
kind of operation needs no code for waits.

An event stands for everything launched on its lane before it. It is recorded right after the
operation that a later launch may wait for. For operations that are rarely waited for, the event is
recorded *late*: when a wait needs it, or never.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from offloadtrain.step.program.operations import (
    Allocate,
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

_AT = {lane: at for at, lane in enumerate(Lane)}
"""The place of each lane in clocks."""

_Cell = tuple[object, ...]
"""Memory, owner and copy of a `Ref`: the unit of dependencies, whatever its elements."""


@dataclass(slots=True)
class _Use:
    """The events after the last write of a piece of memory, and after each lane's last read since
    that write."""

    written: Event | None = None
    read: dict[Lane, Event] = field(default_factory=dict)


class Dependencies:
    """Inserts waits before launches and events after them."""

    def __init__(self) -> None:
        self.operations: Operations = []
        """The operations since the last `take`."""
        self._known = {lane: [0] * len(Lane) for lane in Lane}
        """Lane → its clock: what is done when its next operation starts."""
        self._thread_clock = [0] * len(Lane)
        """The clock of the launching thread."""
        self._uses: defaultdict[_Cell, _Use] = defaultdict(_Use)
        self._recorded: dict[Lane, Event] = {}
        """Lane → its last event of `record`, until the next `take`."""

    def take(self) -> Operations:
        """Return the operations since the last call."""
        operations, self.operations = self.operations, []
        # User code may run on compute before the next event of the step: an event recorded now
        # would not cover it, so `record` must make a new one.
        self._recorded.clear()
        return operations

    def launch(self, op: Launch, *, fresh: Ref | None = None, late: bool = False) -> Event:
        """Launch an operation after the waits that its memory needs; return the event after it.

        Args:
            fresh: memory that is reused: its contents are undefined once the waits are over.
            late: record the event only when a wait needs it.
        """
        lane, reads, writes = op.lane, self._uses_of(op.reads), self._uses_of(op.writes)
        self._wait_for(lane, reads, writes, op)
        # After the waits: an earlier operation may still use this memory until then.
        if fresh is not None:
            self.operations.append(Undefined(fresh, lane))
        self.operations.append(op)
        event = self._advance(lane, op.kind, op.owner, say=not late)
        for use in reads:
            use.read[lane] = event
        # A write has waited for the reads before it: later users need to wait for the write only.
        for use in writes:
            use.written = event
            use.read.clear()
        return event

    def allocate(self, ref: Ref) -> None:
        """Allocate memory on compute, which counts as compute's write; see [Note: Allocation] in
        `step.program.activations`."""
        self.operations.append(Allocate(ref))
        allocated = self._advance(Lane.COMPUTE, None, "its allocation", say=True)
        self._uses[ref[:3]] = _Use(allocated)

    def record(self, lane: Lane, what: str) -> Event:
        """Return an event after everything launched on the lane so far, and after code that ran
        there without a launch; `what` names that code."""
        last = self._recorded.get(lane)
        # If nothing was launched there since the last event, that event is enough.
        if last is None or last.position < self._known[lane][last.at]:
            last = self._recorded[lane] = self._advance(lane, None, what, say=True)
        return last

    def wait(self, lane: Lane, event: Event, why: str) -> None:
        """Wait, unless the lane knows already that the event has happened."""
        if event.position > self._known[lane][event.at]:
            self._wait(lane, event, why)

    def host_wait(self, event: Event, why: str) -> None:
        """Make the launching thread, and everything it launches afterwards, wait for the event,
        unless it is known to have happened."""
        if event.position <= self._thread_clock[event.at]:
            return
        if not event.recorded:
            self._say(event)
        self._thread_clock[:] = map(max, self._thread_clock, event.clock)
        # Later launches come from a thread that has seen the event: no lane waits for it again.
        for known in self._known.values():
            known[:] = map(max, known, event.clock)
        self.operations.append(HostWait(event, why))

    def last_write(self, ref: Ref) -> Event | None:
        """Return the event after the last write of this memory."""
        return self._uses[ref[:3]].written

    def synchronized(self) -> None:
        """Record that the launching thread has seen every lane empty."""
        done = [self._known[lane][at] for lane, at in _AT.items()]
        # Every lane knows that all earlier operations are done: later launches wait for none.
        self._thread_clock[:] = done
        for known in self._known.values():
            known[:] = done

    def reset(self) -> None:
        """Every lane is empty, and some operations were never launched."""
        self.synchronized()
        # Events of operations that were never launched stand for nothing: no wait may name them.
        self._uses.clear()
        self.operations.clear()

    def needs(self, lane: Lane, refs: Iterable[Ref], reader: str) -> None:
        """Wait before code that is not launched reads this memory on the lane."""
        self._wait_for(lane, [self._uses[ref[:3]] for ref in refs], (), reader)

    def overwrites(self, lane: Lane, refs: Iterable[Ref], writer: str) -> None:
        """Wait before code that is not launched writes this memory on the lane."""
        self._wait_for(lane, (), [self._uses[ref[:3]] for ref in refs], writer)

    def was_written(self, refs: Iterable[Ref], event: Event) -> None:
        """Code that was not launched has written this memory before the event."""
        for ref in refs:
            self._uses[ref[:3]] = _Use(event)

    def forget(self, refs: Iterable[Ref]) -> None:
        """Forget memory that no later operation names."""
        for ref in refs:
            self._uses.pop(ref[:3], None)

    def was_read(self, refs: Iterable[Ref], event: Event) -> None:
        """Code that was not launched has read this memory before the event."""
        for ref in refs:
            self._uses[ref[:3]].read[event.lane] = event

    def reuse(self, refs: Iterable[Ref], of: Iterable[Ref]) -> None:
        """Give the memory of `of` to `refs`: their first write waits for every earlier use of
        it."""
        # An event covers all that its lane did before: the latest one of each lane is enough.
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

    def _uses_of(self, refs: Sequence[Ref]) -> Sequence[_Use]:
        """Return the uses of each cell; the fields of a state are one cell."""
        if len(refs) == 1:
            return (self._uses[refs[0][:3]],)
        return [self._uses[cell] for cell in {ref[:3]: None for ref in refs}] if refs else ()

    def _wait_for(
        self, lane: Lane, reads: Iterable[_Use], writes: Iterable[_Use], who: Launch | str
    ) -> None:
        """Wait for the last write of what is read, and for every use of what is written."""
        known = self._known[lane]
        before: list[tuple[Event, str, str]] = []
        for use in reads:
            if (event := use.written) is not None and event.position > known[event.at]:
                before.append((event, "reads", "writes"))
        for use in writes:
            if (event := use.written) is not None and event.position > known[event.at]:
                before.append((event, "overwrites", "writes"))
            for event in use.read.values():
                if event.position > known[event.at]:
                    before.append((event, "overwrites", "reads"))
        # An event that another one covers comes last: the wait for that one makes it needless.
        if len(before) > 1:
            events = [event for event, _, _ in before]
            before.sort(key=lambda entry: self._is_covered(entry[0], events))
        for event, does, did in before:
            if event.position > known[event.at]:
                self._wait(lane, event, who, does, did)

    def _wait(
        self, lane: Lane, event: Event, who: Launch | str, does: str = "", did: str = ""
    ) -> None:
        # A late event is recorded now, on its own lane: it must stand in the program before this.
        if not event.recorded:
            self._say(event)
        # The lane has now also waited for everything that the event's lane had waited for.
        known = self._known[lane]
        for at, position in enumerate(event.clock):
            if position > known[at]:
                known[at] = position
        self.operations.append(Wait(lane, event, who, does, did))

    def _advance(self, lane: Lane, kind: Kind | None, owner: str, *, say: bool) -> Event:
        """Count one more operation of the lane; `say`: record the event after it now."""
        at, known = _AT[lane], self._known[lane]
        known[at] += 1
        event = Event(lane, tuple(known), at, known[at], say, kind, owner)
        if say:
            self.operations.append(Record(event))
        return event

    def _is_covered(self, event: Event, events: Sequence[Event]) -> bool:
        """Tell whether a wait for another of the events waits for this one; of two that cover each
        other, the second is covered."""
        at = events.index(event)
        return any(
            self._covers(other, event) and (number < at or not self._covers(event, other))
            for number, other in enumerate(events)
            if other is not event
        )

    def _covers(self, event: Event, other: Event) -> bool:
        """Tell whether `other` has happened when `event` has; one recorded late covers all that its
        lane was given so far."""
        clock = event.clock if event.recorded else self._known[event.lane]
        return clock[other.at] >= other.position

    def _say(self, event: Event) -> None:
        """Record a late event: it covers all that its lane was given so far."""
        event.recorded = True
        event.clock = tuple(self._known[event.lane])
        event.position = event.clock[event.at]
        self.operations.append(Record(event))
