"""The operations of a program: launches on lanes over named memory, and the order between them.

[Note: Dependencies]
No wait is written by hand. Each launch declares the memory that it reads and writes. Its lane waits
for the last write of memory it reads, and for the last write and all later reads of memory it
writes, unless these are known to be complete. Each lane has a vector clock: it knows what it has
waited for, what the awaited lane knew at that point, and everything that the launching thread has
waited for. The order of a step thus follows from its reads and writes, no wait is redundant, and a
new kind of operation needs no code for waits.

An event represents everything launched on its lane before it. It is recorded right after the
operation that a later launch may wait for. For operations that are rarely waited for, the event is
recorded *late*: when a wait needs it, or never.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from offloadtrain.step.layout.buffers import BufferKey, BufferSpec, Memory
from offloadtrain.step.layout.formats import ITEMSIZE


class Lane(StrEnum):
    """A queue of operations: a stream, a thread, or both."""

    __hash__ = str.__hash__  # Enum's is a Python function, called at every look-up

    COMPUTE = "compute"
    """The stream of the user's forward and backward."""
    D2H = "d2h"
    """Copies from the device to the host: gradients."""
    HOST = "host"
    """CPU work on host memory: sums, norms, Adam."""
    H2D = "h2d"
    """Copies from the host to the device: weights that an update has changed."""
    LOAD = "load"
    """Copies from the host to the device: streamed weights, in the order of their use. Not on h2d,
    whose next copy may wait for an update that forward does not need yet."""
    COMM = "comm"
    """Collectives between ranks, in the same order on all of them."""
    ORTHO = "ortho"
    """The device's part of the update of matrices: copy, orthogonalize, copy back. Not on compute,
    which would wait for the host, nor on h2d and d2h, whose copies would wait for it."""
    WRITE = "write"
    """Writes the state to the disk, or from the device to a moving average, while the next steps
    run: Adam of a bucket waits only for the bucket's write."""
    UPDATE = "update"
    """The device's work on gradients and state on the device: sums, norms, Adam. Not on compute,
    whose next forward waits only for the update of its own block."""
    DISK_READ = "disk_read"
    """Reads state from its file: that of the next bucket while the host updates another."""
    DISK_WRITE = "disk_write"
    """Writes new state to its file. Not on disk_read, whose next read would wait for it."""
    DISK_LOAD = "disk_load"
    """Reads streamed weights from their file, in the order of their use. Not on disk_read, whose
    next read may belong to an update that forward does not need yet."""


