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

HOST_SLOTS = 2
"""For gradients on the host where microbatches are summed."""

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
        staging_slots: for gathered gradients on the device.
        pieces: bucket → in how many pieces its gradient goes down, where it is more than one: it is
            larger than a staging slot.
        among_ranks: gradients are reduce-scattered on their way down, weights all-gathered on their
            way up.
        kept_on_device: streamed blocks come from shards on the devices, not from the hosts.
        whole_gradients: every piece has a place of its own on the device (ZeRO stage 1), not a slot
            of the staging ring.
        staged_up: buckets whose new weights wait for their upload in the host's staging ring.
        unguessed: in mode "speculative": buckets without a second copy of their state.
    """

    blocks: tuple[BlockShape, ...]
    mode: Literal["exact", "early", "speculative", "delayed"] = "exact"
    micro_steps: int = 1
    slots: int = 2
    staging_slots: int = 2
    pieces: Mapping[str, int] = field(default_factory=dict)
    among_ranks: bool = False
    kept_on_device: bool = False
    whole_gradients: bool = False
    staged_up: frozenset[str] = frozenset()
    unguessed: frozenset[str] = frozenset()


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
    return [end for end, _ in _simulated(ops, seconds)]


def _simulated(ops: Sequence[Op], seconds: Callable[[Op], float]) -> list[tuple[float, int | None]]:
    """When each operation ends, and which one it began after."""
    latest: dict[str, int] = {}
    found: list[tuple[float, int | None]] = []
    for number, op in enumerate(ops):
        before = [*op.after, *([latest[op.lane]] if op.lane in latest else [])]
        last = max(before, key=lambda other: found[other][0], default=None)
        start = 0.0 if last is None else found[last][0]
        found.append((start + seconds(op), last))
        latest[op.lane] = number
    return found


@dataclass(frozen=True, slots=True)
class Steady:
    """One step of many.

    Attributes:
        busy: lane → seconds of work. No schedule is faster than the busiest one.
        exposed: lane → seconds that compute waited while this one worked on what it waited for.
    """

    seconds: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]


_SETTLED = 6
"""Steps after which every one takes the same time."""


def steady(shape: StepShape, seconds: Callable[[Op], float]) -> Steady:
    """What a step takes in the long run, if launching costs nothing."""
    ops = program(shape, _SETTLED)
    found = _simulated(ops, seconds)
    decided = [number for number, op in enumerate(ops) if op.name == DECIDE]
    first, last = decided[-2] + 1, decided[-1]
    busy: dict[str, float] = {}
    exposed: dict[str, float] = {}
    ready = found[first - 1][0]
    for number in range(first, last + 1):
        op, took = ops[number], seconds(ops[number])
        busy[op.lane] = busy.get(op.lane, 0.0) + took
        if op.lane == "compute":
            _blame(ops, found, number, ready, exposed)
            ready = found[number][0]
    return Steady(found[last][0] - found[first - 1][0], busy, exposed)


def _blame(
    ops: Sequence[Op],
    found: Sequence[tuple[float, int | None]],
    number: int,
    ready: float,
    exposed: dict[str, float],
) -> None:
    """Who worked between the moment when compute was ready and that when operation `number` began:
    back along what each one waited for."""
    cause = found[number][1]
    while cause is not None and found[cause][0] > ready:
        end, before = found[cause]
        start = ready if before is None else max(found[before][0], ready)
        lane = ops[cause].lane
        exposed[lane] = exposed.get(lane, 0.0) + end - start
        cause = before


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
            if step == micro_step == 0:
                launched.agree()
        launched.decide()
    return launched.ops


class _Program:
    """Launches as the training thread does: never before the compute that it has waited for."""

    def __init__(self, shape: StepShape) -> None:
        self.ops: list[Op] = []
        self._shape = shape
        self._thread: set[int] = set()  # what the training thread has waited for
        self._latest: dict[str, int] = {}  # name → its last operation
        self._gathering: dict[str, _Ring] = {}  # device; stage 1: of each piece
        self._host_ring = _Ring(HOST_SLOTS)
        self._waiting_in: dict[str, int] = {}  # bucket → slot of the host ring with its weights
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
                guessed = [one for one in block.buckets if one not in self._shape.unguessed]
                self._updated |= {bucket: self._adam(bucket) for bucket in guessed}
            if last and block in self._waiting and not self._shape.among_ranks:
                self._waiting.remove(block)
                self._upload(number)

    def agree(self) -> None:
        """Ranks have seen in which order gradients come, and wait for the sums of the first."""
        if self._shape.among_ranks:
            last = max(index for index, op in enumerate(self.ops) if op.lane == "comm")
            self._thread |= {last}

    def decide(self) -> None:
        self._thread |= self._measured
        self._measured.clear()
        self._compute(DECIDE)
        if self._shape.mode == "delayed":
            for number, block in enumerate(self._shape.blocks):
                if block in self._waiting:  # among ranks: all of them
                    self._upload(number)
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
        for piece in range(pieces):
            down, read = self._send_piece(bucket, piece, busy)
        if last and not (sums and pieces == 1):
            read = self._launch("host", f"norm {bucket}", [down])
        self._measured |= {read} if last and read is not None else set()

    def _send_piece(
        self, bucket: str, piece: int, busy: list[int | None]
    ) -> tuple[int, int | None]:
        """Its copy down, and what has read the host's staging."""
        ring = self._device_ring(bucket, piece)
        slot, free = ring.take()
        gathered = ready = self._launch("compute", f"gather {bucket}", [free])
        self._thread = {gathered}
        if self._shape.among_ranks:
            ready = self._launch("comm", f"reduce-scatter {bucket}", [gathered])
        if self._shape.micro_steps == 1:
            down = self._launch("d2h", f"d2h {bucket}", [ready, *busy])
            ring.release(slot, down)
            return down, None
        place, free = self._host_ring.take()
        down = self._launch("d2h", f"d2h {bucket}", [ready, free])
        ring.release(slot, down)
        read = self._launch("host", f"accumulate {bucket}", [down])
        self._host_ring.release(place, read)
        return down, read

    def _device_ring(self, bucket: str, piece: int) -> _Ring:
        own = self._shape.whole_gradients
        key = f"{bucket} {piece}" if own else ""
        return self._gathering.setdefault(key, _Ring(1 if own else self._shape.staging_slots))

    def _adam(self, bucket: str) -> int:
        # Where nothing is shown beside, loads read what Adam writes.
        in_place = self._shape.mode == "exact" and not self._shape.kept_on_device
        reads = [f"load {bucket}"] if in_place else []
        free = None
        if bucket in self._shape.staged_up:
            self._waiting_in[bucket], free = self._host_ring.take()
        return self._launch("host", f"adam {bucket}", [free, *self._of(f"h2d {bucket}", *reads)])

    def _upload(self, number: int) -> None:
        block = self._shape.blocks[number]
        for bucket in block.buckets:
            if not block.streamed:
                self._send_up(bucket, f"all-gather {bucket}")
                self._gather(bucket, f"h2d {bucket}")
            elif self._shape.kept_on_device:
                self._send_up(bucket, f"load {bucket}")
            elif self._shape.mode != "exact":
                self._launch("host", f"show {bucket}", self._of(f"load {bucket}"))
        self._slots.drop(number)

    def _send_up(self, bucket: str, reader: str) -> None:
        """`reader`: what reads the target."""
        sent = self._launch("h2d", f"h2d {bucket}", self._of(f"adam {bucket}", reader))
        if bucket in self._waiting_in:
            self._host_ring.release(self._waiting_in.pop(bucket), sent)

    def _gather(self, bucket: str, shard: str) -> None:
        """Weights from all ranks around this one's, which `shard` brings."""
        if self._shape.among_ranks:
            self._launch("comm", f"all-gather {bucket}", self._of(shard))

    def _whole(self, block: BlockShape) -> set[int]:
        """What last brought the block's weights; nothing before their first upload."""
        alone = "load" if block.streamed else "h2d"
        kind = "all-gather" if self._shape.among_ranks else alone
        found = self._of(*(f"{kind} {bucket}" for bucket in block.buckets))
        return {op for op in found if op is not None}

    def _use(self, number: int) -> None:
        """Wait for the block's weights; load them, and what comes next, where it is streamed."""
        block = self._shape.blocks[number]
        if block.streamed and self._slots.make_room(number):
            self._load(number)
        self._thread |= self._whole(block)
        if block.streamed:
            self._load_ahead(number)

    def _restart(self) -> None:
        self._slots.cursor.restart()
        self._load_ahead(None)

    def _load_ahead(self, using: int | None) -> None:
        for number in self._slots.ahead(using):
            self._load(number)

    @property
    def _writer(self) -> str:
        """What brings new weights to where loads read them."""
        if self._shape.kept_on_device:
            return "h2d"
        return "adam" if self._shape.mode == "exact" else "show"

    def _load(self, number: int) -> None:
        for bucket in self._shape.blocks[number].buckets:
            self._launch("load", f"load {bucket}", self._of(f"{self._writer} {bucket}"))
            self._gather(bucket, f"load {bucket}")


class _Ring:
    """Staging slots used in turn."""

    def __init__(self, slots: int) -> None:
        self._free_after: list[int | None] = [None] * slots
        self._next = 0

    def take(self) -> tuple[int, int | None]:
        """A slot, and the operation after which it may be filled."""
        slot = self._next
        self._next = (slot + 1) % len(self._free_after)
        return slot, self._free_after[slot]

    def release(self, slot: int, op: int) -> None:
        """It may be filled again after `op`."""
        self._free_after[slot] = op


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
