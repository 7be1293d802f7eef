"""Makes the buffer table of a step: the only place that defines its buffers.

Rows are made tier by tier, in the order of allocation. The sums at the end of this file are those
that the engine's Ledger shows. They do not include block inputs, whose sizes are known only in the
first forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from offloadtrain.step.layout.block_spec import BucketSpec
from offloadtrain.step.layout.buffers import (
    BufferKey,
    BufferSpec,
    BufferTable,
    Memory,
    PoolSpec,
    WeightRoute,
    by_owner,
    not_late,
    span_bytes,
)
from offloadtrain.step.layout.step_spec import RING_SLOTS, StepSpec
from offloadtrain.step.layout.tiers import Tier

Row = tuple[BufferKey, BufferSpec]

OWNERS = {"master": "master weights", "weight": "host weights"}
"""Field of the state → its owner in the Ledger, if it differs from the field's name."""


def buffer_table(spec: StepSpec) -> BufferTable:
    """Make the table of all buffers of a step."""
    rows = {**dict(disk_rows(spec)), **dict(host_rows(spec)), **dict(device_rows(spec))}
    # Parts of slots come last: they refer to buffers above.
    rows.update(_parts_of_slots(spec))
    buckets = (bucket for block in spec.blocks for bucket in block.all_buckets)
    streamed = [bucket for bucket in buckets if spec.is_streamed(bucket)]
    return BufferTable(
        rows,
        pools(spec),
        sources={bucket.name: tuple(_sources(spec, bucket)) for bucket in streamed},
        staging={bucket.name: _staging(spec, bucket) for bucket in spec.buckets},
        weight_route={bucket.name: _weight_route(spec, bucket) for bucket in spec.buckets},
    )


# The host.


def host_rows(spec: StepSpec) -> Iterator[Row]:
    """Yield state, frozen weights, the slots of buffers on the disk, and host staging."""
    yield from _state_rows(spec, Tier.HOST)
    for bucket in (bucket for block in spec.blocks for bucket in block.frozen):
        if spec.weight_tier(bucket) is Tier.HOST:
            yield _shard("frozen weights", bucket, Memory.SNAPSHOT, is_weights=True)
    yield from _disk_slots(spec)
    # Two slots for gradients that are summed and for weights without other staging. With one
    # microbatch they are needed only when a bucket first gets a second gradient in a backward.
    on_first_use = not (spec.accumulates and spec.has_state_on(Tier.HOST))
    for slot in range(RING_SLOTS):
        name, nbytes = f"host staging[{slot}]", spec.host_staging_bytes
        row = BufferSpec(
            "host staging", nbytes, "uint8", Tier.HOST, name, on_first_use=on_first_use
        )
        yield BufferKey(slot, Memory.HOST_STAGING), row


def _state_rows(spec: StepSpec, tier: Tier) -> Iterator[Row]:
    """Yield sums of squares, then the buffers of each bucket whose state is updated on a tier; on
    the device also sums of microbatches and the marks of used experts."""
    norms = BufferSpec("norms", spec.num_tensors, "float64", tier, "norms")
    if spec.measures_on(tier):
        yield BufferKey(tier.value, Memory.NORMS), norms
    if tier is Tier.HOST and spec.measures_on(Tier.DEVICE):
        copied = replace(norms, name="norms of the device")
        yield BufferKey(Tier.DEVICE.value, Memory.NORMS, version=1), copied
    for bucket in spec.buckets_on(tier):
        yield from _bucket_rows(spec, bucket, copied=spec.has_second_copy(bucket))
    for bucket in spec.buckets if tier is Tier.DEVICE else ():
        if spec.sums_on_device(bucket):
            yield _shard("gradient sums", bucket, Memory.SUM, dtype="float32", tier=tier)
        if bucket.experts:
            name = f"used {bucket.name}"
            row = BufferSpec("used experts", bucket.experts, "uint8", tier, name)
            yield BufferKey(bucket.name, Memory.USED), row


def _bucket_rows(spec: StepSpec, bucket: BucketSpec, *, copied: bool) -> Iterator[Row]:
    """Yield the state and the gradient unless they are on the disk, pending weights, the snapshot
    that loads read, and the spill of saves.

    Args:
        copied: the bucket has a second copy of its state.
    """
    tier, name = bucket.update_tier, bucket.name
    state = [] if bucket.is_on_disk else _fields(bucket, tier)
    for number, row in enumerate(state):
        yield BufferKey(name, Memory.STATE, 0, number), row
    for version in range(0 if bucket.gradient_on_disk else spec.gradient_sums):
        yield BufferKey(name, Memory.GRADIENT, version), _gradient(spec, bucket, tier, version)
    if spec.has_pending(bucket, copied=copied):
        yield _shard("pending weights", bucket, Memory.PENDING, tier=tier, is_weights=True)
    if spec.has_snapshot(bucket):
        yield _shard("weights snapshot", bucket, Memory.SNAPSHOT, tier=tier, is_weights=True)
    if nbytes := spec.spill_bytes(bucket):
        owner = "checkpoint spill"
        row = BufferSpec(owner, nbytes, "uint8", tier, f"{owner} {name}")
        yield BufferKey(name, Memory.SPILL), row
    for number, row in enumerate(state if copied else ()):
        other = replace(row, owner="other copy of the state", name=f"other {row.name}")
        yield BufferKey(name, Memory.STATE, 1, number), other


