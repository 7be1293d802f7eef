"""The operations of a program: launches on lanes over named memory, and the order between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from offloadtrain.step.layout.buffers import BufferKey, BufferSpec, Memory
from offloadtrain.step.layout.formats import ITEMSIZE


class Lane(StrEnum):
    """A queue of operations: a stream, a thread, or both."""

    __hash__ = str.__hash__  # an Enum's own is a Python function, called at every look-up

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
    """Collectives between ranks, in one order on all of them."""
    ORTHO = "ortho"
    """The device's part of the update of matrices: up, orthogonalized, down. Not on compute, which
    would wait for the host, nor on h2d and d2h, whose copies would wait for it."""
    WRITE = "write"
    """The state to the disk, or from the device to a moving average, while the next steps run: Adam
    of a bucket waits for its own write only."""
    UPDATE = "update"
    """The device's work on gradients and state that lie there: sums, norms, Adam. Not on compute,
    whose next forward waits for the update of its own block only."""
    DISK_READ = "disk_read"
    """State from its file: that of the next bucket while the host updates another."""
    DISK_WRITE = "disk_write"
    """New state to its file. Not on disk_read, whose next read would wait for it."""
    DISK_LOAD = "disk_load"
    """Streamed weights from their file, in the order of their use. Not on disk_read, whose next
    read may be of an update that forward does not need yet."""


class Kind(StrEnum):
    """The kind of an operation. The value is its name in logs and traces."""

    __hash__ = str.__hash__  # an Enum's own is a Python function, called at every look-up

    FORWARD = "forward"
    """compute: the user's forward of a block; launched where a program is driven without a
    model."""
    BACKWARD = "backward"
    """compute: the user's backward of a block; launched as `FORWARD`."""
    DECIDE = "decide"
    """compute: nothing; marks where step() knows the norm. Launched as `FORWARD`."""
    GATHER = "gather"
    """compute: a bucket's gradients, from where autograd left them, into a staging slot."""
    REDUCE_SCATTER = "reduce-scatter"
    """comm: sum a staging slot over ranks; each keeps its shard."""
    ROUND = "round"
    """comm, update: a sum from fp32 to the dtype that goes down."""
    GRAD_DOWN = "d2h"
    """d2h: a staging slot to the host: to the gradient, or to host staging."""
    ADD = "add"
    """host, update: a second gradient of one micro-step, in its own dtype."""
    ACCUMULATE = "accumulate"
    """host, update: a microbatch into the fp32 sum; squared in the same pass where it is the
    last."""
    NO_GRADIENT = "no gradient"
    """host, update: zeros for a gradient that nothing was delivered to."""
    NORM = "norm"
    """compute, host, update: the sums of squares of a bucket's gradient; on compute before it is
    gathered."""
    NORMS_DOWN = "norms down"
    """d2h, compute: the sums of squares that the device took, to the host."""
    MARK = "mark used"
    """compute: which experts of a bucket have a gradient, before it is gathered."""
    DIRECTION = "direction"
    """host, update: the moments of a bucket of matrices, and what the device orthogonalizes."""
    MATRIX_UP = "matrix up"
    """ortho: a matrix to the device."""
    ORTHOGONALIZE = "orthogonalize"
    """ortho: a matrix in place."""
    MATRIX_DOWN = "matrix down"
    """ortho: an orthogonalized matrix back to the host."""
    ADAM = "adam"
    """host, update: the update of a bucket; of matrices, what is left of it."""
    CAST = "cast"
    """host, update: masters that were set, to the working dtype."""
    WEIGHTS_UP = "h2d"
    """h2d: new weights of this rank's shard to the device."""
    ALL_GATHER = "all-gather"
    """comm: every rank's shard of the weights."""
    PUBLISH = "publish"
    """host: new weights into the snapshot that loads read."""
    LOAD = "load"
    """load: a streamed bucket's weights (of this rank's shard) into its block's slot."""
    ACTIVATION_DOWN = "offload input"
    """d2h: a block's input, from which its recompute will start, to the host."""
    ACTIVATION_UP = "fetch input"
    """load: a block's input to the device again."""
    WRITE = "write"
    """write: a bucket's state, or frozen weights, into a checkpoint; without a bucket, the rest."""
    AVERAGE = "average"
    """host, write: a bucket's masters into a moving average of the weights."""
    SPILL = "spill"
    """host: the end of the state that is to be written, to where it may be written from later."""
    COPY = "copy"
    """update: within the device, of a bucket whose state is there: its gradient out of a staging
    slot, or new weights to where compute, or loads, read them."""
    READ_STATE = "read state"
    """disk_read: a bucket's state from its file into a slot."""
    WRITE_STATE = "write state"
    """disk_write: a bucket's new state from its slot to its file."""
    READ_GRADIENT = "read gradient"
    """disk_read: a bucket's gradient from its file into a slot."""
    WRITE_GRADIENT = "write gradient"
    """disk_write: a bucket's gradient from its slot to its file."""
    READ_WEIGHTS = "read weights"
    """disk_load: a streamed bucket's weights from their file, on their way to its block's slot."""
    WRITE_WEIGHTS = "write weights"
    """disk_write: a streamed bucket's new weights to their file."""
    ALL_REDUCE = "all-reduce"
    """comm: sum a shard over the copies of the state; each gets the sum."""
    KEEP_INPUT = "keep input"
    """compute: this rank's part of a block's input, from which its recompute will start, to memory
    of its own on the device."""
    FETCH_PART = "fetch part"
    """comm: a kept part to its place in the input."""
    GATHER_INPUT = "gather input"
    """comm: every rank's part of a block's input."""
    ROUND_SUM = "round sum"
    """update: the fp32 sum of microbatches to values of the working dtype, in place."""


