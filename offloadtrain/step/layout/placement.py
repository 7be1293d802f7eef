"""Lays out a step: decides which blocks are streamed, the tier of state, and second copies.

[Note: Outside of layers]
In ZeRO stage 3 each rank stores a shard of every block. A block must be complete while it is used,
so sharding saves memory only if it shares its slot with others. Layers do. Embedding and head are
also used in sequence, and share a slot in addition to those of the layers: for two of equal size,
half of their bytes and a shard of each instead of both in full. A block outside of layers stays
complete

  if no other block has its size  a tied embedding, the only large one, would need a slot as large
                                  as itself, and its shard in addition
  if it is small                  a norm would evict the embedding, or the head, from the slot
                                  and have to be gathered itself, for a few KiB
  if slot and shards together     two of one size on two ranks
  take as much as full blocks
  if other modules may run        its forward would occupy the slot while they need it
  inside of its forward

`keep_whole` names further blocks. So the decision depends on the bytes on the device, which never
grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from offloadtrain.config.errors import DeviceMemoryError, HostMemoryError
from offloadtrain.config.offload import OffloadConfig, OptionError
from offloadtrain.config.units import format_bytes
from offloadtrain.step.layout.block_spec import BlockSpec, BucketSpec
from offloadtrain.step.layout.buffer_table import arena_rows, device_bytes, second_copy_bytes
from offloadtrain.step.layout.buffers import largest_owners, span_bytes
from offloadtrain.step.layout.formats import ITEMSIZE
from offloadtrain.step.layout.state_tiers import with_state_tiers, with_sum_tiers
from offloadtrain.step.layout.step_spec import StepSpec, UpdatePolicy
from offloadtrain.step.layout.tiers import Tier

SMALL_SHARE = 1 / 8
"""Share of the largest block outside of layers; smaller blocks stay complete."""


def _outside(spec: StepSpec) -> list[BlockSpec]:
    """List the streamed blocks outside of lists; see [Note: Outside of layers]."""
    resident = set()
    for pattern in spec.config.sharding.keep_whole:
        names = [block.name for block in spec.blocks if not block.repeated]
        if not (matches := {name for name in names if fnmatchcase(name, pattern)}):
            some = ", ".join(map(repr, names[:8])) or "none"
            raise OptionError(
                f"keep_whole = {pattern!r} matches no module outside of layers that holds weights; "
                f"there are {some}"
            )
        resident |= matches
    if spec.zero_stage != 3:
        return []
    able = [
        block
        for block in spec.blocks
        if block.leaf and not block.repeated and block.name not in resident
    ]
    largest = max((block.nbytes for block in able), default=0)
    shared = [block for block in able if block.nbytes >= largest * SMALL_SHARE]
    resident_bytes = sum(_held_bytes(spec, block) for block in shared)
    return shared if _bytes_streamed(spec, shared) < resident_bytes else []


def _bytes_streamed(spec: StepSpec, outside: Sequence[BlockSpec]) -> int:
    """Return the bytes of these blocks on the device if they share a slot."""
    sizes = [block.nbytes for block in outside]
    return max(sizes, default=0) + _shard_bytes(spec, outside)


def _shard_bytes(spec: StepSpec, blocks: Sequence[BlockSpec]) -> int:
    """Return the bytes of this rank's shards that stay on its device."""
    if spec.config.weights.offloaded:
        return 0
    shards = (bucket for block in blocks for bucket in block.all_buckets)
    return sum(bucket.shard_bytes * _versions(spec, bucket) for bucket in shards)


def _held_bytes(spec: StepSpec, block: BlockSpec) -> int:
    """Return the bytes of a block that stays on the device."""
    return sum(bucket.nbytes * _versions(spec, bucket) for bucket in block.all_buckets)


def _versions(spec: StepSpec, bucket: BucketSpec) -> int:
    return spec.weight_versions if spec.is_trained(bucket) else 1