class Kind(StrEnum):
    """The kind of an operation. The value is its name in logs and traces."""

    __hash__ = str.__hash__  # Enum's is a Python function, called at every look-up

    FORWARD = "forward"
    """compute: the user's forward of a block; only launched in a program that is driven without a
    model."""
    BACKWARD = "backward"
    """compute: the user's backward of a block; launched like `FORWARD`."""
    DECIDE = "decide"
    """compute: no work; marks the point where step() knows the norm. Launched like `FORWARD`."""
    GATHER = "gather"
    """compute: copy a bucket's delivered gradients into staging, or to where Adam reads them."""
    REDUCE_SCATTER = "reduce-scatter"
    """comm: sum a staging slot over ranks; each rank gets its shard."""
    ROUND = "round"
    """comm, update: round a sum from fp32 to the dtype that is copied to the host."""
    GRAD_DOWN = "d2h"
    """d2h: copy a staging slot to the host: to the gradient, or to host staging."""
    ADD = "add"
    """host, update: add a second gradient of one micro-step, in its own dtype."""
    ACCUMULATE = "accumulate"
    """host, update: add a microbatch to the fp32 sum; the last one is squared in the same
    pass."""
    NO_GRADIENT = "no gradient"
    """host, update: write zeros for a gradient that was not delivered."""
    NORM = "norm"
    """compute, host, update: sums of squares of a bucket's gradient; on compute before it is
    gathered."""
    NORMS_DOWN = "norms down"
    """d2h, compute: copy the sums of squares that the device computed to the host."""
    MARK = "mark used"
    """compute: mark the experts of a bucket that have a gradient, before it is gathered."""
    DIRECTION = "direction"
    """host, update: update the moments of a bucket of matrices, and write the orthogonalization
    input."""
    MATRIX_UP = "matrix up"
    """ortho: copy a matrix to the device."""
    ORTHOGONALIZE = "orthogonalize"
    """ortho: orthogonalize a matrix in place."""
    MATRIX_DOWN = "matrix down"
    """ortho: copy an orthogonalized matrix back to the host."""
    ADAM = "adam"
    """host, update: update a bucket; for matrices, the last part of the update."""
    CAST = "cast"
    """host, update: after masters were set, cast them to the working dtype."""
    WEIGHTS_UP = "h2d"
    """h2d: copy new weights of this rank's shard to the device."""
    ALL_GATHER = "all-gather"
    """comm: gather every rank's shard of the weights."""
    PUBLISH = "publish"
    """host: copy new weights into the snapshot that loads read."""
    LOAD = "load"
    """load: copy a streamed bucket's weights (this rank's shard) into its block's slot."""
    ACTIVATION_DOWN = "offload input"
    """d2h: copy the input of a block's recompute to the host."""
    ACTIVATION_UP = "fetch input"
    """load: copy a block's input back to the device."""
    WRITE = "write"
    """write: write a bucket's state, or frozen weights, into a checkpoint; without a bucket,
    finish the checkpoint's file."""
    AVERAGE = "average"
    """host, write: update a moving average of the weights from a bucket's masters."""
    SPILL = "spill"
    """host: copy the end of the state to be written to the spill, from which it is written
    later."""
    COPY = "copy"
    """update: copy within the device, for a bucket with state there: its gradient out of a staging
    slot, or new weights to the memory that compute, or loads, read."""
    READ_STATE = "read state"
    """disk_read: read a bucket's state from its file into a slot."""
    WRITE_STATE = "write state"
    """disk_write: write a bucket's new state from its slot to its file."""
    READ_GRADIENT = "read gradient"
    """disk_read: read a bucket's gradient from its file into a slot."""
    WRITE_GRADIENT = "write gradient"
    """disk_write: write a bucket's gradient from its slot to its file."""
    READ_WEIGHTS = "read weights"
    """disk_load: read a streamed bucket's weights from their file into a host slot."""
    WRITE_WEIGHTS = "write weights"
    """disk_write: write a streamed bucket's new weights to their file."""
    ALL_REDUCE = "all-reduce"
    """comm: sum a shard over the copies of the state; each gets the sum."""
    KEEP_INPUT = "keep input"
    """compute: copy this rank's part of the input of a block's recompute to separate memory on the
    device."""
    FETCH_PART = "fetch part"
    """comm: copy a kept part to its place in the input."""
    GATHER_INPUT = "gather input"
    """comm: gather every rank's part of a block's input."""
    ROUND_SUM = "round sum"
    """update: round the fp32 sum of microbatches to values of the working dtype, in place."""


class Ref(NamedTuple):
    """Elements [lo, hi) of a buffer.

    Attributes:
        owner: a bucket's name; for staging, index of the ring slot; for norms, the tier; for a
            block's input or its host buffer, index of that input or buffer.
        copy: for `STATE`, index of the copy, or, if the state is on the disk, of the host
            slot; for `WORKING`, index of a streamed block's device slot, or of the version; for
            `GRADIENT`, index of the sum, or of its host slot if it is on the disk; for
            `WEIGHT_FILE`, index of the version; for `NORMS`, 1 for the host's copy of the device's;
            otherwise 0.
        dtype: torch's name of the dtype.
        field: for `STATE`, `STATE_FILE` and `SPILL`, index of the tensor.
    """

    memory: Memory
    owner: str | int
    copy: int
    lo: int
    hi: int
    dtype: str
    field: int = 0

    @property
    def nbytes(self) -> int:
        return (self.hi - self.lo) * ITEMSIZE[self.dtype]

    @property
    def key(self) -> BufferKey:
        """The key of the buffer that it is a part of."""
        # The spilled parts of all fields are in one buffer.
        field = 0 if self.memory is Memory.SPILL else self.field
        return BufferKey(self.owner, self.memory, self.copy, field)


def ref_of(key: BufferKey, row: BufferSpec) -> Ref:
    """Return all elements of a buffer."""
    return Ref(key.kind, key.bucket, key.version, 0, row.numel, row.dtype, key.field)


class Ring:
    """Slots of staging, used in turn. Without slots, every piece has separate memory."""

    def __init__(self, memory: Memory, slots: int) -> None:
        self._memory = memory
        self._slots = slots
        self._next = 0

    def take(self, numel: int, dtype: str, bucket: str = "", lo: int = 0) -> Ref:
        """Return the first elements of the next slot, or of the memory of a bucket's piece that
        starts at `lo`."""
        if not self._slots:
            return Ref(self._memory, f"{bucket}[{lo}]", 0, 0, numel, dtype)
        slot, self._next = self._next, (self._next + 1) % self._slots
        return Ref(self._memory, slot, 0, 0, numel, dtype)


Clock = tuple[int, ...]
"""For every lane in turn, the number of its completed operations. A tuple, not a dict by lane:
thousands of clocks are alive, and the garbage collector skips tuples of numbers."""


