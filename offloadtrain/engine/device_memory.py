"""Which blocks stay on the device, which are streamed, and the memory of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import ALIGN, Bucket
from offloadtrain.engine.collectives import Collectives
from offloadtrain.engine.reduce import Reduction, TakeStaging
from offloadtrain.engine.ring import Reserved, Ring
from offloadtrain.engine.settings import Settings
from offloadtrain.engine.streamer import Streamer, block_bytes
from offloadtrain.errors import OffloadTrainError
from offloadtrain.memory import Ledger
from offloadtrain.transfer import Buffer, Lane, Lanes
from offloadtrain.units import format_bytes

RING_SLOTS = 2
"""One is filled while the other is copied."""

STAGING_SLOTS_MOST = 8
"""For gathered gradients."""

STAGING_BYTES = 64 << 20
"""Enough for the bus's full speed; staging does not grow with the model."""


class DeviceMemoryError(OffloadTrainError):
    """The device memory limit is below what the engine needs."""


def streamed_blocks(blocks: Sequence[Block], settings: Settings) -> list[Block]:
    """Repeated blocks that do not stay on the device; those that do are spread evenly.

    Raises:
        DeviceMemoryError: if device_memory_limit holds not even the rest and the slots.
    """
    repeated = [block for block in blocks if block.repeated]
    limit = settings.device_memory_limit
    if not settings.streams:
        if limit is not None:
            _resident_within(blocks, [], settings, limit)
        return []
    room = len(repeated)
    if limit is not None:
        room = _resident_within(blocks, repeated, settings, limit)
    asked = settings.resident_blocks
    if asked is not None and room < min(asked, len(repeated)):
        raise DeviceMemoryError(
            f"resident_blocks = {asked}, and device_memory_limit = {format_bytes(limit or 0)} has "
            f"room for {room} beside the rest and {settings.device_slots} slots: lower the one or "
            "raise the other"
        )
    stay = min(asked, len(repeated)) if asked is not None else (0 if limit is None else room)
    # The i-th of n that stay lies in the middle of the i-th of n equal parts.
    kept = {repeated[(2 * i + 1) * len(repeated) // (2 * stay)] for i in range(stay)}
    streamed = [block for block in repeated if block not in kept]
    for block in blocks:
        if block in streamed:
            for bucket in block.held:
                bucket.streamed = True
                bucket.kept_on_device = settings.working == "device"
        else:
            block.frozen = ()  # these stay where the rest of the model's frozen weights are
    return streamed


def _resident_within(
    blocks: Sequence[Block], repeated: Sequence[Block], settings: Settings, limit: int
) -> int:
    """How many of the repeated blocks can stay on the device."""
    buckets = [bucket for block in blocks for bucket in block.buckets]
    sizes = [block_bytes(block) for block in repeated]
    rest = sum(map(block_bytes, blocks)) - sum(sizes) + _staging_total(buckets, settings)
    if settings.working == "device" and settings.streams:
        rest += sum(sizes) // settings.ranks.size  # the shards
    least = rest + settings.device_slots * max(sizes, default=0)
    if least > limit and rest + sum(sizes) > limit:
        keys = ", or set working = 'host'"
        if settings.working == "host":
            keys = ", or set device_slots = 1" if settings.device_slots > 1 else ""
        raise DeviceMemoryError(
            f"device_memory_limit is {format_bytes(limit)}, and the engine needs "
            f"{format_bytes(least)}: {format_bytes(rest)} for gradient staging and blocks that "
            f"stay on the device, the rest for {settings.device_slots} slots. Raise it{keys}"
        )
    if rest + sum(sizes) <= limit:
        return len(repeated)
    return sum(1 for n in range(1, len(sizes)) if least + sum(sorted(sizes)[-n:]) <= limit)


def map_resident(blocks: Sequence[Block], ledger: Ledger, settings: Settings) -> None:
    """Flat working weights of blocks that stay on the device."""
    for bucket in (bucket for block in blocks for bucket in block.buckets):
        flat = ledger.device_tensor("working weights", bucket.numel, bucket.dtype, settings.device)
        bucket.working = Buffer(f"working {bucket.name}", flat)


def make_streamer(
    blocks: Sequence[Block],
    lanes: Lanes,
    collectives: Collectives,
    ledger: Ledger,
    settings: Settings,
) -> Streamer:
    """Slots of the largest block's size; until its first load a block's weights are nowhere."""
    for bucket in (bucket for block in blocks for bucket in block.held if bucket.kept_on_device):
        numel, dtype = bucket.shard_numel, bucket.dtype
        flat = ledger.device_tensor("weight shards", numel, dtype, settings.device)
        bucket.kept = Buffer(f"shard {bucket.name}", flat)
    nbytes = max(map(block_bytes, blocks))
    count = min(settings.device_slots, len(blocks))
    memories = [
        ledger.device_tensor("streaming slots", nbytes, torch.uint8, settings.device)
        for _ in range(count)
    ]
    return Streamer(lanes, collectives, blocks, memories)


def staging_bytes(buckets: Sequence[Bucket], settings: Settings) -> int:
    """Of one slot for gathered gradients: a larger bucket goes through it in pieces, which hold at
    least one alignment of every rank's shard."""
    sizes = [bucket.numel * _reduced_in(bucket, settings).itemsize for bucket in buckets]
    return max(min(max(sizes), STAGING_BYTES), ALIGN * 4 * settings.ranks.size)


def staging_slots(buckets: Sequence[Bucket], settings: Settings) -> int:
    """For gathered gradients. A bucket that goes down in pieces is gathered into so many slots, as
    far as the most of them allow, and one is being copied from before: with fewer, compute would
    wait for the copies of its own block."""
    largest = max(bucket.numel * _reduced_in(bucket, settings).itemsize for bucket in buckets)
    pieces = -(-largest // staging_bytes(buckets, settings))
    return max(RING_SLOTS, min(pieces + 1, STAGING_SLOTS_MOST))


def host_staging_bytes(buckets: Sequence[Bucket]) -> int:
    """Of one slot for gradients and weights on the host."""
    largest = max(bucket.shard_numel * bucket.dtype.itemsize for bucket in buckets)
    return max(min(largest, STAGING_BYTES), ALIGN * 4)


def make_reduction(
    buckets: Sequence[Bucket],
    lanes: Lanes,
    collectives: Collectives,
    ledger: Ledger,
    settings: Settings,
) -> Reduction:
    """Gathers gradients in a few slots, or in a place for each of them (ZeRO stage 1)."""

    def map_one(owner: str, nbytes: int) -> Tensor:
        return ledger.device_tensor(owner, nbytes, torch.uint8, settings.device)

    slots_of_ring = staging_slots(buckets, settings)

    def ring(owner: str, nbytes: int) -> Ring:
        many = range(slots_of_ring)
        made = Ring(owner, lanes, nbytes, lambda n: [map_one(owner, n) for _ in many])
        made.prepare()
        return made

    ranks, slot_bytes = settings.ranks, staging_bytes(buckets, settings)
    narrows = any(_reduced_in(bucket, settings) is not bucket.dtype for bucket in buckets)
    rounded = ring("rounded gradients", slot_bytes // ranks.size // 2) if narrows else None
    take: TakeStaging
    if settings.zero_stage == 1 and not ranks.alone:
        whole = Reserved("gradients", lanes, lambda nbytes: map_one("gradients", nbytes))
        take = lambda key, numel, dtype: whole.take(key, numel, dtype, Lane.COMPUTE)  # noqa: E731
    else:
        slots = ring("gradient staging", slot_bytes)
        take = lambda key, numel, dtype: slots.take(numel, dtype, Lane.COMPUTE)  # noqa: E731
    return Reduction(
        lanes,
        collectives,
        take,
        piece_bytes=slot_bytes,
        dtype=settings.reduction,
        rounded=rounded,
    )


def _staging_total(buckets: Sequence[Bucket], settings: Settings) -> int:
    if settings.zero_stage == 1 and not settings.ranks.alone:
        return sum(bucket.numel * _reduced_in(bucket, settings).itemsize for bucket in buckets)
    return staging_slots(buckets, settings) * staging_bytes(buckets, settings)


def _reduced_in(bucket: Bucket, settings: Settings) -> torch.dtype:
    return bucket.dtype if settings.ranks.alone else settings.reduction or bucket.dtype
