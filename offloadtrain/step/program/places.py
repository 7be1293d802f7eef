"""The buffers of each bucket, as refs for the operations of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from offloadtrain.step.layout.block_spec import BucketSpec
from offloadtrain.step.layout.buffers import BufferKey, BufferSpec, BufferTable, Memory
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.operations import Lane, Ref

MATRIX_DTYPE = "bfloat16"


def ref_of(key: BufferKey, row: BufferSpec) -> Ref:
    """Return all elements of a buffer."""
    return Ref(key.kind, key.bucket, key.version, 0, row.numel, row.dtype, key.field)


class BucketRefs:
    """Names one bucket's buffers, which the table lists, and keeps its status in the step in
    progress.

    Attributes:
        pieces: [lo, hi) of the shard that its gradient goes down in.
        rank: the number of this rank among those that share it.
        matrices: those in this rank's shard, as elements of it.
        spilled: the parts of its state that a save copies.
        staging: the kind of the memory that new weights are written to; None for a frozen bucket.
        rounds_sum: the sum on the device is rounded to the working dtype before it is measured.
        copy: the number of the copy that is the state; where it is on the disk, the host slot that
            it has, or had last.
        slot: for a streamed bucket, the device slot that its block has, or had last.
        version: of two versions of the weights, the one that compute, or its loads, read.
        beside: new weights go to the other version of the working weights.
        touched: a gradient of the step in progress is in its memory.
        normed: its sums of squares for this step are launched.
        arrived: the copy of its sum to the host is launched.
        measured_on: the tier whose norms have its sums of squares of this step.
    """

    def __init__(self, spec: BucketSpec, step: StepSpec, table: BufferTable, rank: int) -> None:
        self.spec = spec
        rows = table.of_bucket.get(spec.name, {})
        fields = len(spec.format.fields(spec.moments))
        self._refs = {key[1:]: ref_of(key, row) for key, row in rows.items()}
        self._state_refs: dict[tuple[Memory, int], tuple[Ref, ...]] = {
            (kind, version): tuple(self._refs[kind, version, number] for number in range(fields))
            for kind, version, number in self._refs
            if number == 0 and kind in (Memory.STATE, Memory.STATE_FILE)
        }
        self._sources = [self._refs[key[1:]] for key in table.sources.get(spec.name, ())]
        self.staging = table.staging.get(spec.name)
        # [Note: Sharers] in `step.layout.step_spec`.
        self.rank = rank * spec.ranks // step.ranks
        lo = self.rank * spec.shard_numel
        in_shard = spec.matrices_of(self.rank)
        self.matrices = [matrix._replace(offset=matrix.offset - lo) for matrix in in_shard]
        is_trained = step.is_trained(spec)
        self.pieces = step.pieces(spec) if is_trained else []
        self.spilled = step.spilled.get(spec.name, ()) if is_trained else ()
        self.rounds_sum = step.rounds_sum(spec)
        self.copy = self.version = self._adding = self._decided = 0
        self.slot = step.first_slot(spec)
        self.beside = self.touched = self.normed = self.arrived = False
        self.measured_on = self.sum_tier

    @cached_property
    def name(self) -> str:
        return self.spec.name

    def has(self, kind: Memory, version: int = 0) -> bool:
        """Tell whether the table has such a buffer of this bucket."""
        return (kind, version, 0) in self._refs

    def ref(self, kind: Memory, version: int = 0) -> Ref:
        """Return all elements of a buffer of this bucket."""
        return self._refs[kind, version, 0]

    def _fields(self, kind: Memory, version: int = 0) -> tuple[Ref, ...]:
        return self._state_refs[kind, version]

    # The state.

    @cached_property
    def on_device(self) -> bool:
        """Its gradient and state are on the device."""
        return self.spec.state_tier is Tier.DEVICE

    @cached_property
    def lane(self) -> Lane:
        """The lane that updates its state."""
        return Lane.UPDATE if self.on_device else Lane.HOST

    @cached_property
    def waits_for_step(self) -> bool:
        """It is updated in step() in every update mode, never inside backward."""
        return bool(self.spec.matrices or self.spec.experts)

    @cached_property
    def has_second_copy(self) -> bool:
        """The state has a second copy, which speculative updates are written to."""
        return not self.spec.is_on_disk and self.has(Memory.STATE, 1)

    def state(self, *, other: bool = False) -> tuple[Ref, ...]:
        """Return all fields of the state, or of its other copy."""
        return self._fields(Memory.STATE, 1 - self.copy if other else self.copy)

    @property
    def state_file(self) -> tuple[Ref, ...]:
        """All fields of the state on the disk."""
        return self._fields(Memory.STATE_FILE)

    @property
    def spill(self) -> tuple[Ref, ...]:
        """The memory that a save copies parts of the state to, part by part."""
        return tuple(
            ref._replace(memory=Memory.SPILL, lo=part.offset, hi=part.offset + part.hi - part.lo)
            for part in self.spilled
            for ref in [self._refs[Memory.STATE, 0, part.field]]
        )

    @property
    def spill_sources(self) -> tuple[Ref, ...]:
        """The parts of the state that a save copies, in the order of `spill`."""
        state = self.state()
        return tuple(state[part.field]._replace(lo=part.lo, hi=part.hi) for part in self.spilled)

    # The gradient.

    @property
    def gradient(self) -> Ref:
        """The gradient that microbatches are added to."""
        return self.ref(Memory.GRADIENT, self._adding)

    @property
    def decided(self) -> Ref:
        """The gradient that Adam reads."""
        return self.ref(Memory.GRADIENT, self._decided)

    @property
    def directions(self) -> Ref | None:
        """Of matrices, what takes the place of `decided`; None for other buckets."""
        return self.decided._replace(dtype=MATRIX_DTYPE) if self.spec.matrices else None

    @cached_property
    def sums_on_device(self) -> bool:
        """Its microbatches are summed on the device, and its state is on the host."""
        return self.has(Memory.SUM)

    @property
    def summed(self) -> Ref:
        """The memory in which its gradient of the step is complete first, and is measured."""
        return self.ref(Memory.SUM) if self.sums_on_device else self.gradient

    @cached_property
    def sum_tier(self) -> Tier:
        """The tier of `summed`."""
        return Tier.DEVICE if self.sums_on_device else self.spec.update_tier

    @cached_property
    def sums_lane(self) -> Lane:
        """The lane that adds microbatches and measures the gradient."""
        return Lane.UPDATE if self.sum_tier is Tier.DEVICE else Lane.HOST

    @property
    def used(self) -> Ref | None:
        """The marks of experts that got a gradient; None for a bucket that is updated whole."""
        return self.ref(Memory.USED) if self.spec.experts else None

    def piece(self, lo: int, hi: int) -> Ref:
        """Return a part of the gradient."""
        return self._part(self.gradient, lo, hi)

    def piece_summed(self, lo: int, hi: int) -> Ref:
        """Return a part of `summed`."""
        return self._part(self.summed, lo, hi)

    def _part(self, full: Ref, lo: int, hi: int) -> Ref:
        return full if hi - lo == self.spec.shard_numel else full._replace(lo=lo, hi=hi)

    def take_gradient_slot(self, slot: int) -> None:
        """`gradient` is in this slot of the host from here on."""
        self._adding = self._decided = slot

    def close_sum(self) -> None:
        """The gradient is the one that Adam will read; the next step's goes to the other."""
        self._decided = self._adding
        if not self.spec.gradient_on_disk and self.has(Memory.GRADIENT, 1):
            self._adding = 1 - self._adding

    # The weights on the device.

    @cached_property
    def is_streamed(self) -> bool:
        """Its weights are loaded for their use."""
        return bool(self._sources)

    @property
    def whole(self) -> Ref:
        """Its working weights on the device, as compute reads them."""
        return self.ref(Memory.WORKING, self.slot if self.is_streamed else self.version)

    @property
    def shard(self) -> Ref:
        """This rank's shard of its working weights."""
        return self._shard_of(self.whole)

    @property
    def newest(self) -> Ref:
        """The working weights, of a bucket that stays on the device, that new ones are brought
        to."""
        return self.ref(Memory.WORKING, self._newest)

    @property
    def upload_target(self) -> Ref:
        """The device memory that new weights are brought to."""
        if self.source_tier is Tier.DEVICE:
            return self._sources[self._newest]
        return self._shard_of(self.newest)

    def _shard_of(self, full: Ref) -> Ref:
        lo = self.rank * self.spec.shard_numel
        return full._replace(lo=lo, hi=lo + self.spec.shard_numel)

    @property
    def _newest(self) -> int:
        # An update in place leaves them in the state, whatever loads have read.
        if self.loads_in_turn and self._sources[0].memory is Memory.STATE:
            return 0
        return 1 - self.version if self.beside else self.version

    # The weights that loads of a streamed bucket read.

    @cached_property
    def source_tier(self) -> Tier | None:
        """The tier that the weights of a streamed bucket are loaded from; None for a bucket that
        stays on the device."""
        if not self._sources:
            return None
        memory = self._sources[0].memory
        if memory is Memory.DEVICE_SHARD:
            return Tier.DEVICE
        return Tier.DISK if memory in (Memory.WEIGHT_FILE, Memory.STATE_FILE) else Tier.HOST

    @cached_property
    def loads_in_turn(self) -> bool:
        """Two versions of its weights are kept, on the host or the device, which loads read in
        turn."""
        return len(self._sources) > 1 and self.source_tier is not Tier.DISK

    @property
    def load_source(self) -> Ref:
        """The memory that loads of a streamed bucket read."""
        return self._sources[self.version]

    @property
    def in_use(self) -> Ref:
        """This rank's shard of the weights that forward uses, where they lie between two uses."""
        return self.load_source if self.is_streamed else self.shard

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
    def new_weight_file(self) -> Ref | None:
        """The file that new weights are written to; None where they go with the state, or to no
        disk."""
        if not (self.is_streamed and self._sources[0].memory is Memory.WEIGHT_FILE):
            return None
        return self._sources[self.version - 1]

    def flip_weight_file(self) -> bool:
        """Let loads read what was written last; returns False where they do so anyway."""
        if len(self._sources) < 2:
            return False
        self.turn()
        return True

    @cached_property
    def loads_from_state_file(self) -> bool:
        """Its weights on the disk are those in its state."""
        return self.is_streamed and self._sources[0].memory is Memory.STATE_FILE

    # New weights.

    def staged(self, *, other: bool = False) -> Ref | None:
        """Return where new weights wait for their upload, or where they are used if they need not
        wait; None for a slot of a ring."""
        if self.loads_in_turn and self.source_tier is Tier.HOST:
            return self._sources[self._newest]
        match self.staging:
            case Memory.PENDING:
                return self.ref(Memory.PENDING)
            case Memory.STATE:
                return self.state(other=other)[0]
            case Memory.WORKING | Memory.DEVICE_SHARD:
                return self.upload_target
            case Memory.GRADIENT:
                return self.decided
            case _:
                return None


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
