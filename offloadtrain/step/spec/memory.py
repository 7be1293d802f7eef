"""Memory rules of a step: each allocation by tier and owner.

`layout.lay_out` decides. `host_requests` and `device_requests` list what the engine maps, in
order. State is requested from the tier of its bucket. `host_owners` and `device_owners` are what
its Ledger shows then. Offloaded block inputs are not among them: their size shows in the first
forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from offloadtrain.config.units import format_bytes
from offloadtrain.step.program.operations import Memory
from offloadtrain.step.spec.block_spec import BucketSpec
from offloadtrain.step.spec.formats import ITEMSIZE
from offloadtrain.step.spec.step_spec import RING_SLOTS, StepSpec
from offloadtrain.step.spec.tiers import Tier

ARENA_ALIGN = 512
"""Bytes: disks read and write memory that starts on a multiple of it without a copy."""

STAGGER_BYTES = 4096 + ARENA_ALIGN
"""The gap between neighbours in the host arena: streams that lie an exact power of two apart fall
into the same cache sets and make Adam up to three times slower."""

OWNERS = {"master": "master weights", "weight": "host weights"}
"""Field of the state → its owner in the Ledger, where that is not the field's name."""


DEVICE_NORMS = "norms of the device"
"""The name of the host's copy of the device's sums of squares."""