def _fields(bucket: BucketSpec, tier: Tier) -> list[BufferSpec]:
    """List the tensors of a bucket's state."""
    return [
        BufferSpec(
            OWNERS.get(field.name, field.name),
            field.numel(bucket.shard_numel),
            field.dtype or bucket.dtype,
            tier,
            f"{field.name} {bucket.name}",
            is_weights=bucket.format.holds_weight and field is bucket.format.master[0],
        )
        for field in bucket.format.fields(bucket.moments)
    ]


def _gradient(spec: StepSpec, bucket: BucketSpec, tier: Tier, version: int = 0) -> BufferSpec:
    owner, dtype = "gradients", bucket.dtype
    if spec.holds_sum(bucket):
        owner, dtype = "gradient sums", "float32"
    name = f"{'other ' * version}gradient {bucket.name}"
    return BufferSpec(owner, bucket.shard_numel, dtype, tier, name)


def _shard(
    owner: str,
    bucket: BucketSpec,
    kind: Memory,
    version: int = 0,
    *,
    dtype: str = "",
    tier: Tier = Tier.HOST,
    name: str = "",
    is_weights: bool = False,
) -> Row:
    """Return a row of the size of this rank's shard, by default in the working dtype."""
    full_name = f"{'other ' * (version if name else 0)}{name or owner} {bucket.name}"
    size = bucket.shard_numel, dtype or bucket.dtype
    row = BufferSpec(owner, *size, tier, full_name, is_weights=is_weights)
    return BufferKey(bucket.name, kind, version), row


def second_copy_bytes(spec: StepSpec, bucket: BucketSpec) -> int:
    """Return the bytes of a bucket's second copy, and of pending weights that only it requires."""
    with_copy, without_copy = (
        span_bytes(row for _, row in _bucket_rows(spec, bucket, copied=copied))
        for copied in (True, False)
    )
    return with_copy - without_copy


# The disk, and the host slots for its buffers.


def disk_rows(spec: StepSpec) -> Iterator[Row]:
    """Yield the buffers on the disk, bucket by bucket: state, gradient, weights."""
    for bucket in (bucket for block in spec.blocks for bucket in block.all_buckets):
        if bucket.is_on_disk and spec.is_trained(bucket):
            for number, row in enumerate(_fields(bucket, Tier.DISK)):
                yield BufferKey(bucket.name, Memory.STATE_FILE, 0, number), row
        if bucket.gradient_on_disk:
            key = BufferKey(bucket.name, Memory.GRADIENT_FILE)
            yield key, _gradient(spec, bucket, Tier.DISK)
        owner = "streamed weights" if spec.is_trained(bucket) else "frozen weights"
        for version in range(spec.weight_files(bucket)):
            yield _shard(owner, bucket, Memory.WEIGHT_FILE, version, tier=Tier.DISK)


def _disk_slots(spec: StepSpec) -> Iterator[Row]:
    """Yield the host slots of buffers on the disk, each as large as the largest bucket's: for
    state, gradients, weights in transfer to the device, and new weights in transfer to the disk."""
    buckets = [bucket for block in spec.blocks for bucket in block.all_buckets]
    on_disk = [bucket for bucket in spec.buckets if bucket.is_on_disk]
    with_gradient = [bucket for bucket in spec.buckets if bucket.gradient_on_disk]
    state = [span_bytes(_fields(bucket, Tier.HOST)) for bucket in on_disk]
    gradients = [_gradient(spec, bucket, Tier.HOST).nbytes for bucket in with_gradient]
    loaded = [bucket.shard_bytes for bucket in buckets if spec.weight_tier(bucket) is Tier.DISK]
    new = [bucket.shard_bytes for bucket in spec.buckets if spec.has_new_weight_slot(bucket)]
    for kind, owner, count, sizes in (
        (Memory.STATE, "state slots", spec.state_slots, state),
        (Memory.GRADIENT, "gradient slots", spec.gradient_slots, gradients),
        (Memory.WEIGHT_SLOT, "weight slots", spec.weight_slots, loaded),
        (Memory.NEW_WEIGHTS, "new weight slots", min(RING_SLOTS, len(new)), new),
    ):
        for slot in range(count):
            name = f"{owner[:-1]} {slot}"
            yield BufferKey(slot, kind), BufferSpec(owner, max(sizes), "uint8", Tier.HOST, name)


