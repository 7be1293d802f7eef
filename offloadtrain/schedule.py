"""The step as a program of operations on lanes, from shapes alone, and how long it takes.

Standard library only. `program` says what the engine launches, in which order, and what each
operation waits for; `tests/engine/test_schedule.py` holds it to what the engine is recorded to do.
`simulate` gives every operation a time, for programs from here and for recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from offloadtrain.order import Cursor, prefetches, victim

STAGING_SLOTS = 2
"""For gathered gradients on the device, and on the host where microbatches are summed."""

DECIDE = "decide"
"""The end of a step's backward: the norm is known. Takes no time."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """A block as a step sees it: the names of its buckets, and where its weights live."""

    name: str
    buckets: tuple[str, ...]
    streamed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Everything that decides which operations a step has, and in which order.

    Attributes:
        blocks: in forward order; backward takes them the other way round.
        mode: "early" is "exact" where nothing global must be known before an update.
        micro_steps: microbatches per step, summed on the host.
        slots: device slots of streamed blocks.
        pieces: bucket → in how many pieces its gradient goes down, where it is more than one: it is
            larger than a staging slot.
    """

    blocks: tuple[BlockShape, ...]
    mode: Literal["exact", "early", "speculative", "delayed"] = "exact"
    micro_steps: int = 1
    slots: int = 2
    pieces: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: starts when its lane has done those before it, and those of `after` are done.

    Attributes:
        after: positions in the program.
    """

    lane: str
    name: str
    after: tuple[int, ...]


def simulate(ops: Sequence[Op], seconds: Callable[[Op], float]) -> list[float]:
    """When each operation ends, if launching costs nothing."""
    free: dict[str, float] = {}
    ends: list[float] = []
    for op in ops:
        start = max([free.get(op.lane, 0.0), *(ends[other] for other in op.after)])
        ends.append(start + seconds(op))
        free[op.lane] = ends[-1]
    return ends


def busiest_lane(ops: Sequence[Op], seconds: Callable[[Op], float]) -> float:
    """The work of the busiest lane: no order of launch can be faster."""
    busy: dict[str, float] = {}
    for op in ops:
        busy[op.lane] = busy.get(op.lane, 0.0) + seconds(op)
    return max(busy.values(), default=0.0)


def program(shape: StepShape, steps: int) -> list[Op]:
    """The operations of so many steps in the order of launch: no step skipped, all guesses right.

    No update runs inside the first backward, as in the engine.
    """
    launched = _Program(shape)
    for step in range(steps):
        for micro_step in range(shape.micro_steps):
            last = micro_step + 1 == shape.micro_steps
            launched.forward()
            launched.backward(last=last, inside=last and step > 0)
        launched.decide()
    return launched.ops


