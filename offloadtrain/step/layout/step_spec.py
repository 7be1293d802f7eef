"""StepSpec: blocks, buckets, shards, staging, and the tiers of the bytes of each.

The engine builds it from a module (also on the meta device), the plan from a model's shape. Rules
about sizes are defined only here. Sizes are those of one rank.

[Note: Sharers]
A bucket is shared by all ranks or by fewer: parameters of which ranks hold different parts are in
separate buckets, shared only by the ranks with the same part. `BucketSpec.ranks` is their number.
Rank r of all is then number r · `BucketSpec.ranks` // `StepSpec.ranks` among them: the ranks that
hold different parts are neighbours.

[Note: Pieces of a shard]
A bucket that is larger than a staging slot passes through it in pieces. A piece is a part [lo, hi)
of *every* rank's shard, one after the other in the slot, so that a reduce-scatter of the slot gives
each rank the part of its shard.

[Note: Spill]
A save copies some state first, so that the next updates need not wait for its writing. It writes
buckets in the order of the updates that wait for them, so the last update waits longest. The
*spill* is host memory for the end of that order: the last bytes of state that fit in it. A save
copies them into it on the host lane, after the updates so far, and writes them from there. The
next updates wait only for the other writes, and the last of these ends earlier by the time that the
disk needs for the spill. The choice of these bytes depends only on sizes: a copy at memory speed
costs less than a choice by the disk's progress, and one program is valid for every speed of the
disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.config.toml import text_of
from offloadtrain.step.layout.block_spec import ALIGN, BlockSpec, BucketSpec
from offloadtrain.step.layout.buffers import Memory
from offloadtrain.step.layout.formats import ITEMSIZE
from offloadtrain.step.layout.tiers import Tier

SPILL_BLOCK = 4096
"""In bytes: the unit in which state is cut, a multiple of what disks write without a copy."""


class SpillPart(NamedTuple):
    """The last part of a field of a bucket's state.

    Attributes:
        field: index of the field.
        lo, hi: the copied values; `hi` is the field's end.
        offset: offset of the first one in the bucket's spill, in values.
        blocks: number of `SPILL_BLOCK`s that they take.
    """

    field: int
    lo: int
    hi: int
    offset: int
    blocks: int


Fields = Sequence[tuple[int, int]]
"""(number of values, bytes per value) for each field of a bucket."""


def spill(buckets: Iterable[tuple[str, Fields]], limit: int) -> Mapping[str, Sequence[SpillPart]]:
    """Return bucket name → the parts of it that are copied.

    Args:
        buckets: in the order in which they are written.
        limit: bytes that the parts of all buckets may take.
    """
    room, spilled = limit // SPILL_BLOCK, {}
    for name, fields in reversed(list(buckets)):
        parts, used = [], 0
        # The last blocks of its fields, last field first.
        for number, (numel, size) in reversed(list(enumerate(fields))):
            of_field = -(-numel * size // SPILL_BLOCK)
            blocks = min(of_field, room - used)
            if blocks:
                lo = (of_field - blocks) * SPILL_BLOCK // size
                parts.append(SpillPart(number, lo, numel, used * SPILL_BLOCK // size, blocks))
                used += blocks
        if parts:
            spilled[name] = parts[::-1]
            room -= used
    return spilled


RING_SLOTS = 2
"""One slot is filled while the other is copied."""

STAGING_SLOTS_MOST = 8
"""Maximum number of device slots for gathered gradients outside of layers."""

LAYER_SLOTS_MOST = 32
"""The same for layers: 2 GiB, as much as the weights of a layer of a billion parameters."""

STATE_SLOTS = 3
"""Host slots for state on the disk: one is read, one is updated, one is written."""

GRADIENT_SLOTS = 3
"""Host slots for gradients on the disk: one is filled, one is written, one is read."""

STAGING_BYTES = 64 << 20
"""Enough for the bus's full speed; staging does not grow with the model."""

MATRIX_BYTES = 2
"""Bytes per element (bf16) of a matrix that is passed to orthogonalization."""