def _repeated(spec: StepSpec, outside: Sequence[BlockSpec]) -> set[str]:
    """Choose the repeated blocks that are streamed. The resident ones are spread evenly,
    so that a load can run during the forward of each of them."""
    config = spec.config
    repeated = [block for block in spec.blocks if block.repeated and spec.streams]
    limit, requested = config.memory.device_limit, config.weights.resident_blocks
    room = len(repeated) if limit is None else _room(spec, repeated, outside, limit)
    if requested is not None and room < min(requested, len(repeated)):
        raise DeviceMemoryError(
            f"resident_blocks = {requested}, and device_memory_limit = {format_bytes(limit or 0)} "
            f"has room for {room} beside the rest and {config.weights.device_slots} slots: lower "
            "the one or raise the other"
        )
    stay = (
        min(requested, len(repeated)) if requested is not None else (0 if limit is None else room)
    )
    # The i-th of n resident blocks is in the middle of the i-th of n equal parts.
    staying = {repeated[(2 * i + 1) * len(repeated) // (2 * stay)].name for i in range(stay)}
    return {block.name for block in repeated} - staying


def _room(
    spec: StepSpec, repeated: Sequence[BlockSpec], outside: Sequence[BlockSpec], limit: int
) -> int:
    """Return the number of repeated blocks that can stay on the device."""
    config, sizes = spec.config, [_held_bytes(spec, block) for block in repeated]
    always_resident = [
        block for block in spec.blocks if block not in repeated and block not in outside
    ]
    # Without their frozen weights: these are outside of the limit, like the rest of the model's.
    rest = (
        sum(bucket.nbytes for block in always_resident for bucket in block.buckets)
        * spec.weight_versions
    )
    rest += _bytes_streamed(spec, outside) + spec.gradient_bytes
    if spec.streams:
        rest += _shard_bytes(spec, repeated)
    rest += spec.matrix_bytes
    # Sums of microbatches. If the state moves to the device, it includes them.
    summed = filter(spec.sums_on_device, spec.buckets)
    rest += sum(ITEMSIZE["float32"] * bucket.shard_numel for bucket in summed)
    if spec.measures_on(Tier.DEVICE):  # sums of squares: one per parameter tensor
        rest += ITEMSIZE["float64"] * spec.num_tensors
    rest += sum(bucket.experts for bucket in spec.buckets)  # a byte per expert: used or not
    least = rest + config.weights.device_slots * max(
        (block.nbytes for block in repeated), default=0
    )
    if least > limit and rest + sum(sizes) > limit:
        keys = ", or set working = 'host'"
        if config.weights.offloaded:
            keys = ", or set device_slots = 1" if config.weights.device_slots > 1 else ""
        keys += ", or lower sums_on" if any(map(spec.sums_on_device, spec.buckets)) else ""
        raise DeviceMemoryError(
            f"device_memory_limit is {format_bytes(limit)}, and the engine needs "
            f"{format_bytes(least)}: {format_bytes(rest)} for gradient staging, sums and blocks "
            f"that stay on the device, the rest for {config.weights.device_slots} slots. Raise "
            f"it{keys}"
        )
    if rest + sum(sizes) <= limit:
        return len(repeated)
    return sum(1 for n in range(1, len(sizes)) if least + sum(sorted(sizes)[-n:]) <= limit)


HEADROOM = 0.9
"""Share of the available host memory that second copies may fill; the rest is for others."""


def lay_out(
    blocks: Sequence[BlockSpec],
    config: OffloadConfig,
    *,
    ranks: int,
    num_tensors: int,
    available_bytes: int | None,
    weight_versions: int = 1,
    gradient_sums: int = 1,
    update_policy: UpdatePolicy | None = None,
    copies: int = 1,
    parts: int = 1,
) -> StepSpec:
    """Decide which blocks are streamed, the tier of the state, and which blocks have a second copy.

    Frozen buckets of blocks that stay on the device are left out: they stay with the rest of the
    model's frozen weights.

    Args:
        available_bytes: host memory that state and second copies may fill if the config sets no
            limit; None: no second copies.
        weight_versions, gradient_sums, update_policy, copies: as in `StepSpec`.
        parts: number of ranks that hold the other parts of matrices, and have the same inputs.

    Raises:
        OptionError: the config is invalid for this number of ranks, requests more state on the
            device than possible, or names no block in `keep_whole`.
        DeviceMemoryError: a limit of the device is below resident buffers and slots.
    """
    config.zero_stage_among(ranks)
    if config.gradients.sums_tier == "auto":
        raise OptionError(
            "sums_on = 'auto' is decided by the plan of a job; in offload() give 'host', 'device' "
            "or a share, which plan_model(..., sums_on='auto') tells"
        )
    if config.update == "auto":
        raise OptionError(
            "update = 'auto' is decided by the plan of a job; in offload() give 'exact' or "
            "'speculative', which plan_model(..., update='auto') tells"
        )
    if config.activations.partition and parts == 1:
        raise OptionError(
            "partition_activations = True divides block inputs among the ranks of tensor parallel, "
            "and there are none: offload with a mesh that has an axis 'tp', or leave it out"
        )
    spec = StepSpec(
        with_sum_tiers(blocks, config),
        config,
        ranks,
        num_tensors,
        weight_versions=weight_versions,
        gradient_sums=gradient_sums,
        update_policy=update_policy,
        copies=copies,
        input_parts=parts if config.activations.partition else 1,
    )
    outside = _outside(spec)
    streamed = frozenset(_repeated(spec, outside) | {block.name for block in outside})
    laid_out = tuple(b if b.name in streamed else replace(b, frozen=()) for b in spec.blocks)
    spec = with_state_tiers(replace(spec, blocks=laid_out, streamed=streamed), device_bytes)
    return spec if available_bytes is None else with_second_copies(spec, available_bytes)


def with_second_copies(spec: StepSpec, available_bytes: int) -> StepSpec:
    """Give second copies to the last blocks, whose gradients arrive first, as far as memory allows;
    see `lay_out`."""
    if spec.config.update != "speculative":
        return spec
    limit = spec.config.memory.host_limit
    room = int(available_bytes * HEADROOM) if limit is None else limit
    room -= span_bytes(arena_rows(replace(spec, second_copies=frozenset())))
    copied = set()
    for block in reversed(spec.blocks):
        # Experts are updated only in step(): which of them are used is known then.
        on_host = [b for b in block.buckets if b.state_tier is Tier.HOST and not b.experts]
        room -= sum(second_copy_bytes(spec, bucket) for bucket in on_host)
        if room < 0:
            break
        copied.add(block.name)
    return replace(spec, second_copies=frozenset(copied))


def check_host_limit(spec: StepSpec) -> None:
    """Raises HostMemoryError if the config's limit is below a single copy of everything."""
    limit = spec.config.memory.host_limit
    if limit is None:
        return
    rows = arena_rows(replace(spec, second_copies=frozenset()))
    if (needed := span_bytes(rows)) > limit:
        raise HostMemoryError(
            f"the engine needs {format_bytes(needed)} of host memory and host_memory_limit is "
            f"{format_bytes(limit)}. Largest: {largest_owners(rows)}. Raise it, or take a "
            "narrower state ('split16', 'int8')"
        )
