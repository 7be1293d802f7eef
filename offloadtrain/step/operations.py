"""What a step's program says: operations on lanes over named memory, and the order between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from offloadtrain.step.formats import ITEMSIZE


class Lane(StrEnum):
    """Where an operation runs."""

    COMPUTE = "compute"
    """The stream of the user's forward and backward."""
    D2H = "d2h"
    """Copies from the device to the host: gradients."""
    HOST = "host"
    """CPU work on host memory: sums, norms, Adam."""
    H2D = "h2d"
    """Copies from the host to the device: weights that an update has changed."""
    LOAD = "load"
    """Copies from the host to the device: streamed weights, in the order of their use. Beside h2d,
    whose next copy may wait for an update that the forward does not need yet."""
    COMM = "comm"
    """Collectives between ranks, in one order on all of them."""


class Kind(StrEnum):
    """What an operation does. The value is what logs and traces call it."""

    FORWARD = "forward"
    """compute: the user's forward of a block; launched by who drives a program without a model."""
    BACKWARD = "backward"
    """compute: as `FORWARD`."""
    DECIDE = "decide"
    """compute: nothing; where step() knows the norm. As `FORWARD`."""
    GATHER = "gather"
    """compute: a bucket's gradients, from where autograd left them, into a staging slot."""
    REDUCE_SCATTER = "reduce-scatter"
    """comm: sum a staging slot over ranks; each keeps its shard."""
    ROUND = "round"
    """comm: the sum from fp32 to the dtype that goes down."""
    GRAD_DOWN = "d2h"
    """d2h: a staging slot to the host: to the gradient, or to host staging."""
    ADD = "add"
    """host: a second gradient of one micro-step, in its own dtype."""
    ACCUMULATE = "accumulate"
    """host: a microbatch into the fp32 sum; squared in the same pass where it is the last."""
    NO_GRADIENT = "no gradient"
    """host: zeros, where nothing was delivered."""
    NORM = "norm"
    """host: the sums of squares of a bucket's gradient."""
    ADAM = "adam"
    """host: the update of a bucket."""
    CAST = "cast"
    """host: masters to the working dtype, where they were set."""
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


class Memory(StrEnum):
    """What a piece of memory holds."""

    WORKING = "working"
    """Device: the whole of a bucket's weights; of a streamed block, in a slot."""
    DEVICE_SHARD = "device shard"
    """Device: this rank's shard of a bucket whose whole is gathered for its use."""
    STAGING = "staging"
    """Device: a slot for gathered gradients; of ZeRO stage 1, a place of each piece's own."""
    ROUNDED = "rounded"
    """Device: a slot for sums in the dtype that goes down."""
    HOST_STAGING = "host staging"
    """Host: a slot for gradients that are added, and for weights that wait for nothing else."""
    GRADIENT = "gradient"
    """Host: a bucket's gradient of the step, or the fp32 sum of its microbatches."""
    PENDING = "pending"
    """Host: new weights until their upload, where they wait longer than the gradient's memory is
    free."""
    SNAPSHOT = "snapshot"
    """Host: the weights of the step in progress, for loads; the weights of a frozen bucket."""
    STATE = "state"
    """Host: the fields of a bucket's state; the master weights come first."""
    NORMS = "norms"
    """Host: the sum of squares of every parameter."""
    ACTIVATION = "block input"
    """Device: a block's input; copy 0 as forward made it, copy 1 as it came back."""
    HOST_ACTIVATION = "host block input"
    """Host: a buffer for a block's input."""


class Ref(NamedTuple):
    """Elements [lo, hi) of a piece of memory.

    Attributes:
        owner: a bucket; of staging, whose slots are used in turn, the number of the slot; the
            number of a block's input, or of a buffer for one.
        copy: of `STATE`, which of its copies; of `WORKING` of a streamed block, which slot of the
            device. 0 where there is one.
        dtype: by torch's name.
        field: of `STATE`, which of its tensors.
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


Clock = tuple[int, ...]
"""Of every lane in turn, how many of its operations are done. Numbers by place, and no table by
lane: thousands of clocks are alive, and the garbage collector does not look into such tuples."""


@dataclass(slots=True, eq=False)
class Event:
    """A point on a lane that others can wait for.

    Attributes:
        clock: what is done when it has happened.
        at: the place of its own lane in clocks, and `position` what is there.
        recorded: it stands in the program.
        kind, owner: of the launch that it is behind; of no launch, None and what was done there.
        real: what the interpreter keeps here.
    """

    lane: Lane
    clock: Clock
    at: int = 0
    position: int = 0
    recorded: bool = False
    kind: Kind | None = None
    owner: str = ""
    real: object = None

    @property
    def name(self) -> str:
        """What is done when it has happened."""
        return self.owner if self.kind is None else f"{self.kind} {self.owner}"


class Update(NamedTuple):
    """What an `ADAM` is done with.

    Attributes:
        step: optimizer step, 1-based.
        grad_scale: unscaling times clipping, multiplied into each gradient in fp32.
        out_of_place: the new state goes to the other copy, and the gradient stays as it is.
    """

    step: int
    grad_scale: float
    out_of_place: bool


class Launch(NamedTuple):
    """Put an operation at the end of a lane.

    Attributes:
        owner: the bucket (of `FORWARD` and `BACKWARD`, the block) that it works on.
        lo, hi: of the shard, which piece of the gradient.
        first: of `ACCUMULATE`, whether the sum begins with it.
        update: of `ADAM`.
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

    @property
    def name(self) -> str:
        """As logs and traces have it."""
        return f"{self.kind} {self.owner}" if self.owner else self.kind.value


class Record(NamedTuple):
    """The event stands for all that was launched on its lane before."""

    event: Event


class Reason(NamedTuple):
    """Of a wait; `str` says it. Only who keeps a record of waits asks."""

    who: Launch | str
    does: str
    other: Event
    did: str

    def __str__(self) -> str:
        who = self.who if isinstance(self.who, str) else self.who.name
        return f"{who} {self.does} what {self.other.name} {self.did}"


class Wait(NamedTuple):
    """What is launched on the lane from here on starts after the event."""

    lane: Lane
    event: Event
    why: Reason | str


class HostWait(NamedTuple):
    """The launching thread goes on after the event."""

    event: Event
    why: str


class Undefined(NamedTuple):
    """This memory holds nothing from here on until `lane` writes it."""

    ref: Ref
    lane: Lane


class Free(NamedTuple):
    """Nothing that was launched needs this memory: what compute is given next may have it."""

    ref: Ref


class Enter(NamedTuple):
    """A streamed block takes a slot of the device: its parameters become views of it."""

    block: str
    slot: int


class Leave(NamedTuple):
    """A streamed block's slot is another's from here on: its parameters are placeholders."""

    block: str


class Renew(NamedTuple):
    """A block's weights change: graphs built before are stale."""

    block: str


class Swap(NamedTuple):
    """The other copy of a bucket's state becomes the state."""

    bucket: str


Operation = Launch | Record | Wait | HostWait | Undefined | Free | Enter | Leave | Renew | Swap
Operations = list[Operation]