@dataclass(slots=True, eq=False)
class Event:
    """A point on a lane that other lanes can wait for.

    Attributes:
        clock: the operations that are complete when it has happened.
        at: index of its own lane in clocks.
        position: `clock[at]`.
        recorded: its `Record` is in the program.
        kind, owner: those of the preceding launch; after other code, None and its name.
        real: the interpreter's event.
    """

    lane: Lane
    clock: Clock
    at: int = 0
    position: int = 0
    recorded: bool = False
    kind: Kind | None = None
    owner: str = ""
    real: Any = None

    @property
    def name(self) -> str:
        """Name of the preceding launch, or other code."""
        return self.owner if self.kind is None else f"{self.kind} {self.owner}"


class Update(NamedTuple):
    """The arguments of an `ADAM` or a `DIRECTION`.

    Attributes:
        step: optimizer step, 1-based.
        grad_scale: unscaling times clipping, multiplied into each gradient in fp32.
        out_of_place: the new state is written to the other copy, and the gradient is not changed.
    """

    step: int
    grad_scale: float
    out_of_place: bool


class Written(NamedTuple):
    """The part of a bucket's buffer that a `WRITE` writes: values [lo, hi). Its source starts
    with the first of them.

    Attributes:
        buffer: index of the field; after the fields, the weights in use. For a frozen bucket,
            0 is its weights.
    """

    buffer: int
    lo: int
    hi: int


class Launch(NamedTuple):
    """Put an operation at the end of a lane.

    Attributes:
        owner: the bucket (for `FORWARD` and `BACKWARD`, the block) that it works on.
        lo, hi: the piece of the gradient, or the matrix, as elements of the shard.
        first: for `ACCUMULATE`, the sum starts with it; for `MARK`, there are no earlier marks.
        update: for `ADAM` and `DIRECTION` only.
        written: for `WRITE` only, the part of each of `reads` that is written.
    """

    kind: Kind
    lane: Lane
    owner: str
    reads: tuple[Ref, ...] = ()
    writes: tuple[Ref, ...] = ()
    lo: int = 0
    hi: int = 0
    first: bool = False
    update: Update | None = None
    written: tuple[Written, ...] = ()

    @property
    def name(self) -> str:
        """Its name in logs and traces."""
        return f"{self.kind} {self.owner}" if self.owner else self.kind.value


class Record(NamedTuple):
    """The event represents everything that was launched on its lane before."""

    event: Event


class Wait(NamedTuple):
    """Launches on the lane from here on start after the event.

    Attributes:
        who: the launch, or other code, that waits.
        does, did: verbs for its use of the memory, and for that of the awaited operation; empty if
            `who` is sufficient.
    """

    lane: Lane
    event: Event
    who: Launch | str
    does: str = ""
    did: str = ""

    def __str__(self) -> str:
        """The reason as a sentence, formatted only when waits are recorded."""
        who = self.who if isinstance(self.who, str) else self.who.name
        return f"{who} {self.does} what {self.event.name} {self.did}" if self.does else who


class HostWait(NamedTuple):
    """The launching thread continues after the event."""

    event: Event
    why: str


class Undefined(NamedTuple):
    """The contents of this memory are undefined from here on, until `lane` writes it."""

    ref: Ref
    lane: Lane


class Allocate(NamedTuple):
    """Allocate this memory, in the order of compute: see [Note: Allocation] in
    `step.program.activations`."""

    ref: Ref


class Free(NamedTuple):
    """Compute has waited for every use of this memory: compute may reuse it."""

    ref: Ref


class Enter(NamedTuple):
    """A streamed block gets a device slot, or another version of its weights: its parameters
    become views of it."""

    block: str
    slot: int


class Leave(NamedTuple):
    """A streamed block loses its slot: its parameters become placeholders."""

    block: str


class Renew(NamedTuple):
    """A block's weights change: graphs built before are stale.

    Attributes:
        by: -1: compute reads the previous version again; see
            `Program.switch_version`.
    """

    block: str
    by: int = 1


class Swap(NamedTuple):
    """The other copy of a bucket's state becomes the state."""

    bucket: str


class Flip(NamedTuple):
    """The other version of a streamed bucket's weights becomes the one that loads read."""

    bucket: str


Operation = (
    Launch
    | Record
    | Wait
    | HostWait
    | Undefined
    | Allocate
    | Free
    | Enter
    | Leave
    | Renew
    | Swap
    | Flip
)
Operations = list[Operation]


_AT = {lane: at for at, lane in enumerate(Lane)}
"""Index of each lane in clocks."""