class Role(StrEnum):
    """The purpose of a bucket's memory, by the name of the attribute of the engine's bucket."""

    STATE = "state"
    OTHER = "other"
    GRADIENT = "gradient"
    PENDING = "pending"
    SNAPSHOT = "snapshot"
    WORKING = "working"
    DEVICE_SHARD = "device_shard"
    OTHER_DEVICE_SHARD = "other_device_shard"
    SPILL = "spill"
    SUM = "sum"
    OTHER_WORKING = "other_working"
    OTHER_GRADIENT = "other_gradient"
    USED = "used"
    WEIGHT_FILE = "weight_files"


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """A request for `numel` elements of `dtype`, by torch's name.

    Attributes:
        owner: its name in the Ledger.
        name: the name of the buffer.
        bucket, role: the bucket and the purpose; empty and None for memory that buckets share.
        is_weights: weights of a streamed block, which become the model's memory when the optimizer
            closes.
    """

    owner: str
    numel: int
    dtype: str
    name: str = ""
    bucket: str = ""
    role: Role | None = None
    is_weights: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def span_bytes(self) -> int:
        """Bytes in the host arena, with the stagger that separates it from its neighbour."""
        return -(-self.nbytes // ARENA_ALIGN) * ARENA_ALIGN + STAGGER_BYTES


# Requests for gradients and state, and others to the host.


def host_requests(spec: StepSpec) -> Iterator[MemoryRequest]:
    """Yield all that one arena holds: `kept_requests`, `disk_slot_requests`, then `host_staging`
    where microbatches are summed."""
    yield from kept_requests(spec)
    for requests in disk_slot_requests(spec).values():
        yield from requests
    if spec.stages_on_host:
        yield from host_staging(spec)


def state_requests(spec: StepSpec, tier: Tier) -> Iterator[MemoryRequest]:
    """Yield sums of squares, then all that is kept bucket by bucket, of the state that is updated
    on a tier; on the device the sums that are made there, and which experts are used, too."""
    if spec.measures_on(tier):
        yield MemoryRequest("norms", spec.num_tensors, "float64", "norms")
    if tier is Tier.HOST and spec.measures_on(Tier.DEVICE):
        yield MemoryRequest("norms", spec.num_tensors, "float64", DEVICE_NORMS)
    for bucket in spec.buckets_on(tier):
        yield from bucket_requests(spec, bucket, copied=spec.has_second_copy(bucket))
    for bucket in spec.buckets if tier is Tier.DEVICE else ():
        if spec.sums_on_device(bucket):
            yield _shard("gradient sums", bucket, "float32", Role.SUM)
        if bucket.experts:
            name = f"used {bucket.name}"
            yield MemoryRequest(
                "used experts", bucket.experts, "uint8", name, bucket.name, Role.USED
            )


def kept_requests(spec: StepSpec) -> Iterator[MemoryRequest]:
    """Yield the state on the host, then frozen weights."""
    yield from state_requests(spec, Tier.HOST)
    for bucket in (bucket for block in spec.blocks for bucket in block.frozen):
        if spec.loads_from_host(bucket):
            frozen = _shard("frozen weights", bucket, bucket.dtype, Role.SNAPSHOT)
            yield replace(frozen, is_weights=True)


def host_staging(spec: StepSpec) -> list[MemoryRequest]:
    """List the ring slots for gradients that are summed and for weights without other staging. With
    one microbatch they are mapped when a bucket first gets a second gradient in a backward."""
    return [MemoryRequest("host staging", spec.host_staging_bytes, "uint8")] * RING_SLOTS


def bucket_requests(spec: StepSpec, bucket: BucketSpec, *, copied: bool) -> Iterator[MemoryRequest]:
    """Yield the state unless it is on the disk, gradient or its sum, pending weights, the snapshot
    that loads read, and the spill of saves.

    Args:
        copied: with a second copy of the state.
    """
    state = [] if bucket.is_on_disk else field_requests(bucket)
    yield from state
    if not bucket.gradient_on_disk:
        yield _gradient(spec, bucket)
    if spec.gradient_sums > 1:
        one = _gradient(spec, bucket)
        name = f"other gradient {bucket.name}"
        yield replace(one, name=name, role=Role.OTHER_GRADIENT)
    if spec.has_pending(bucket, copied=copied):
        pending = _shard("pending weights", bucket, bucket.dtype, Role.PENDING)
        yield replace(pending, is_weights=True)
    if spec.has_snapshot(bucket):
        snapshot = _shard("weights snapshot", bucket, bucket.dtype, Role.SNAPSHOT)
        yield replace(snapshot, is_weights=True)
    if nbytes := spec.spill_bytes(bucket):
        owner, name = "checkpoint spill", bucket.name
        yield MemoryRequest(owner, nbytes, "uint8", f"{owner} {name}", name, Role.SPILL)
    for one in state if copied else ():
        other = "other copy of the state"
        yield replace(one, owner=other, name=f"other {one.name}", role=Role.OTHER)


def field_requests(bucket: BucketSpec) -> list[MemoryRequest]:
    """List the fields of a bucket's state, on whichever tier they are."""
    return [
        MemoryRequest(
            OWNERS.get(field.name, field.name),
            field.numel(bucket.shard_numel),
            field.dtype or bucket.dtype,
            f"{field.name} {bucket.name}",
            bucket.name,
            Role.STATE,
            is_weights=bucket.format.holds_weight and field is bucket.format.master[0],
        )
        for field in bucket.format.fields(bucket.moments)
    ]


def _gradient(spec: StepSpec, bucket: BucketSpec) -> MemoryRequest:
    if spec.holds_sum(bucket):
        return _shard("gradient sums", bucket, "float32", Role.GRADIENT, "gradient")
    return _shard("gradients", bucket, bucket.dtype, Role.GRADIENT, "gradient")


def disk_slot_requests(spec: StepSpec) -> dict[Memory, list[MemoryRequest]]:
    """List the host slots for what is on the disk, each of the size of the largest bucket's: for
    state, gradients, weights on their way to the device, and new ones on their way back."""
    held = [bucket for block in spec.blocks for bucket in block.held]
    state = [span_bytes(field_requests(one)) for one in spec.buckets if one.is_on_disk]
    gradients = [_gradient(spec, b).nbytes for b in spec.buckets if b.gradient_on_disk]
    loaded = [_weights(bucket) for bucket in held if spec.loads_from_disk(bucket)]
    new = [_weights(bucket) for bucket in spec.buckets if spec.has_new_weight_slot(bucket)]
    slots = {
        Memory.STATE: (spec.state_slots, "state slots", state),
        Memory.GRADIENT: (spec.gradient_slots, "gradient slots", gradients),
        Memory.WEIGHT_SLOT: (spec.weight_slots, "weight slots", loaded),
        Memory.NEW_WEIGHTS: (spec.new_weight_slots, "new weight slots", new),
    }
    return {
        memory: [MemoryRequest(owner, max(sizes), "uint8", owner[:-1])] * count if count else []
        for memory, (count, owner, sizes) in slots.items()
    }


def _weights(bucket: BucketSpec) -> int:
    return bucket.shard_numel * bucket.weight_bytes


def slot_offsets(bucket: BucketSpec) -> list[int]:
    """List where each field of the state begins in a slot, in bytes."""
    spans = [request.span_bytes for request in field_requests(bucket)]
    return [sum(spans[:number]) for number in range(len(spans))]


def disk_requests(spec: StepSpec) -> list[MemoryRequest]:
    """List what is on the disk, bucket by bucket: state, gradient, weights."""
    held = [bucket for block in spec.blocks for bucket in block.held]
    return [request for bucket in held for request in _on_disk(spec, bucket)]


def _on_disk(spec: StepSpec, bucket: BucketSpec) -> Iterator[MemoryRequest]:
    if bucket.is_on_disk and spec.is_trained(bucket):
        yield from field_requests(bucket)
    if bucket.gradient_on_disk:
        yield _gradient(spec, bucket)
    owner = "streamed weights" if spec.is_trained(bucket) else "frozen weights"
    for _ in range(spec.weight_files(bucket)):
        yield _shard(owner, bucket, bucket.dtype, Role.WEIGHT_FILE)


def _shard(owner: str, bucket: BucketSpec, dtype: str, role: Role, name: str = "") -> MemoryRequest:
    name = f"{name or owner} {bucket.name}"
    return MemoryRequest(owner, bucket.shard_numel, dtype, name, bucket.name, role)


def second_copy_bytes(spec: StepSpec, bucket: BucketSpec) -> int:
    """Count the bytes that it adds, with pending weights that exist only because of it."""
    with_it, without = (bucket_requests(spec, bucket, copied=both) for both in (True, False))
    return span_bytes(with_it) - span_bytes(without)


# Requests to the device.


def device_requests(spec: StepSpec) -> Iterator[MemoryRequest]:
    """Yield state, weights, slots, staging and matrix workspace; not the gradients of ZeRO stage 1,
    which are allocated when they first come."""
    yield from state_requests(spec, Tier.DEVICE)
    yield from weight_requests(spec)
    yield from slot_requests(spec)
    yield from staging_requests(spec)
    yield from matrix_requests(spec)


def weight_requests(spec: StepSpec) -> Iterator[MemoryRequest]:
    """Yield flat working weights of blocks that stay on the device, and shards of the others."""
    for block in spec.blocks:
        for bucket in () if block.name in spec.streamed else block.buckets:
            roles = (Role.WORKING, Role.OTHER_WORKING)[: spec.weight_versions]
            yield from (_working(bucket, role) for role in roles)
    for bucket in (bucket for block in spec.blocks for bucket in block.held):
        if spec.loads_from_shard(bucket):
            yield _shard("weight shards", bucket, bucket.dtype, Role.DEVICE_SHARD, "shard")
        if spec.loads_from_shard(bucket) and spec.loads_in_turn(bucket):
            other, owner = Role.OTHER_DEVICE_SHARD, "weight shards"
            yield _shard(owner, bucket, bucket.dtype, other, "other shard")


def _working(bucket: BucketSpec, role: Role) -> MemoryRequest:
    name = f"{role.replace('_', ' ')} {bucket.name}"
    return MemoryRequest("working weights", bucket.numel, bucket.dtype, name, bucket.name, role)


def slot_requests(spec: StepSpec) -> list[MemoryRequest]:
    """List the slots for streamed blocks, each of the size of the largest block that has it."""
    return [MemoryRequest("streaming slots", nbytes, "uint8") for nbytes in spec.slot_bytes]


def staging_requests(spec: StepSpec) -> list[MemoryRequest]:
    """List staging for gathered gradients, and for the rounded ones where ranks sum in a wider
    dtype than the one that goes down."""
    requests = []
    if spec.zero_stage != 1:
        requests = [
            MemoryRequest("gradient staging", spec.staging_bytes, "uint8")
        ] * spec.staging_slots
    wide = [one.ranks for one in spec.buckets if spec.reduced_bytes(one) > one.weight_bytes]
    if wide:
        rounded = -(-spec.staging_bytes // min(wide) // 512) * 256  # half, and any dtype fits
        requests += [MemoryRequest("rounded gradients", rounded, "uint8")] * spec.staging_slots
    return requests


def matrix_requests(spec: StepSpec) -> list[MemoryRequest]:
    """List the memory in which one matrix after the other is orthogonalized, if there are any."""
    return [MemoryRequest("matrix workspace", spec.matrix_bytes, "uint8")] * bool(spec.matrix_bytes)


# Totals, as the Ledger shows them.


def host_owners(spec: StepSpec) -> dict[str, int]:
    """Owner → bytes of one rank's host memory, "padding" among them."""
    requests = list(host_requests(spec))
    owners = by_owner(requests)
    if requests:
        owners["padding"] = span_bytes(requests) - sum(owners.values())
    return owners


def disk_owners(spec: StepSpec) -> dict[str, int]:
    """Owner → bytes of one rank on the disk, without what fills whole blocks."""
    return by_owner(disk_requests(spec))


def device_owners(spec: StepSpec) -> dict[str, int]:
    """Owner → bytes of one device, from the first step on."""
    owners = by_owner(device_requests(spec))
    if spec.zero_stage == 1:
        owners["gradients"] = owners.get("gradients", 0) + spec.gradient_bytes
    return owners


def device_bytes(spec: StepSpec) -> int:
    """Count the bytes of one device, without activations."""
    return sum(device_owners(spec).values())


def by_owner(requests: Iterable[MemoryRequest]) -> dict[str, int]:
    """Owner → bytes, in the order in which they first ask."""
    owners: dict[str, int] = {}
    for request in requests:
        owners[request.owner] = owners.get(request.owner, 0) + request.nbytes
    return owners


def added(owners: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add the bytes of the same owners."""
    found: dict[str, int] = {}
    for one in owners:
        for owner, nbytes in one.items():
            found[owner] = found.get(owner, 0) + nbytes
    return found


def span_bytes(requests: Iterable[MemoryRequest]) -> int:
    return sum(request.span_bytes for request in requests)


def largest_owners(requests: Iterable[MemoryRequest]) -> str:
    """Name the four largest owners in one line."""
    rows = sorted(by_owner(requests).items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{owner} {format_bytes(nbytes)}" for owner, nbytes in rows)