# The device.


def device_rows(spec: StepSpec) -> Iterator[Row]:
    """Yield state, weights, slots of streamed blocks, staging and matrix workspace."""
    yield from _state_rows(spec, Tier.DEVICE)
    yield from _weight_rows(spec)
    for slot, nbytes in enumerate(spec.slot_bytes):
        name = f"streaming slot {slot}"
        row = BufferSpec("streaming slots", nbytes, "uint8", Tier.DEVICE, name)
        yield BufferKey(slot, Memory.WORKING), row
    yield from _gradient_staging(spec)
    # Workspace in which matrices are orthogonalized one after the other, if there are any.
    if spec.matrix_bytes:
        yield _staging_slot("matrix workspace", Memory.MATRIX, 0, spec.matrix_bytes)


def _weight_rows(spec: StepSpec) -> Iterator[Row]:
    """Yield flat working weights of blocks that stay on the device, and shards of the others."""
    for bucket in spec.buckets:
        for version in range(0 if spec.is_streamed(bucket) else spec.weight_versions):
            name = f"{'other ' * version}working {bucket.name}"
            row = BufferSpec("working weights", bucket.numel, bucket.dtype, Tier.DEVICE, name)
            yield BufferKey(bucket.name, Memory.WORKING, version), row
    for bucket in (bucket for block in spec.blocks for bucket in block.all_buckets):
        versions = 1 + spec.loads_in_turn(bucket) if spec.weight_tier(bucket) is Tier.DEVICE else 0
        for version in range(versions):
            where = Memory.DEVICE_SHARD, version
            yield _shard("weight shards", bucket, *where, tier=Tier.DEVICE, name="shard")


