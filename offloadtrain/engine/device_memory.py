"""Which blocks stay on the device, which are streamed, and the memory of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.ring import Ring
from offloadtrain.engine.settings import Settings
from offloadtrain.engine.streamer import Streamer, block_bytes
from offloadtrain.errors import OffloadTrainError
from offloadtrain.memory import Ledger
from offloadtrain.transfer import Buffer, Lanes
from offloadtrain.units import format_bytes

RING_SLOTS = 2
"""One is filled while the other is copied."""

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
    if settings.working == "device":
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
        else:
            block.frozen = ()  # these stay where the rest of the model's frozen weights are
    return streamed


def _resident_within(
    blocks: Sequence[Block], repeated: Sequence[Block], settings: Settings, limit: int
) -> int:
    """How many of the repeated blocks can stay on the device."""
    buckets = [bucket for block in blocks for bucket in block.buckets]
    sizes = [block_bytes(block) for block in repeated]
    rest = sum(map(block_bytes, blocks)) - sum(sizes) + RING_SLOTS * staging_bytes(buckets)
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
    blocks: Sequence[Block], lanes: Lanes, ledger: Ledger, settings: Settings
) -> Streamer:
    """Slots of the largest block's size; until its first load a block's weights are nowhere."""
    nbytes = max(map(block_bytes, blocks))
    count = min(settings.device_slots, len(blocks))
    memories = [
        ledger.device_tensor("streaming slots", nbytes, torch.uint8, settings.device)
        for _ in range(count)
    ]
    return Streamer(lanes, blocks, memories)


def staging_bytes(buckets: Sequence[Bucket]) -> int:
    """Of one staging slot: a larger bucket goes through it in pieces."""
    largest = max(bucket.numel * bucket.dtype.itemsize for bucket in buckets)
    return min(largest, STAGING_BYTES)


def gradient_ring(
    buckets: Sequence[Bucket], lanes: Lanes, ledger: Ledger, settings: Settings
) -> Ring:
    """Staging for gathered gradients on their way down."""

    def slots(nbytes: int) -> list[Tensor]:
        return [
            ledger.device_tensor("gradient staging", nbytes, torch.uint8, settings.device)
            for _ in range(RING_SLOTS)
        ]

    ring = Ring("gradient staging", lanes, staging_bytes(buckets), slots)
    ring.prepare()
    return ring
