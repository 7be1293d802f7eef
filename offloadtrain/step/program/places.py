"""The buffers of each bucket, as refs for the operations of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from offloadtrain.step.layout.block_spec import BucketSpec, MatrixSpec
from offloadtrain.step.layout.buffers import BufferTable, Memory, WeightRoute
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.gradients import UPDATE_LANES, GradientRefs
from offloadtrain.step.program.operations import Lane, Ref, ref_of

MATRIX_DTYPE = "bfloat16"


class BucketRefs:
    """Refs of a bucket's buffers, as listed in the table, and the choice of those in use.

    Attributes:
        rank: index of this rank among those that share it.
        gradient: gradient of a trained bucket.
        staging: kind of memory that new weights are written to; None for a frozen bucket.
        weight_route: route of new weights from there; None for a frozen bucket.
        sources: for a streamed bucket, the buffers that its loads read, one per version of the
            weights; empty for a bucket that stays on the device.
        source_kind: kind of these buffers; of the first, if one is in the state.
        state_files: all fields of the state on the disk; empty if it is in memory.
        spilled: the parts of its state that a save copies.
        copy: index of the copy that is the current state; for state on the disk, its present or
            last host slot.
        slot: for a streamed bucket, the present or last device slot of its block.
        version: of two versions of the weights, the one that compute, or its loads, read.
        updates_other_version: new weights are written to the other version of the working weights.
    """

    gradient: GradientRefs

    def __init__(self, spec: BucketSpec, step: StepSpec, table: BufferTable, rank: int) -> None:
        self.spec = spec
        # [Note: Sharers] in `step.layout.step_spec`.
        self.rank = rank * spec.ranks // step.ranks
        rows = table.of_bucket.get(spec.name, {})
        self._refs = {key[1:]: ref_of(key, row) for key, row in rows.items()}
        fields = range(len(spec.format.fields(spec.moments)))
        self._states = {
            version: tuple(self._refs[kind, version, number] for number in fields)
            for kind, version, number in self._refs
            if number == 0 and kind is Memory.STATE
        }
        """Index of the copy, or of the host slot → all fields of the state."""
        files = [(Memory.STATE_FILE, 0, number) for number in fields]
        self.state_files = tuple(self._refs[key] for key in files if key in self._refs)
        self.sources = [self._refs[key[1:]] for key in table.sources.get(spec.name, ())]
        self.source_kind = self.sources[0].memory if self.sources else None
        self.staging = table.staging.get(spec.name)
        self.weight_route = table.weight_route.get(spec.name)
        if self.staging is not None:
            self.gradient = GradientRefs(spec, step, self._refs, self.rank)
        self.spilled = step.spilled.get(spec.name, ()) if self.staging is not None else ()
        self.copy = self.version = 0
        self.slot = step.first_slot(spec)
        self.updates_other_version = False

    @cached_property
    def name(self) -> str:
        return self.spec.name

    def has(self, kind: Memory) -> bool:
        """Return True if the table has a buffer of this kind for this bucket."""
        return (kind, 0, 0) in self._refs

    def ref(self, kind: Memory, version: int = 0) -> Ref:
        """Return all elements of a buffer of this bucket."""
        return self._refs[kind, version, 0]

    # The state.

    @cached_property
    def lane(self) -> Lane:
        """The lane that updates its state."""
        return UPDATE_LANES[self.spec.update_tier]

    @cached_property
    def has_second_copy(self) -> bool:
        """True if the state has a second copy, which speculative updates write."""
        return not self.state_files and 1 in self._states

    @cached_property
    def matrices(self) -> list[MatrixSpec]:
        """The matrices in this rank's shard, as elements of it."""
        first = self.rank * self.spec.shard_numel
        in_shard = self.spec.matrices_of(self.rank)
        return [matrix._replace(offset=matrix.offset - first) for matrix in in_shard]

    @property
    def directions(self) -> Ref | None:
        """For matrices, the orthogonalization input, which replaces the gradient; None for other
        buckets."""
        return self.gradient.decided._replace(dtype=MATRIX_DTYPE) if self.spec.matrices else None

    def state(self, *, other: bool = False) -> tuple[Ref, ...]:
        """Return all fields of the state, or of its other copy."""
        return self._states[1 - self.copy if other else self.copy]

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

    # The weights on the device.

    @property
    def working(self) -> Ref:
        """Its working weights on the device, as compute reads them."""
        return self._refs[Memory.WORKING, self.slot if self.sources else self.version, 0]

    @property
    def shard(self) -> Ref:
        """This rank's shard of its working weights."""
        return self._shard_of(self.working)

    @property
    def newest(self) -> Ref:
        """The working weights, for a bucket that stays on the device, that new weights are copied
        to."""
        return self.ref(Memory.WORKING, self.newest_version)

    @property
    def upload_target(self) -> Ref:
        """The device memory that new weights are copied to."""
        if self.source_kind is Memory.DEVICE_SHARD:
            return self.sources[self.newest_version]
        return self._shard_of(self.newest)

    def _shard_of(self, full: Ref) -> Ref:
        if self.spec.ranks == 1:
            return full
        lo = self.rank * self.spec.shard_numel
        return full._replace(lo=lo, hi=lo + self.spec.shard_numel)

    @property
    def newest_version(self) -> int:
        """The version that new weights have, or will have."""
        # An update in place leaves them in the state, whatever loads have read.
        if self.loads_in_turn and self.source_kind is Memory.STATE:
            return 0
        return 1 - self.version if self.updates_other_version else self.version

    # The weights that loads of a streamed bucket read.

    @cached_property
    def loads_from_file(self) -> bool:
        """True if its weights are loaded from the disk, through a host slot."""
        return self.source_kind in (Memory.WEIGHT_FILE, Memory.STATE_FILE)

    @cached_property
    def loads_in_turn(self) -> bool:
        """True if there are two versions of its weights, on the host or the device, which loads
        read alternately."""
        return len(self.sources) > 1 and not self.loads_from_file

    @property
    def load_source(self) -> Ref:
        """The memory that loads of a streamed bucket read."""
        return self.sources[self.version]

    @property
    def in_use(self) -> Ref:
        """This rank's shard of the weights that forward uses, in their memory between two uses."""
        return self.load_source if self.sources else self.shard

    # New weights.

    def staged(self, *, other: bool = False) -> Ref | None:
        """Return the memory of new weights until their upload, or their final memory if they are
        not pending; None for a slot of a ring."""
        if self.weight_route is WeightRoute.IN_TURN:
            return self.sources[self.newest_version]
        match self.staging:
            case Memory.PENDING:
                return self.ref(Memory.PENDING)
            case Memory.STATE:
                return self.state(other=other)[0]
            case Memory.WORKING | Memory.DEVICE_SHARD:
                return self.upload_target
            case Memory.GRADIENT:
                return self.gradient.decided
            case _:
                return None


BlockRefs = tuple[str, Sequence[BucketRefs]]
"""A block's name, and its trained buckets."""