_Cell = tuple[object, ...]
"""Memory, owner and copy of a `Ref`: the unit of dependencies, independent of its elements."""


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
        """Lane → its clock: the operations of each lane that are complete when its next one
        starts."""
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
        event = self._advance(lane, op.kind, op.owner, recorded=not late)
        for use in reads:
            use.read[lane] = event
        # A write has waited for the reads before it: later users need to wait only for the write.
        for use in writes:
            use.written = event
            use.read.clear()
        return event

    def allocate(self, ref: Ref) -> None:
        """Allocate memory on compute, which counts as compute's write; see [Note: Allocation] in
        `step.program.activations`."""
        self.operations.append(Allocate(ref))
        allocated = self._advance(Lane.COMPUTE, None, "its allocation", recorded=True)
        self._uses[ref[:3]] = _Use(allocated)

    def record(self, lane: Lane, what: str) -> Event:
        """Return an event after everything launched on the lane so far, and after code that ran
        there without a launch; `what` names that code."""
        last = self._recorded.get(lane)
        # If nothing was launched there since the last event, that event is enough.
        if last is None or last.position < self._known[lane][last.at]:
            last = self._recorded[lane] = self._advance(lane, None, what, recorded=True)
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
            self._record_late(event)
        self._thread_clock[:] = map(max, self._thread_clock, event.clock)
        # Later launches come from a thread that has seen the event: no lane waits for it again.
        for known in self._known.values():
            known[:] = map(max, known, event.clock)
        self.operations.append(HostWait(event, why))

    def last_write(self, ref: Ref) -> Event | None:
        """Return the event after the last write of this memory."""
        return self._uses[ref[:3]].written

    def synchronized(self) -> None:
        """Record that the launching thread has seen every lane idle."""
        done = [self._known[lane][at] for lane, at in _AT.items()]
        # Every lane knows that all earlier operations are complete: later launches wait for none.
        self._thread_clock[:] = done
        for known in self._known.values():
            known[:] = done

    def reset(self) -> None:
        """Every lane is idle, and some operations were never launched."""
        self.synchronized()
        # Events of operations that were never launched are invalid: no wait may refer to them.
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
        """Drop memory that no later operation uses."""
        for ref in refs:
            self._uses.pop(ref[:3], None)

    def was_read(self, refs: Iterable[Ref], event: Event) -> None:
        """Code that was not launched has read this memory before the event."""
        for ref in refs:
            self._uses[ref[:3]].read[event.lane] = event

    def reuse(self, refs: Iterable[Ref], of: Iterable[Ref]) -> None:
        """Let `refs` reuse the memory of `of`: their first write waits for every earlier use of
        it."""
        # An event covers everything before it on its lane: the latest event of each lane is enough.
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
        """Wait for the last write of each read, and for every earlier use of each write."""
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
        # Events that another event covers come last: the wait for that event makes them redundant.
        if len(before) > 1:
            events = [event for event, _, _ in before]
            before.sort(key=lambda entry: self._is_covered(entry[0], events))
        for event, does, did in before:
            if event.position > known[event.at]:
                self._wait(lane, event, who, does, did)

    def _wait(
        self, lane: Lane, event: Event, who: Launch | str, does: str = "", did: str = ""
    ) -> None:
        # A late event is recorded now, on its own lane: it must precede the wait in the program.
        if not event.recorded:
            self._record_late(event)
        # The lane has now also waited for everything that the event's lane had waited for.
        known = self._known[lane]
        for at, position in enumerate(event.clock):
            if position > known[at]:
                known[at] = position
        self.operations.append(Wait(lane, event, who, does, did))

    def _advance(self, lane: Lane, kind: Kind | None, owner: str, *, recorded: bool) -> Event:
        """Count one more operation of the lane; `recorded`: record the event after it now."""
        at, known = _AT[lane], self._known[lane]
        known[at] += 1
        event = Event(lane, tuple(known), at, known[at], recorded, kind, owner)
        if recorded:
            self.operations.append(Record(event))
        return event

    def _is_covered(self, event: Event, events: Sequence[Event]) -> bool:
        """Return True if a wait for a different event in `events` covers this event. If two events
        cover each other, the event with the smaller clock counts as covered, else the second."""
        place = sum(event.clock), -events.index(event)
        return any(
            self._covers(other, event)
            and (not self._covers(event, other) or (sum(other.clock), -number) > place)
            for number, other in enumerate(events)
            if other is not event
        )

    def _covers(self, event: Event, other: Event) -> bool:
        """Return True if `other` has happened when `event` has; an event recorded late covers
        everything launched on its lane so far."""
        clock = event.clock if event.recorded else self._known[event.lane]
        return clock[other.at] >= other.position

    def _record_late(self, event: Event) -> None:
        """Record a late event: it covers everything launched on its lane so far."""
        event.recorded = True
        event.clock = tuple(self._known[event.lane])
        event.position = event.clock[event.at]
        self.operations.append(Record(event))
