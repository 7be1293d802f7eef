"""Which blocks stay on the device, which are streamed, and the memory of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import ALIGN, Bucket
from offloadtrain.engine.memory_map import Staging
from offloadtrain.engine.settings import Settings
from offloadtrain.errors import OffloadTrainError
from offloadtrain.memory import Ledger
from offloadtrain.step import spec
from offloadtrain.step.operations import Memory
from offloadtrain.transfer import Buffer
from offloadtrain.units import format_bytes

RING_SLOTS = 2
"""One is filled while the other is copied."""

STAGING_SLOTS_MOST = 8
"""For gathered gradients."""


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


def block_bytes(block: Block) -> int:
    """Device memory of a block's working weights; every bucket starts on 256 bytes."""
    return sum(bucket.numel * bucket.dtype.itemsize for bucket in block.held)


def map_resident(blocks: Sequence[Block], ledger: Ledger, settings: Settings) -> None:
    """Flat working weights of blocks that stay on the device."""
    for bucket in (bucket for block in blocks for bucket in block.buckets):
        flat = ledger.device_tensor("working weights", bucket.numel, bucket.dtype, settings.device)
        bucket.working = Buffer(f"working {bucket.name}", flat)


def map_slots(blocks: Sequence[Block], ledger: Ledger, settings: Settings) -> list[Tensor]:
    """Slots of the largest block's size, and the shards that are gathered into them; until its
    first load a streamed block's weights are nowhere."""
    for bucket in (bucket for block in blocks for bucket in block.held if bucket.kept_on_device):
        numel, dtype = bucket.shard_numel, bucket.dtype
        flat = ledger.device_tensor("weight shards", numel, dtype, settings.device)
        bucket.device_shard = Buffer(f"shard {bucket.name}", flat)
    nbytes = max(map(block_bytes, blocks), default=0)
    return [
        ledger.device_tensor("streaming slots", nbytes, torch.uint8, settings.device)
        for _ in range(min(settings.device_slots, len(blocks)))
    ]


def staging_bytes(buckets: Sequence[Bucket], settings: Settings) -> int:
    """Of one slot for gathered gradients: a larger bucket goes through it in pieces, which hold at
    least one alignment of every rank's shard."""
    sizes = [bucket.numel * _reduced_in(bucket, settings).itemsize for bucket in buckets]
    return max(min(max(sizes), spec.STAGING_BYTES), ALIGN * 4 * settings.ranks.size)


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
    return max(min(largest, spec.STAGING_BYTES), ALIGN * 4)


def map_staging(
    buckets: Sequence[Bucket], ledger: Ledger, settings: Settings
) -> dict[Memory, Staging]:
    """A few slots for gathered gradients, or a place for each of them (ZeRO stage 1)."""

    def slots(owner: str, nbytes: int) -> Staging:
        pieces = [
            ledger.device_tensor(owner, nbytes, torch.uint8, settings.device)
            for _ in range(staging_slots(buckets, settings))
        ]
        return lambda slot, _: (f"{owner}[{slot}]", pieces[int(slot)])

    def own(owner: str | int, nbytes: int) -> tuple[str, Tensor]:
        flat = ledger.device_tensor("gradients", nbytes, torch.uint8, settings.device)
        return f"gradients {owner}[0]", flat

    ranks, slot_bytes = settings.ranks, staging_bytes(buckets, settings)
    found: dict[Memory, Staging] = {}
    if any(_reduced_in(bucket, settings) is not bucket.dtype for bucket in buckets):
        found[Memory.ROUNDED] = slots("rounded gradients", slot_bytes // ranks.size // 2)
    stage_1 = settings.zero_stage == 1 and not ranks.alone
    found[Memory.STAGING] = own if stage_1 else slots("gradient staging", slot_bytes)
    return found


def _staging_total(buckets: Sequence[Bucket], settings: Settings) -> int:
    if settings.zero_stage == 1 and not settings.ranks.alone:
        return sum(bucket.numel * _reduced_in(bucket, settings).itemsize for bucket in buckets)
    return staging_slots(buckets, settings) * staging_bytes(buckets, settings)


def _reduced_in(bucket: Bucket, settings: Settings) -> torch.dtype:
    return bucket.dtype if settings.ranks.alone else settings.reduction or bucket.dtype