class Ref(NamedTuple):
    """Elements [lo, hi) of a piece of memory.

    Attributes:
        owner: a bucket's name; for staging, the number of its ring slot; for norms, the tier; for a
            block's input or its host buffer, that one's number.
        copy: for `STATE`, the number of the copy, or, where the state is on the disk, of the host
            slot; for `WORKING`, that of the device slot of a streamed block, or of the version; for
            `GRADIENT`, that of the sum, or of its host slot where it is on the disk; for
            `WEIGHT_FILE`, that of the version; for `NORMS`, 1 on the host for the device's;
            otherwise 0.
        dtype: torch's name of it.
        field: for `STATE`, `STATE_FILE` and `SPILL`, the number of the tensor.
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
        """The key of the buffer that it names a part of."""
        # What a save spills of all fields lies in one buffer.
        field = 0 if self.memory is Memory.SPILL else self.field
        return BufferKey(self.owner, self.memory, self.copy, field)


def ref_of(key: BufferKey, row: BufferSpec) -> Ref:
    """Return all elements of a buffer."""
    return Ref(key.kind, key.bucket, key.version, 0, row.numel, row.dtype, key.field)


class Ring:
    """Slots of staging, used in turn."""

    def __init__(self, memory: Memory, slots: int) -> None:
        self._memory = memory
        self._slots = slots
        self._next = 0

    def take(self, numel: int, dtype: str) -> Ref:
        """Return the next slot's first elements."""
        slot, self._next = self._next, (self._next + 1) % self._slots
        return Ref(self._memory, slot, 0, 0, numel, dtype)


Clock = tuple[int, ...]
"""For every lane in turn, the number of its operations that are done. A tuple and no table by lane:
thousands of clocks are alive, and the garbage collector does not look into tuples of numbers."""


@dataclass(slots=True, eq=False)
class Event:
    """A point on a lane that others can wait for.

    Attributes:
        clock: the operations that are done when it has happened.
        at: the place of its own lane in clocks.
        position: `clock[at]`.
        recorded: it stands in the program.
        kind, owner: those of the launch that it is after; after other code, None and its name.
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
        """The name of the launch, or other code, that it is after."""
        return self.owner if self.kind is None else f"{self.kind} {self.owner}"


class Update(NamedTuple):
    """The arguments of an `ADAM` or a `DIRECTION`.

    Attributes:
        step: optimizer step, 1-based.
        grad_scale: unscaling times clipping, multiplied into each gradient in fp32.
        out_of_place: the new state goes to the other copy, and the gradient stays as it is.
    """

    step: int
    grad_scale: float
    out_of_place: bool


class Written(NamedTuple):
    """The part of a bucket's buffer that a `WRITE` writes: values [lo, hi). What it reads begins
    with the first of them.

    Attributes:
        buffer: the number of the field; after the fields, the weights in use. Of a frozen bucket,
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
        first: for `ACCUMULATE`, the sum begins with it; for `MARK`, nothing is marked before.
        update: for `ADAM` and `DIRECTION` only.
        written: for `WRITE` only, what it writes of each of `reads`.
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
    """The event stands for all that was launched on its lane before."""

    event: Event


class Wait(NamedTuple):
    """Launches on the lane from here on start after the event.

    Attributes:
        who: the launch, or other code, that waits.
        does, did: what it does with the memory, and what the awaited operation did; empty where
            `who` says all.
    """

    lane: Lane
    event: Event
    who: Launch | str
    does: str = ""
    did: str = ""

    def __str__(self) -> str:
        """Its reason, made into a sentence only where waits are recorded."""
        who = self.who if isinstance(self.who, str) else self.who.name
        return f"{who} {self.does} what {self.event.name} {self.did}" if self.does else who


class HostWait(NamedTuple):
    """The launching thread continues after the event."""

    event: Event
    why: str


class Undefined(NamedTuple):
    """The contents of this memory are undefined from here on until `lane` writes it."""

    ref: Ref
    lane: Lane


class Allocate(NamedTuple):
    """Allocate this memory, in the order of compute: see [Note: Allocation] in
    `step.program.activations`."""

    ref: Ref


class Free(NamedTuple):
    """Compute has waited for every use of this memory: it may be given to compute again."""

    ref: Ref


class Enter(NamedTuple):
    """A streamed block takes a device slot, or another version of its weights: its parameters
    become views of it."""

    block: str
    slot: int


class Leave(NamedTuple):
    """A streamed block gives up its slot: its parameters become placeholders."""

    block: str


class Renew(NamedTuple):
    """A block's weights change: graphs built before are stale.

    Attributes:
        by: -1: compute reads the version before again; see `Program.turn`.
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