UpdatePolicy: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class StepSpec:
    """The memory and the transfers of one rank in a step.

    Attributes:
        blocks: in the order of registration.
        config: the options of `offload`, "auto" resolved.
        ranks: number of ranks that share the state.
        copies: number of such groups of ranks, which sum their gradients.
        input_parts: number of parts of a block's input, one per rank; see [Note: Partitioned
            activations] in `step.program.activations`.
        num_tensors: number of parameter tensors of the model; tied ones count once.
        streamed: names of blocks that are loaded into a device slot before each use.
        second_copies: names of blocks with a second copy of their state, which speculative updates
            write.
        weight_versions: number of versions of the working weights.
        gradient_sums: number of sums per bucket; two if gradients of the next step arrive before a
            step is decided.
        update_policy: makes the update mode of a `step.program.updates.UpdatePath`, instead of
            `config.update`.
    """

    blocks: tuple[BlockSpec, ...]
    config: OffloadConfig
    ranks: int
    num_tensors: int
    streamed: frozenset[str] = frozenset()
    second_copies: frozenset[str] = frozenset()
    weight_versions: int = 1
    gradient_sums: int = 1
    update_policy: UpdatePolicy | None = None
    copies: int = 1
    input_parts: int = 1

    @property
    def replicas(self) -> int:
        """Number of ranks whose batches form a step: those of all copies."""
        return self.ranks * self.copies

    @property
    def moves_inputs(self) -> bool:
        """True if inputs of repeated blocks are moved from the memory in which forward made
        them."""
        return self.config.activations.mode in ("offload", "offload_saved") or self.input_parts > 1

    @property
    def offloads_saved(self) -> bool:
        """True if all large memory that autograd saves is copied to the host."""
        return self.config.activations.mode == "offload_saved"

    @property
    def input_memory(self) -> Memory:
        """The kind of memory that block inputs are moved to."""
        stays = self.config.activations.mode in ("recompute", "selective")
        return Memory.KEPT_ACTIVATION if stays and self.input_parts > 1 else Memory.HOST_ACTIVATION

    @property
    def is_single(self) -> bool:
        return self.ranks == 1

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage; 0 for a single rank."""
        return self.config.zero_stage_among(self.ranks)

    @property
    def streams(self) -> bool:
        """True if repeated blocks may be streamed."""
        return self.config.streams_among(self.ranks)

    @property
    def period(self) -> int:
        """Number of steps after which the operations repeat. There are 2 or 3 slots for data on the
        disk: if the number of buckets in a step is not a multiple, the next step starts with
        another slot."""
        return 6 if self.config.uses_disk else 1

    def buckets_on(self, tier: Tier) -> tuple[BucketSpec, ...]:
        """Return the trained buckets whose gradient and update are on a tier."""
        return tuple(bucket for bucket in self.buckets if bucket.update_tier is tier)

    def has_state_on(self, tier: Tier) -> bool:
        """Return True if state is updated on a tier."""
        return any(bucket.update_tier is tier for bucket in self.buckets)

    @property
    def accumulates(self) -> bool:
        """True if the sum of microbatches has separate memory, on the tier of the state."""
        return self.config.grad_accum_steps > 1

    def sums_on_device(self, bucket: BucketSpec) -> bool:
        """Return True if microbatches are summed on the device, and one copy of the sum goes to the
        host."""
        on_host = bucket.update_tier is Tier.HOST
        return on_host and self.accumulates and bucket.sums_on_device

    @property
    def lost_with_device(self) -> str:
        """State that an update needs and the host does not have, as a sentence; "" for none."""
        if any(self.sums_on_device(bucket) for bucket in self.buckets):
            # A step is decided by the norm, which is then known before the sums are on the host.
            where = text_of(self.config.gradients.sums_tier)
            return f"gradients were summed on the device (offload.sums_on = {where})"
        if lost := [bucket for bucket in self.buckets if bucket.state_tier is not Tier.HOST]:
            return (
                f"the state of {len(lost)} of {len(self.buckets)} buckets was on the "
                f"{lost[0].state_tier} (offload.state_on)"
            )
        return ""

    def rounds_sum(self, bucket: BucketSpec) -> bool:
        """Return True if the sum is rounded to the working dtype before it is measured and copied
        to the host; also if it stays on the device, so that placement changes no bit."""
        narrow = self.config.gradients.sums_dtype == "working" and bucket.weight_bytes < 4
        return narrow and self.accumulates and bucket.sums_on_device

    def holds_sum(self, bucket: BucketSpec) -> bool:
        """Return True if the gradient that an update reads is an fp32 sum."""
        return self.accumulates and not (self.rounds_sum(bucket) and self.sums_on_device(bucket))

    @property
    def measures_gathered(self) -> bool:
        """True if the gradient is measured as backward has left it: it is the step's gradient, with
        one microbatch and a single rank."""
        return self.is_single and not self.accumulates

    def norm_tier(self, bucket: BucketSpec) -> Tier:
        """Return the tier that computes the sums of squares of a bucket's gradient."""
        return Tier.DEVICE if self.measures_gathered else self.sum_tier(bucket)

    def sum_tier(self, bucket: BucketSpec) -> Tier:
        """Return the tier on which a bucket's gradient of the step is complete first."""
        return Tier.DEVICE if self.sums_on_device(bucket) else bucket.update_tier

    def measures_on(self, tier: Tier) -> bool:
        """Return True if sums of squares are computed on a tier, even if only for gradients that
        are added to or never arrive: these are measured on the tier of the sum."""
        return any(
            tier in (self.norm_tier(bucket), self.sum_tier(bucket)) for bucket in self.buckets
        )

    @property
    def updates_early(self) -> bool:
        """In mode "exact": True if a bucket's update needs no global result."""
        return self.config.updates_early

    @property
    def updates_in_backward(self) -> bool:
        """True if Adam may run during a backward, of its own step or (mode "delayed") of the
        next."""
        return self.config.update != "exact" or self.updates_early

    @property
    def is_delayed(self) -> bool:
        """True if, between steps, forward uses older weights than the rounded masters."""
        return self.config.update == "delayed"

    @property
    def weights_wait(self) -> bool:
        """True if new weights wait for their upload longer than their gradient's memory is free."""
        if self.weight_versions > 1:
            return False
        return self.config.update != "exact" or (self.updates_early and self.accumulates)

    @cached_property
    def buckets(self) -> tuple[BucketSpec, ...]:
        """The trained buckets of all blocks."""
        return tuple(bucket for block in self.blocks for bucket in block.buckets)

    @cached_property
    def block_of(self) -> dict[str, BlockSpec]:
        """Bucket → its block, including frozen buckets."""
        return {bucket.name: block for block in self.blocks for bucket in block.all_buckets}

    @cached_property
    def state_slots(self) -> int:
        """Number of host slots for state on the disk."""
        return min(STATE_SLOTS, sum(bucket.is_on_disk for bucket in self.buckets))

    @cached_property
    def gradient_slots(self) -> int:
        """Number of host slots for gradients on the disk."""
        return min(GRADIENT_SLOTS, sum(bucket.gradient_on_disk for bucket in self.buckets))

    @cached_property
    def _trained(self) -> frozenset[str]:
        return frozenset(bucket.name for bucket in self.buckets)

    def is_trained(self, bucket: BucketSpec) -> bool:
        return bucket.name in self._trained

    # Saves.

    @cached_property
    def save_order(self) -> tuple[BucketSpec, ...]:
        """The trained buckets in the order of the next updates, each of which waits for its
        bucket's write."""
        backwards = self.updates_in_backward and self.weight_versions == 1
        blocks = reversed(self.blocks) if backwards else self.blocks
        return tuple(bucket for block in blocks for bucket in block.buckets)

    @cached_property
    def spilled(self) -> Mapping[str, Sequence[SpillPart]]:
        """Bucket → parts of its state that a save copies; see [Note: Spill]."""
        on_host = (bucket for bucket in self.save_order if bucket.state_tier is Tier.HOST)
        sizes = [(bucket.name, bucket.field_sizes) for bucket in on_host]
        return spill(sizes, self.config.memory.checkpoint_spill)

    def spill_bytes(self, bucket: BucketSpec) -> int:
        """Return the bytes of memory for a bucket's parts that a save copies."""
        return SPILL_BLOCK * sum(part.blocks for part in self.spilled.get(bucket.name, ()))

    # The weights of streamed blocks between their uses.

    @cached_property
    def streamed_blocks(self) -> tuple[BlockSpec, ...]:
        return tuple(block for block in self.blocks if block.name in self.streamed)

    def is_streamed(self, bucket: BucketSpec) -> bool:
        return self.block_of[bucket.name].name in self.streamed

    def versions_on_device(self, block: str) -> int:
        """Return the number of versions of a block's weights that are on the device at once. A slot
        holds one: a backward that needs the other starts with a load of it."""
        return 1 if block in self.streamed else self.weight_versions

    def weight_tier(self, bucket: BucketSpec) -> Tier | None:
        """Return the tier of a streamed bucket's weights between two uses: device (a shard), host
        or disk; None for a bucket that stays on the device."""
        if not self.is_streamed(bucket):
            return None
        tier, in_state = Tier(self.config.weights.tier), bucket.format.holds_weight
        in_state = in_state and self.is_trained(bucket) and not self.updates_in_backward
        # State on the host that contains the weights, and which loads may read: no file is needed.
        on_host = tier is Tier.DISK and in_state and bucket.state_tier is Tier.HOST
        return Tier.HOST if on_host else tier

    def loads_in_turn(self, bucket: BucketSpec) -> bool:
        """Return True for a streamed bucket with two versions of its weights, between which loads
        alternate."""
        return self.weight_versions > 1 and self.is_streamed(bucket) and self.is_trained(bucket)

    def weight_files(self, bucket: BucketSpec) -> int:
        """Return the number of files with versions of a bucket's weights, in addition to its state.
        If an update may run inside backward, it writes one while loads of that backward read the
        other."""
        if self.weight_tier(bucket) is not Tier.DISK:
            return 0
        if self.is_trained(bucket) and self.updates_in_backward:
            return 2
        in_state = bucket.is_on_disk and bucket.format.holds_weight
        return 0 if in_state and self.is_trained(bucket) else 1

    @cached_property
    def weight_slots(self) -> int:
        """Number of host slots for weights in transfer from the disk to the device."""
        buckets = (bucket for block in self.blocks for bucket in block.all_buckets)
        return min(RING_SLOTS, sum(self.weight_tier(b) is Tier.DISK for b in buckets))

    def has_new_weight_slot(self, bucket: BucketSpec) -> bool:
        """Return True if new weights are written to the disk from a slot: neither the state nor the
        gradient's memory, which is wider, contains them."""
        written = self.weight_tier(bucket) is Tier.DISK and self.is_trained(bucket)
        return written and self.holds_sum(bucket) and not bucket.format.holds_weight

    def has_snapshot(self, bucket: BucketSpec) -> bool:
        """Return True if loads read a snapshot of the forward's weights: an update inside backward
        may change the memory that it writes, while loads of that backward must read the old
        weights."""
        return self.weight_tier(bucket) is Tier.HOST and self.updates_in_backward

    def has_pending(self, bucket: BucketSpec, *, copied: bool | None = None) -> bool:
        """Return True if new weights need separate memory until their upload.

        Args:
            copied: the bucket has a second copy of its state; None: as in the spec.
        """
        if self.weight_tier(bucket) is Tier.DISK:
            return False  # written as soon as they are ready
        if bucket.format.holds_weight:
            # They are in the state; its slot may be reused before they are uploaded.
            waits = self.weights_wait or self.updates_early or self.weight_tier(bucket) is Tier.HOST
            return waits and bucket.is_on_disk
        if self.weight_tier(bucket) is Tier.HOST:
            return True
        outgrows_staging = bucket.shard_numel * bucket.weight_bytes > STAGING_BYTES
        if outgrows_staging and bucket.update_tier is Tier.HOST and self.holds_sum(bucket):
            return True
        if bucket.gradient_on_disk and self.updates_early:
            return True  # the gradient's slot may be reused before their upload
        if copied is None:
            copied = self.has_second_copy(bucket)
        return self.weights_wait and (copied or self.config.update != "speculative")

    def has_second_copy(self, bucket: BucketSpec) -> bool:
        on_host = bucket.state_tier is Tier.HOST and not bucket.experts
        return on_host and self.block_of[bucket.name].name in self.second_copies

    # Staging of gradients.

    def reduced_bytes(self, bucket: BucketSpec) -> int:
        """Return the bytes per element of a gradient while ranks sum it."""
        return ITEMSIZE[self.reduced_dtype(bucket)]

    def reduced_dtype(self, bucket: BucketSpec) -> str:
        """Return the dtype of a gradient while ranks sum it."""
        wide = bucket.ranks > 1 and self.config.sharding.reduction == "fp32"
        return "float32" if wide else bucket.dtype

    def _largest_gradient(self, buckets: Iterable[BucketSpec]) -> int:
        sizes = (bucket.numel * self.reduced_bytes(bucket) for bucket in buckets)
        return max(sizes, default=0)

    @cached_property
    def staging_bytes(self) -> int:
        """Bytes of a device slot for gathered gradients. A larger bucket passes through it in
        pieces, which contain at least one alignment of every rank's shard."""
        return max(min(self._largest_gradient(self.buckets), STAGING_BYTES), ALIGN * 4 * self.ranks)

    @cached_property
    def staging_slots(self) -> int:
        """One slot per piece of the largest layer and one that is copied meanwhile, so that compute
        need not wait for the copies of the same block. Embedding and head, whose gradients arrive
        once in a backward, wait if they are larger than `STAGING_SLOTS_MOST` slots."""

        def slots(buckets: Iterable[BucketSpec], most: int) -> int:
            return min(-(-self._largest_gradient(buckets) // self.staging_bytes) + 1, most)

        layers = [bucket for block in self.blocks if block.repeated for bucket in block.buckets]
        return max(
            RING_SLOTS, slots(self.buckets, STAGING_SLOTS_MOST), slots(layers, LAYER_SLOTS_MOST)
        )

    @cached_property
    def host_staging_bytes(self) -> int:
        """Bytes of a host slot for gradients and weights."""
        on_host = self.buckets_on(Tier.HOST)
        largest = max((bucket.shard_numel * bucket.weight_bytes for bucket in on_host), default=0)
        return max(min(largest, STAGING_BYTES), ALIGN * 4)

    def pieces(self, bucket: BucketSpec) -> list[tuple[int, int]]:
        """Return the ranges [lo, hi) of the shard that are copied to the host one after the
        other."""
        per_shard = self.staging_bytes // (self.reduced_bytes(bucket) * bucket.ranks)
        step = per_shard // ALIGN * ALIGN
        numel = bucket.shard_numel
        return [(lo, min(lo + step, numel)) for lo in range(0, numel, step)] or [(0, 0)]

    @cached_property
    def matrix_bytes(self) -> int:
        """Bytes of the device memory in which matrices are orthogonalized one after the other: the
        workspace and, if the state is updated on the host, the matrix itself."""
        sizes = (
            matrix.workspace_numel + (matrix.numel if bucket.update_tier is Tier.HOST else 0)
            for bucket in self.buckets
            for matrix in bucket.matrices
        )
        return max(sizes, default=0) * MATRIX_BYTES

    # Device slots of streamed blocks.

    @cached_property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of each device slot: those of repeated blocks, then the slot of all other
        blocks."""
        streamed = [block for block in self.blocks if block.name in self.streamed]
        repeated = [block.nbytes for block in streamed if block.repeated]
        outside = [block.nbytes for block in streamed if not block.repeated]
        return (max(repeated, default=0),) * self.slots + ((max(outside),) if outside else ())

    @cached_property
    def slots(self) -> int:
        """Number of device slots for repeated blocks."""
        repeated = sum(block.repeated and block.name in self.streamed for block in self.blocks)
        return min(self.config.weights.device_slots, repeated)

    def slots_of(self, block: BlockSpec) -> range:
        """Return the slots that a streamed block can get."""
        return range(self.slots) if block.repeated else range(self.slots, len(self.slot_bytes))

    def first_slot(self, bucket: BucketSpec) -> int:
        """Return the slot in a streamed bucket's refs before its first load; 0 for others."""
        return self.slots_of(self.block_of[bucket.name]).start if self.is_streamed(bucket) else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the device memory of gradients in transfer to the host."""
        if self.zero_stage == 1:
            return sum(bucket.numel * self.reduced_bytes(bucket) for bucket in self.buckets)
        return self.staging_slots * self.staging_bytes
