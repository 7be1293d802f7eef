"""The memory of each bucket, as refs for the operations of a step."""

from __future__ import annotations

from collections.abc import Sequence

from offloadtrain.step.program.operations import Lane, Memory, Ref
from offloadtrain.step.spec.block_spec import BucketSpec
from offloadtrain.step.spec.step_spec import StepSpec
from offloadtrain.step.spec.tiers import Tier

NORMS_DTYPE = "float64"
MATRIX_DTYPE = "bfloat16"


class BucketRefs:
    """One bucket's memory, and its status in the step in progress.

    Attributes:
        on_device: its gradient and state are there.
        lane: what measures its gradient and updates its state.
        pieces: [lo, hi) of the shard that its gradient goes down in.
        copy: the number of the copy that is the state; where it is on the disk, the host slot that
            it has, or had last.
        is_on_disk: the state is in a file.
        state_file: all fields of the state there.
        gradient_on_disk: the gradient is in a file, and `gradient` in a slot of the host.
        gradient_file: it there.
        loads_from_disk: its weights are streamed from a file.
        beside: new weights go to the other version of the working weights.
        version: of two versions of the weights, the one that compute, or its loads, read.
        is_streamed: its weights are loaded for their use.
        matrices: those in this rank's shard, as elements of it.
        slot: for a streamed bucket, the device slot that its block has, or had last.
        touched: a gradient of the step in progress is in its memory.
        normed: its sums of squares for this step are launched.
        arrived: the copy of its sum to the host is launched.
        sums_on_device: its microbatches are summed on the device, its state is on the host.
        rounds_sum: the sum on the device is rounded to the working dtype before it is measured.
        holds_sum: `gradient` is an fp32 sum.
        sum_tier: the tier of `summed`.
        measured_on: the tier whose norms have its sums of squares of this step.
        spilled: what a save copies of its state.
        spill: where it is copied to, part by part.
        has_new_weight_slot: new weights go to the disk out of a slot of their own.
        reduces_wide: ranks sum its gradient in a wider dtype than the one that goes down.
        rank: the number of this rank among those that share it.
        waits_for_step: it is updated in step() in every update mode, never inside backward.
        used: which of its experts got a gradient; None for a bucket that is updated whole.
    """

    def __init__(self, spec: BucketSpec, step: StepSpec, rank: int) -> None:
        self.spec = spec
        self.name = spec.name
        self.waits_for_step = bool(spec.matrices or spec.experts)
        self.used: Ref | None = None
        if spec.experts:
            self.used = Ref(Memory.USED, spec.name, 0, 0, spec.experts, "uint8")
        self.on_device = spec.state_tier is Tier.DEVICE
        self.lane = Lane.UPDATE if self.on_device else Lane.HOST
        # Behind the step's last backward: no weight that compute needs is overwritten.
        self.sums_on_device = step.sums_on_device(spec)
        self.sum_tier = self.measured_on = step.sum_tier(spec)
        self._writes_through = self.on_device and not step.updates_early
        self.pieces = step.pieces(spec) if step.is_trained(spec) else []
        self.copy = self._adding = self._decided = 0
        self.slot = step.first_slot(spec)
        self.touched = self.normed = self.arrived = False
        self.loads_from_host = step.loads_from_host(spec)
        self.loads_from_disk = step.loads_from_disk(spec)
        self.loads_from_shard = step.loads_from_shard(spec)
        self.has_snapshot = step.has_snapshot(spec) or not step.is_trained(spec)
        self.has_new_weight_slot = step.has_new_weight_slot(spec)
        self.has_pending = step.has_pending(spec)
        self.has_second_copy = step.has_second_copy(spec)
        self.accumulates = step.accumulates
        self.reduces_wide = step.reduced_bytes(spec) != spec.weight_bytes
        self.is_on_disk = spec.is_on_disk
        copies = step.state_slots if self.is_on_disk else 2
        self.state_copies = tuple(self._state(copy, spec.moments) for copy in range(copies))
        self.state_file = tuple(
            ref._replace(memory=Memory.STATE_FILE) for ref in self.state_copies[0]
        )
        self.rounds_sum, self.holds_sum = step.rounds_sum(spec), step.holds_sum(spec)
        dtype = "float32" if self.holds_sum else spec.dtype
        gradient = Ref(Memory.GRADIENT, spec.name, 0, 0, spec.shard_numel, dtype)
        self.gradient_on_disk = spec.gradient_on_disk
        sums = step.gradient_slots if self.gradient_on_disk else step.gradient_sums
        self._gradients = [gradient._replace(copy=copy) for copy in range(sums)]
        self.gradient_file = gradient._replace(memory=Memory.GRADIENT_FILE)
        # [Note: Sharers] in `step.spec.step_spec`.
        self.rank = rank = rank * spec.ranks // step.ranks
        lo = rank * spec.shard_numel
        self.matrices = [one._replace(offset=one.offset - lo) for one in spec.matrices_of(rank)]
        self.spilled = step.spilled.get(spec.name, ()) if step.is_trained(spec) else ()
        self.spill = tuple(
            ref._replace(memory=Memory.SPILL, lo=part.offset, hi=part.offset + part.hi - part.lo)
            for part in self.spilled
            for ref in [self.state_copies[0][part.field]]
        )
        self.snapshot = self._of(Memory.SNAPSHOT)
        self.is_streamed = step.is_streamed(spec)
        self.loads_in_turn = step.loads_in_turn(spec)
        self._sources = self._kept_apart()
        file = self._of(Memory.WEIGHT_FILE)
        self._weight_files = [file._replace(copy=one) for one in range(step.weight_files(spec))]
        self.version = 0
        slots = range(max(len(step.slot_bytes), step.weight_versions))
        self.beside = False
        self._whole = [self._working(0, spec.numel, slot) for slot in slots]
        self._shard = [self._working(lo, lo + spec.shard_numel, slot) for slot in slots]

    @property
    def whole(self) -> Ref:
        """Its working weights on the device, as compute reads them."""
        return self._whole[self._place]

    @property
    def shard(self) -> Ref:
        """This rank's shard of its working weights."""
        return self._shard[self._place]

    @property
    def _place(self) -> int:
        return self.slot if self.is_streamed else self.version

    @property
    def newest(self) -> Ref:
        """Its working weights on the device, where new ones are brought to."""
        return self._whole[self._newest]

    @property
    def upload_target(self) -> Ref:
        """The device memory that new weights are brought to."""
        return (self._sources if self.loads_from_shard else self._shard)[self._newest]

    @property
    def _newest(self) -> int:
        # An update in place leaves them in the state, whatever loads have read.
        if self.loads_in_turn and self._sources[0].memory is Memory.STATE:
            return 0
        return 1 - self.version if self.beside else self.version

    @property
    def uses_state(self) -> bool:
        """Of two versions, loads read the one in the state, which the next update overwrites."""
        return self.loads_in_turn and self.load_source.memory is Memory.STATE

    def show_newest(self) -> bool:
        """Compute, or its loads, read the new weights from here on; returns whether these are in
        another place."""
        before, self.version, self.beside = self.version, self._newest, False
        return self.version != before

    def turn(self) -> None:
        """Compute, or its loads, read the other of two versions from here on."""
        self.version = 1 - self.version

    @property
    def gradient(self) -> Ref:
        """The gradient that microbatches are added to."""
        return self._gradients[self._adding]

    @property
    def decided(self) -> Ref:
        """The gradient that Adam reads."""
        return self._gradients[self._decided]

    @property
    def directions(self) -> Ref | None:
        """Of matrices, what takes the place of `decided`; None for other buckets."""
        return self.decided._replace(dtype=MATRIX_DTYPE) if self.spec.matrices else None

    @property
    def summed(self) -> Ref:
        """Where its gradient of the step is complete first, and is measured."""
        if self.sums_on_device:
            return self.gradient._replace(memory=Memory.SUM, copy=0, dtype="float32")
        return self.gradient

    def take_gradient_slot(self, slot: int) -> None:
        """`gradient` is in this slot of the host from here on."""
        self._adding = self._decided = slot

    @property
    def new_weight_file(self) -> Ref | None:
        """Where new weights are written; None where they go with the state, or to no disk."""
        return self._weight_files[self.version - 1] if self._weight_files else None

    def flip_weight_file(self) -> bool:
        """Let loads read what was written last; returns False where they do so anyway."""
        if len(self._weight_files) < 2:
            return False
        self.turn()
        return True

    @property
    def loads_from_state_file(self) -> bool:
        """Its weights on the disk are those in its state."""
        return self.loads_from_disk and not self._weight_files

    def close_sum(self) -> None:
        """The gradient is the one that Adam will read; the next step's goes to the other."""
        self._decided, self._adding = self._adding, (self._adding + 1) % len(self._gradients)

    def piece(self, lo: int, hi: int) -> Ref:
        """A part of the gradient."""
        return self._part(self.gradient, lo, hi)

    def piece_summed(self, lo: int, hi: int) -> Ref:
        """A part of `summed`."""
        return self._part(self.summed, lo, hi)

    @property
    def sums_lane(self) -> Lane:
        """The lane that adds microbatches and measures the gradient."""
        return Lane.UPDATE if self.sum_tier is Tier.DEVICE else Lane.HOST

    def _part(self, whole: Ref, lo: int, hi: int) -> Ref:
        return whole if hi - lo == self.spec.shard_numel else whole._replace(lo=lo, hi=hi)

    def state(self, *, other: bool = False) -> tuple[Ref, ...]:
        """All fields of the state, or of its other copy."""
        return self.state_copies[1 - self.copy if other else self.copy]

    @property
    def spill_sources(self) -> tuple[Ref, ...]:
        """The parts of the state that a save copies, in the order of `spill`."""
        state = self.state()
        return tuple(state[part.field]._replace(lo=part.lo, hi=part.hi) for part in self.spilled)

    def waiting(self, *, other: bool = False) -> Ref | None:
        """Return where new weights wait for their upload, or where they are used if they need not
        wait; None for a slot of host staging."""
        if self.loads_in_turn and self.loads_from_host:
            return self._sources[self._newest]
        if self.has_pending:
            return self._of(Memory.PENDING)
        if self.spec.format.holds_weight:
            return self.state(other=other)[0]
        if self._writes_through:
            return self.upload_target
        # Adam has read the gradient when it writes the weights over it; no staging is needed.
        if not self.holds_sum:
            return self.decided
        return None

    @property
    def in_use(self) -> Ref:
        """This rank's shard of the weights that forward uses, where they lie between two uses."""
        return self.load_source if self.is_streamed else self.shard

    @property
    def load_source(self) -> Ref:
        """The memory that loads of a streamed bucket read."""
        if self.loads_from_disk:
            files = self._weight_files
            return files[self.version] if files else self.state_file[0]
        if self._sources:
            return self._sources[self.version]
        source = self.waiting()
        assert source is not None
        return source

    def _kept_apart(self) -> tuple[Ref, ...]:
        """Return the memory that loads read, version by version; nothing where that is what an
        update writes. Of two versions on the host one is in the state, if that holds weights."""
        if self.loads_from_shard:
            shards = [self._of(Memory.DEVICE_SHARD)._replace(copy=copy) for copy in range(2)]
            return tuple(shards[: 1 + self.loads_in_turn])
        if not (self.loads_from_host and self.has_snapshot):
            return ()
        if not self.loads_in_turn:
            return (self.snapshot,)
        if self.spec.format.holds_weight:
            return self.state()[0], self.snapshot
        return self.snapshot, self._of(Memory.PENDING)

    def _of(self, memory: Memory) -> Ref:
        return Ref(memory, self.name, 0, 0, self.spec.shard_numel, self.spec.dtype)

    def _working(self, lo: int, hi: int, slot: int) -> Ref:
        return Ref(Memory.WORKING, self.name, slot, lo, hi, self.spec.dtype)

    def _state(self, copy: int, moments: Sequence[str]) -> tuple[Ref, ...]:
        numel, own = self.spec.shard_numel, self.spec.dtype
        return tuple(
            Ref(Memory.STATE, self.name, copy, 0, field.numel(numel), field.dtype or own, number)
            for number, field in enumerate(self.spec.format.fields(moments))
        )


class Ring:
    """Slots of staging, used in turn."""

    def __init__(self, memory: Memory, slots: int) -> None:
        self._memory = memory
        self._slots = slots
        self._next = 0

    def take(self, numel: int, dtype: str) -> Ref:
        """The next slot's first elements."""
        slot, self._next = self._next, (self._next + 1) % self._slots
        return Ref(self._memory, slot, 0, 0, numel, dtype)


BlockRefs = tuple[str, Sequence[BucketRefs]]
"""A block's name, and its trained buckets."""
