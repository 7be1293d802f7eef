"""StepSpec: blocks, buckets, shards, staging, and the residence of the bytes of each.

The engine builds it from a module (also on the meta device), the plan from a model's shape. Rules
over sizes are written here and nowhere else. Sizes are of one rank.

[Note: Pieces of a shard]
A bucket that is larger than a staging slot goes through it in pieces. A piece is a part [lo, hi) of
*every* rank's shard, one behind the other in the slot, so that a reduce-scatter of the slot leaves
each rank the part of its own shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.step.bucket_layout import ALIGN
from offloadtrain.step.formats import ITEMSIZE, StateFormat
from offloadtrain.step.spill import SPILL_BLOCK, SpillPart, spill
from offloadtrain.step.tiers import Tier

RING_SLOTS = 2
"""One slot is filled while the other is copied."""

STAGING_SLOTS_MOST = 8
"""The largest number of device slots for gathered gradients."""

STATE_SLOTS = 3
"""Host slots for state on the disk: one is read, one is updated, one is written."""

STAGING_BYTES = 64 << 20
"""Enough for the bus's full speed; staging does not grow with the model."""

MATRIX_BYTES = 2
"""Bytes of an element of a matrix on its way to be orthogonalized, which is bf16."""


class MatrixSpec(NamedTuple):
    """A matrix that is updated as a whole.

    Attributes:
        offset: its first element in the bucket.
    """

    offset: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def workspace_numel(self) -> int:
        """Elements that its orthogonalization needs beside it: its product with a polynomial of its
        Gram matrix, and both of these."""
        return self.numel + 2 * min(self.rows, self.columns) ** 2


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Parameters of one block with one working dtype and one set of hyperparameters.

    Attributes:
        numel: elements of the whole, padding included.
        params: elements without padding.
        dtype: that of the working weights, by torch's name.
        format: the format of the state.
        ranks: the number of ranks that share it.
        moments: the state that its update rule keeps besides the master weights.
        matrices: of a rule that needs them whole; each in the shard of one rank.
        state_tier: where the state lies.
    """

    name: str
    numel: int
    params: int
    dtype: str
    format: StateFormat
    ranks: int = 1
    moments: tuple[str, ...] = ()
    matrices: tuple[MatrixSpec, ...] = ()
    state_tier: Tier = Tier.HOST

    @property
    def update_tier(self) -> Tier:
        """Where the gradient lies and the state is updated."""
        return Tier.HOST if self.is_on_disk else self.state_tier

    @property
    def is_on_disk(self) -> bool:
        """The state is in a file, and on the host only while a slot holds it."""
        return self.state_tier is Tier.DISK

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's shard, and of each buffer of its state."""
        return self.numel // self.ranks

    @property
    def weight_bytes(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole's working weights."""
        return self.numel * self.weight_bytes

    @property
    def field_sizes(self) -> list[tuple[int, int]]:
        """(values, bytes of a value) of each field of this rank's state."""
        return [
            (field.numel(self.shard_numel), ITEMSIZE[field.dtype or self.dtype])
            for field in self.format.fields(self.moments)
        ]

    def matrices_of(self, rank: int) -> list[MatrixSpec]:
        """Return the matrices in a rank's shard."""
        first = rank * self.shard_numel
        return [one for one in self.matrices if first <= one.offset < first + self.shard_numel]


@dataclass(frozen=True)
class BlockSpec:
    """Parameters that move together: those that one module's forward uses as one.

    Attributes:
        buckets: the trained ones.
        frozen: the frozen ones, where the block may be streamed.
        repeated: one of several alike that are used one after the other: it can be streamed.
    """

    name: str
    buckets: tuple[BucketSpec, ...]
    frozen: tuple[BucketSpec, ...] = ()
    repeated: bool = False

    @property
    def held(self) -> tuple[BucketSpec, ...]:
        """All that a forward of the block reads."""
        return self.buckets + self.frozen

    @cached_property
    def nbytes(self) -> int:
        """Device memory of the working weights; every bucket starts on 256 bytes."""
        return sum(bucket.nbytes for bucket in self.held)


@dataclass(frozen=True)
class StepSpec:
    """The memory and the transfers of one rank in a step.

    Attributes:
        blocks: in the order of registration.
        config: the options of `offload`, "auto" resolved.
        ranks: the number of ranks that share the state.
        num_tensors: parameters of the model as tensors; a tied one counts once.
        streamed: names of blocks that are loaded into a device slot for their use.
        second_copies: names of blocks with a second copy of their state, which speculative updates
            are written into.
        weight_versions: of the working weights on the device; two: see [Note: Two versions] in
            `step.modes`.
        gradient_sums: of each bucket; two, where the next step's gradients arrive before a step is
            decided.
    """

    blocks: tuple[BlockSpec, ...]
    config: OffloadConfig
    ranks: int
    num_tensors: int
    streamed: frozenset[str] = frozenset()
    second_copies: frozenset[str] = frozenset()
    weight_versions: int = 1
    gradient_sums: int = 1

    @property
    def is_single(self) -> bool:
        return self.ranks == 1

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage; 0 for a single rank."""
        return self.config.zero_stage_among(self.ranks)

    @property
    def streams(self) -> bool:
        """True if repeated blocks may be loaded for their use."""
        return self.config.streams_among(self.ranks)

    def buckets_on(self, tier: Tier) -> tuple[BucketSpec, ...]:
        """Return the trained buckets whose gradient is on a tier, where their state is updated."""
        return tuple(bucket for bucket in self.buckets if bucket.update_tier is tier)

    def has_state_on(self, tier: Tier) -> bool:
        """Whether state is updated there."""
        return any(bucket.update_tier is tier for bucket in self.buckets)

    @property
    def accumulates(self) -> bool:
        """Microbatches are summed beside the state."""
        return self.config.grad_accum_steps > 1

    def sums_on_device(self, bucket: BucketSpec) -> bool:
        """Microbatches are summed on the device, and one copy of the sum goes to the host."""
        on_host = bucket.update_tier is Tier.HOST
        return on_host and self.accumulates and self.config.sums_on == "device"

    def norm_tier(self, bucket: BucketSpec) -> Tier:
        """Return where the sums of squares of its gradient are taken."""
        return Tier.DEVICE if self.sums_on_device(bucket) else bucket.update_tier

    def measures_on(self, tier: Tier) -> bool:
        return any(self.norm_tier(bucket) is tier for bucket in self.buckets)

    @property
    def stages_on_host(self) -> bool:
        """Gradients or new weights go through a ring of host slots in every step."""
        return self.accumulates and self.has_state_on(Tier.HOST)

    @property
    def updates_early(self) -> bool:
        """In mode "exact": nothing global has to be known before a bucket is updated."""
        return self.config.updates_early

    @property
    def updates_in_backward(self) -> bool:
        """Adam may run beside a backward, of its own step or (mode "delayed") of the next one."""
        return self.config.update != "exact" or self.updates_early

    @property
    def is_delayed(self) -> bool:
        """Between steps forward uses older weights than the rounded masters."""
        return self.config.update == "delayed"

    @property
    def weights_wait(self) -> bool:
        """New weights wait for their upload longer than their gradient's memory is free."""
        if self.weight_versions > 1:
            return False
        return self.config.update != "exact" or (self.updates_early and self.accumulates)

    @cached_property
    def buckets(self) -> tuple[BucketSpec, ...]:
        """The trained buckets of all blocks."""
        return tuple(bucket for block in self.blocks for bucket in block.buckets)

    @cached_property
    def block_of(self) -> dict[str, BlockSpec]:
        """Bucket → its block, frozen ones included."""
        return {bucket.name: block for block in self.blocks for bucket in block.held}

    @cached_property
    def state_slots(self) -> int:
        """The number of host slots for state on the disk."""
        return min(STATE_SLOTS, sum(bucket.is_on_disk for bucket in self.buckets))

    @cached_property
    def _trained(self) -> frozenset[str]:
        return frozenset(bucket.name for bucket in self.buckets)

    def is_trained(self, bucket: BucketSpec) -> bool:
        return bucket.name in self._trained

    # Saves.

    @cached_property
    def save_order(self) -> tuple[BucketSpec, ...]:
        """The trained buckets in the order in which the next updates come, each of which waits for
        its bucket's write."""
        blocks = reversed(self.blocks) if self.updates_in_backward else self.blocks
        return tuple(bucket for block in blocks for bucket in block.buckets)

    @cached_property
    def spilled(self) -> Mapping[str, Sequence[SpillPart]]:
        """Bucket → what a save copies of its state; see [Note: Spill] in `spill.py`."""
        on_host = (bucket for bucket in self.save_order if bucket.state_tier is Tier.HOST)
        sizes = [(bucket.name, bucket.field_sizes) for bucket in on_host]
        return spill(sizes, self.config.checkpoint_spill)

    def spill_bytes(self, bucket: BucketSpec) -> int:
        """Bytes of the memory for what a save copies of a bucket."""
        return SPILL_BLOCK * sum(part.blocks for part in self.spilled.get(bucket.name, ()))

    # The weights of streamed blocks between their uses.

    def is_streamed(self, bucket: BucketSpec) -> bool:
        return self.block_of[bucket.name].name in self.streamed

    def loads_from_host(self, bucket: BucketSpec) -> bool:
        """True for a bucket that is streamed from the host."""
        return self.config.working == "host" and self.is_streamed(bucket)

    def loads_from_shard(self, bucket: BucketSpec) -> bool:
        """True for a bucket that is streamed from shards on the devices."""
        return self.config.working == "device" and self.is_streamed(bucket)

    def has_snapshot(self, bucket: BucketSpec) -> bool:
        """True if loads read a snapshot of the forward's weights: the memory that an update writes
        may change inside backward, while loads of that backward must read the old weights."""
        return self.loads_from_host(bucket) and self.updates_in_backward

    def has_pending(self, bucket: BucketSpec, *, copied: bool | None = None) -> bool:
        """New weights need memory of their own until their upload.

        Args:
            copied: the bucket has a second copy of its state; None: as the spec says.
        """
        if bucket.format.holds_weight:
            # They are in the state; its slot may go to another bucket before they are uploaded.
            waits = self.weights_wait or self.updates_early or self.loads_from_host(bucket)
            return waits and bucket.is_on_disk
        if self.loads_from_host(bucket) or self._outgrows_host_staging(bucket):
            return True
        if copied is None:
            copied = self.has_second_copy(bucket)
        return self.weights_wait and (copied or self.config.update != "speculative")

    def _outgrows_host_staging(self, bucket: BucketSpec) -> bool:
        shard_bytes = bucket.shard_numel * bucket.weight_bytes
        on_host = bucket.update_tier is Tier.HOST
        return on_host and self.accumulates and shard_bytes > STAGING_BYTES

    def has_second_copy(self, bucket: BucketSpec) -> bool:
        on_host = bucket.state_tier is Tier.HOST
        return on_host and self.block_of[bucket.name].name in self.second_copies

    # Staging of gradients.

    def reduced_bytes(self, bucket: BucketSpec) -> int:
        """Bytes of an element of a gradient while ranks sum it."""
        wide = not self.is_single and self.config.reduction == "fp32"
        return 4 if wide else bucket.weight_bytes

    @cached_property
    def _largest_gradient(self) -> int:
        return max(bucket.numel * self.reduced_bytes(bucket) for bucket in self.buckets)

    @cached_property
    def staging_bytes(self) -> int:
        """Bytes of one device slot for gathered gradients. A larger bucket goes through it in
        pieces, which hold at least one alignment of every rank's shard."""
        return max(min(self._largest_gradient, STAGING_BYTES), ALIGN * 4 * self.ranks)

    @cached_property
    def staging_slots(self) -> int:
        """One slot per piece of the largest bucket and one that is copied meanwhile, so that
        compute need not wait for the copies of its own block; at most `STAGING_SLOTS_MOST`."""
        pieces = -(-self._largest_gradient // self.staging_bytes)
        return max(RING_SLOTS, min(pieces + 1, STAGING_SLOTS_MOST))

    @cached_property
    def host_staging_bytes(self) -> int:
        """Bytes of one host slot for gradients and weights."""
        on_host = self.buckets_on(Tier.HOST)
        largest = max((one.shard_numel * one.weight_bytes for one in on_host), default=0)
        return max(min(largest, STAGING_BYTES), ALIGN * 4)

    def pieces(self, bucket: BucketSpec) -> list[tuple[int, int]]:
        """Return the ranges [lo, hi) of the shard that go down one after the other."""
        per_shard = self.staging_bytes // (self.reduced_bytes(bucket) * self.ranks)
        step = per_shard // ALIGN * ALIGN
        numel = bucket.shard_numel
        return [(lo, min(lo + step, numel)) for lo in range(0, numel, step)] or [(0, 0)]

    @cached_property
    def matrix_bytes(self) -> int:
        """Bytes of the device memory in which one matrix after the other is orthogonalized: the
        workspace and, where the state is updated on the host, the matrix itself."""
        sizes = (
            one.workspace_numel + (one.numel if bucket.update_tier is Tier.HOST else 0)
            for bucket in self.buckets
            for one in bucket.matrices
        )
        return max(sizes, default=0) * MATRIX_BYTES

    @property
    def slots(self) -> int:
        """The number of device slots for streamed blocks."""
        return min(self.config.device_slots, len(self.streamed))