def _gradient_staging(spec: StepSpec) -> Iterator[Row]:
    """Yield staging for gathered gradients, and for rounded gradients if ranks sum in a wider
    dtype than they copy to the host. In ZeRO stage 1 every piece has separate staging, which is
    allocated when the first gradient arrives."""
    if spec.zero_stage == 1:
        for bucket in spec.buckets:
            for lo, hi in spec.pieces(bucket):
                owner, nbytes = "gradients", (hi - lo) * bucket.ranks * spec.reduced_bytes(bucket)
                name = f"{owner} {bucket.name}[{lo}][0]"
                row = BufferSpec(owner, nbytes, "uint8", Tier.DEVICE, name, on_first_use=True)
                yield BufferKey(f"{bucket.name}[{lo}]", Memory.STAGING), row
    else:
        for slot in range(spec.staging_slots):
            yield _staging_slot("gradient staging", Memory.STAGING, slot, spec.staging_bytes)
    wide = [b.ranks for b in spec.buckets if spec.reduced_bytes(b) > b.weight_bytes]
    if wide:
        rounded = -(-spec.staging_bytes // min(wide) // 512) * 256  # half, and any dtype fits
        for slot in range(spec.staging_slots):
            yield _staging_slot("rounded gradients", Memory.ROUNDED, slot, rounded)


def _staging_slot(owner: str, kind: Memory, slot: int, nbytes: int) -> Row:
    row = BufferSpec(owner, nbytes, "uint8", Tier.DEVICE, f"{owner}[{slot}]")
    return BufferKey(slot, kind), row


# Parts of slots, and pools.


def _parts_of_slots(spec: StepSpec) -> Iterator[Row]:
    """Yield the buffers that a bucket has in a slot, for each slot that it can get."""
    for block in spec.blocks:
        offset = 0
        for bucket in block.all_buckets if block.name in spec.streamed else ():
            for slot in spec.slots_of(block):
                within, name = (BufferKey(slot, Memory.WORKING), offset), f"working {bucket.name}"
                size = "streaming slots", bucket.numel, bucket.dtype
                row = BufferSpec(*size, Tier.DEVICE, name, within=within)
                yield BufferKey(bucket.name, Memory.WORKING, slot), row
            # Every bucket starts on 256 bytes.
            offset += bucket.nbytes
    for bucket in spec.buckets:
        for slot in range(spec.state_slots if bucket.is_on_disk else 0):
            offset = 0
            for number, row in enumerate(_fields(bucket, Tier.HOST)):
                key = BufferKey(bucket.name, Memory.STATE, slot, number)
                yield key, _part(row, slot, Memory.STATE, offset)
                offset += row.span_bytes
        for slot in range(spec.gradient_slots if bucket.gradient_on_disk else 0):
            row = _gradient(spec, bucket, Tier.HOST)
            key = BufferKey(bucket.name, Memory.GRADIENT, slot)
            yield key, _part(row, slot, Memory.GRADIENT, 0)


def _part(row: BufferSpec, slot: int, kind: Memory, offset: int) -> BufferSpec:
    name = f"slot {slot}: {row.name}"
    return replace(row, name=name, within=(BufferKey(slot, kind), offset))


def pools(spec: StepSpec) -> dict[Memory, PoolSpec]:
    """Return the pools of block inputs."""
    config = spec.config
    owner, limit = config.activations.moved, config.memory.host_limit
    return {
        Memory.HOST_ACTIVATION: PoolSpec(owner, Tier.HOST, "host block input", limit),
        Memory.KEPT_ACTIVATION: PoolSpec("block inputs", Tier.DEVICE, "kept block input"),
    }


# The sources of loads, and the destinations of new weights.


def _sources(spec: StepSpec, bucket: BucketSpec) -> Iterator[BufferKey]:
    """Yield the buffers that loads of a streamed bucket read, one per version of the weights."""
    name, in_turn = bucket.name, spec.loads_in_turn(bucket)
    if spec.weight_tier(bucket) is Tier.DEVICE:
        for version in range(1 + in_turn):
            yield BufferKey(name, Memory.DEVICE_SHARD, version)
    elif spec.weight_tier(bucket) is Tier.DISK:
        for version in range(spec.weight_files(bucket)):
            yield BufferKey(name, Memory.WEIGHT_FILE, version)
        if not spec.weight_files(bucket):
            yield BufferKey(name, Memory.STATE_FILE)
    elif in_turn:
        # One of two versions on the host is in the state, if the state contains weights.
        holds_weight = bucket.format.holds_weight
        first, second = (Memory.STATE, Memory.SNAPSHOT), (Memory.SNAPSHOT, Memory.PENDING)
        yield from (BufferKey(name, kind) for kind in (first if holds_weight else second))
    elif spec.has_snapshot(bucket) or not spec.is_trained(bucket):
        yield BufferKey(name, Memory.SNAPSHOT)
    else:
        pending = spec.has_pending(bucket)
        yield BufferKey(name, Memory.PENDING if pending else Memory.STATE)


def _staging(spec: StepSpec, bucket: BucketSpec) -> Memory:
    """Return the kind of memory that new weights of a bucket are written to."""
    if spec.has_pending(bucket):
        return Memory.PENDING
    if bucket.format.holds_weight:
        return Memory.STATE
    # An update on the device after the step's last backward writes the weights in place: the old
    # weights are not needed any more.
    if bucket.update_tier is Tier.DEVICE and not spec.updates_early:
        return Memory.DEVICE_SHARD if spec.weight_tier(bucket) is Tier.DEVICE else Memory.WORKING
    # Adam has read the gradient when it overwrites it with the weights: no staging is needed.
    if not spec.holds_sum(bucket):
        return Memory.GRADIENT
    return Memory.NEW_WEIGHTS if spec.has_new_weight_slot(bucket) else Memory.HOST_STAGING


def _weight_route(spec: StepSpec, bucket: BucketSpec) -> WeightRoute:
    """Return the route of new weights from the memory that an update writes."""
    if spec.weight_tier(bucket) is Tier.DISK:
        return WeightRoute.FILE
    if spec.weight_tier(bucket) is Tier.HOST:
        if spec.loads_in_turn(bucket):
            return WeightRoute.IN_TURN
        return WeightRoute.SNAPSHOT if spec.has_snapshot(bucket) else WeightRoute.IN_PLACE
    on_device = bucket.update_tier is Tier.DEVICE
    return WeightRoute.ON_DEVICE if on_device else WeightRoute.UPLOAD


# Sums, as shown by the Ledger.


def host_owners(spec: StepSpec) -> dict[str, int]:
    """Return owner → bytes of one rank's host memory, including "padding"."""
    rows = arena_rows(spec)
    owners = by_owner(rows)
    if rows:
        owners["padding"] = span_bytes(rows) - sum(owners.values())
    return owners


def arena_rows(spec: StepSpec) -> list[BufferSpec]:
    """List the rows that are in the host arena before the first step."""
    return [row for _, row in host_rows(spec) if not_late(row)]


def disk_owners(spec: StepSpec) -> dict[str, int]:
    """Return owner → bytes of one rank on the disk, without padding to full disk blocks."""
    return by_owner(row for _, row in disk_rows(spec))


def device_owners(spec: StepSpec) -> dict[str, int]:
    """Return owner → bytes of one device, from the first step on."""
    return by_owner(row for _, row in device_rows(spec))


def device_bytes(spec: StepSpec) -> int:
    """Return the bytes of one device, without activations."""
    return sum(device_owners(spec).values())


def added(owners: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add the bytes of equal owners."""
    total: dict[str, int] = {}
    for sizes in owners:
        for owner, nbytes in sizes.items():
            total[owner] = total.get(owner, 0) + nbytes
    return total