class _Program:
    """Launches as the training thread does: never before the compute that it has waited for."""

    def __init__(self, shape: StepShape) -> None:
        self.ops: list[Op] = []
        self._shape = shape
        self._thread: set[int] = set()  # what the training thread has waited for
        self._latest: dict[str, int] = {}  # name → its last operation
        # Of each gradient: its d2h, and what has read the host's staging.
        self._staged: list[tuple[int, int | None]] = []
        self._measured: set[int] = set()
        self._updated: dict[str, int] = {}
        self._waiting: list[BlockShape] = []
        self._slots = _Slots(shape)

    def forward(self) -> None:
        self._restart()
        for number, block in enumerate(self._shape.blocks):
            self._use(number)
            self._compute(f"forward {block.name}")

    def backward(self, *, last: bool, inside: bool) -> None:
        for number in reversed(range(len(self._shape.blocks))):
            block = self._shape.blocks[number]
            self._use(number)
            self._compute(f"backward {block.name}")
            for bucket in block.buckets:
                self._send(bucket, last)
            if inside and self._shape.mode in ("early", "speculative"):
                self._updated |= {bucket: self._adam(bucket) for bucket in block.buckets}
            if last and block in self._waiting:
                self._waiting.remove(block)
                self._upload(number)

    def decide(self) -> None:
        self._thread |= self._measured
        self._measured.clear()
        self._compute(DECIDE)
        if self._shape.mode == "delayed":
            self._waiting = list(reversed(self._shape.blocks))
            for block in self._waiting:
                for bucket in block.buckets:
                    self._adam(bucket)
        else:
            for number, block in enumerate(self._shape.blocks):
                for bucket in block.buckets:
                    if bucket not in self._updated:
                        self._adam(bucket)
                self._upload(number)
            self._updated.clear()
        self._restart()

    def _launch(self, lane: str, name: str, after: Iterable[int | None] = ()) -> int:
        known = {op for op in after if op is not None} | self._thread
        self.ops.append(Op(lane, name, tuple(sorted(known))))
        self._latest[name] = len(self.ops) - 1
        return len(self.ops) - 1

    def _compute(self, name: str) -> None:
        self._thread = {self._launch("compute", name)}

    def _of(self, *names: str) -> list[int | None]:
        return [self._latest.get(name) for name in names]

    def _send(self, bucket: str, last: bool) -> None:
        """Gather, copy down, sum; measure in the pass of the sum where the bucket is one piece."""
        pieces = self._shape.pieces.get(bucket, 1)
        sums = self._shape.micro_steps > 1
        # The gradient's memory may hold weights on their way up, or be read by an update.
        busy = [] if sums else self._of(f"h2d {bucket}", f"adam {bucket}")
        for _ in range(pieces):
            down, read = self._send_piece(bucket, busy)
        if last and not (sums and pieces == 1):
            read = self._launch("host", f"norm {bucket}", [down])
        self._measured |= {read} if last and read is not None else set()

    def _send_piece(self, bucket: str, busy: list[int | None]) -> tuple[int, int | None]:
        """Its copy down, and what has read the host's staging."""
        staged = self._staged[-STAGING_SLOTS:]
        oldest = staged[0] if len(staged) == STAGING_SLOTS else (None, None)
        gathered = self._launch("compute", f"gather {bucket}", [oldest[0]])
        down = self._launch("d2h", f"d2h {bucket}", [gathered, oldest[1], *busy])
        read = None
        if self._shape.micro_steps > 1:
            read = self._launch("host", f"accumulate {bucket}", [down])
        self._staged.append((down, read))
        self._thread = {gathered}
        return down, read

    def _adam(self, bucket: str) -> int:
        # Where nothing is shown beside, loads read what Adam writes.
        reads = [f"load {bucket}"] if self._shape.mode == "exact" else []
        return self._launch("host", f"adam {bucket}", self._of(f"h2d {bucket}", *reads))

    def _upload(self, number: int) -> None:
        block = self._shape.blocks[number]
        for bucket in block.buckets:
            if not block.streamed:
                self._launch("h2d", f"h2d {bucket}", self._of(f"adam {bucket}"))
            elif self._shape.mode != "exact":
                self._launch("host", f"show {bucket}", self._of(f"load {bucket}"))
        self._slots.drop(number)

    def _use(self, number: int) -> None:
        """Wait for the block's weights; load them, and what comes next, where it is streamed."""
        block = self._shape.blocks[number]
        if not block.streamed:
            uploads = self._of(*(f"h2d {bucket}" for bucket in block.buckets))
            self._thread |= {op for op in uploads if op is not None}
            return
        if self._slots.make_room(number):
            self._load(number)
        self._thread |= {self._latest[f"load {bucket}"] for bucket in block.buckets}
        self._load_ahead(number)

    def _restart(self) -> None:
        self._slots.cursor.restart()
        self._load_ahead(None)

    def _load_ahead(self, using: int | None) -> None:
        for number in self._slots.ahead(using):
            self._load(number)

    def _load(self, number: int) -> None:
        for bucket in self._shape.blocks[number].buckets:
            writer = "adam" if self._shape.mode == "exact" else "show"
            self._launch("load", f"load {bucket}", self._of(f"{writer} {bucket}"))


class _Slots:
    """Which streamed blocks are on the device."""

    def __init__(self, shape: StepShape) -> None:
        self.cursor = Cursor()
        self._count = shape.slots
        self._held: set[int] = set()

    def make_room(self, number: int) -> bool:
        """For a block that is about to be used; whether it has to be loaded."""
        missing = number not in self._held
        if missing and len(self._held) >= self._count:
            leaving = victim(self._held, self.cursor.future)
            assert leaving is not None
            self._held.remove(leaving)
        self._held.add(number)
        self.cursor.used(number)
        return missing

    def ahead(self, using: int | None) -> list[int]:
        """What to load now for later uses."""
        pinned = [] if using is None else [using]
        moves = prefetches(self._held, pinned, self.cursor.future, self._count)
        for number, leaving in moves:
            if leaving is not None:
                self._held.remove(leaving)
            self._held.add(number)
        return [number for number, _ in moves]

    def drop(self, number: int) -> None:
        self._held.discard(number)
