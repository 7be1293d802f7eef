"""The memory of a step, on host and device, as its spec requests it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadtrain.config.errors import HostMemoryError
from offloadtrain.config.units import format_bytes
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.memory.memory_map import Norms, Staging
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.disk_arena import DiskArena
from offloadtrain.runtime.dtypes import DTYPES
from offloadtrain.runtime.lanes import Buffer
from offloadtrain.step.program.operations import Memory
from offloadtrain.step.spec.memory import (
    DEVICE_NORMS,
    MemoryRequest,
    Role,
    disk_requests,
    kept_requests,
    matrix_requests,
    staging_requests,
    state_requests,
    weight_requests,
)
from offloadtrain.step.spec.step_spec import StepSpec
from offloadtrain.step.spec.tiers import Tier


def map_state(arena: Arena, memory: DeviceMemory, blocks: Sequence[Block], spec: StepSpec) -> Norms:
    """Map all that is kept, bucket by bucket, on its tier; returns the sums of squares."""
    buckets = {bucket.name: bucket for block in blocks for bucket in block.held}
    on_host, on_device = list(kept_requests(spec)), list(state_requests(spec, Tier.DEVICE))
    mapped = {
        Tier.HOST: zip(on_host, arena.map(on_host), strict=True),
        Tier.DEVICE: zip(on_device, memory.map(on_device, zeroed=True), strict=True),
    }
    norms = {}
    for tier, pairs in mapped.items():
        for request, tensor in pairs:
            buffer = Buffer(request.name, tensor)
            if request.bucket:
                give(buckets[request.bucket], request, buffer)
            elif request.name == DEVICE_NORMS:
                norms[Tier.DEVICE, 1] = buffer
            else:
                norms[tier, 0] = buffer
    return norms


def map_disk(arena: DiskArena, blocks: Sequence[Block], spec: StepSpec) -> None:
    """Make the file for all state, gradients and weights on the disk."""
    buckets = {bucket.name: bucket for block in blocks for bucket in block.held}
    requests = disk_requests(spec)
    for request, tensor in zip(requests, arena.map(requests), strict=True):
        give(buckets[request.bucket], request, Buffer(request.name, tensor))


def give(bucket: Bucket, request: MemoryRequest, buffer: Buffer) -> None:
    """Set a buffer as the bucket's attribute that the request names."""
    assert request.role is not None
    if request.role in (Role.STATE, Role.OTHER, Role.WEIGHT_FILE):
        buffers = (*getattr(bucket, request.role), buffer)
        setattr(bucket, request.role, buffers)
    else:
        setattr(bucket, request.role, buffer)


def check_room(request: MemoryRequest, ledger: Ledger, limit: int | None) -> None:
    """Check the limit before memory is mapped that was not known when the engine was made.

    Raises:
        HostMemoryError: if it would pass the limit.
    """
    held = ledger.total(Tier.HOST)
    if limit is not None and held + request.span_bytes > limit:
        raise HostMemoryError(
            f"{request.owner} need {format_bytes(request.nbytes)} more of host memory, and "
            f"host_memory_limit is {format_bytes(limit)}, of which {format_bytes(held)} are taken. "
            f"Largest: {ledger.summary()}. Raise it, set activation = 'recompute', or take a "
            "smaller microbatch"
        )


class DeviceMemory:
    """Maps memory of one device, and books it in the Ledger."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._device = device

    def map(self, requests: Sequence[MemoryRequest], *, zeroed: bool = False) -> list[Tensor]:
        """Allocate a 1-D tensor per request, of undefined contents unless `zeroed`, in their
        order."""
        take = self._ledger.device_tensor
        found = [take(r.owner, r.numel, DTYPES[r.dtype], self._device) for r in requests]
        return [tensor.zero_() for tensor in found] if zeroed else found


def map_weights(memory: DeviceMemory, blocks: Sequence[Block], spec: StepSpec) -> None:
    """Map flat working weights of blocks that stay on the device, and shards of blocks that are
    gathered for their use."""
    buckets = {bucket.name: bucket for block in blocks for bucket in block.held}
    requests = list(weight_requests(spec))
    for request, tensor in zip(requests, memory.map(requests), strict=True):
        give(buckets[request.bucket], request, Buffer(request.name, tensor))


def map_staging(memory: DeviceMemory, spec: StepSpec) -> dict[Memory, Staging]:
    """Map a few slots for gathered gradients, or memory for each piece of them (ZeRO stage 1), and
    the place where matrices are orthogonalized."""
    requests = [*staging_requests(spec), *matrix_requests(spec)]

    # Mapped when the first gradient comes, and kept: `MemoryMap` asks for it once.
    def own(owner: str | int, nbytes: int) -> tuple[str, Tensor]:
        (place,) = memory.map([MemoryRequest("gradients", nbytes, "uint8")])
        return f"gradients {owner}[0]", place

    def slots(owner: str) -> Staging:
        pieces = memory.map([request for request in requests if request.owner == owner])
        return lambda slot, _: (f"{owner}[{slot}]", pieces[int(slot)])

    return {
        Memory.ROUNDED: slots("rounded gradients"),
        Memory.MATRIX: slots("matrix workspace"),
        Memory.STAGING: own if spec.zero_stage == 1 else slots("gradient staging"),
    }
