"""Weights, slots and staging on the device, mapped from the step's spec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadtrain.engine.block import Block
from offloadtrain.engine.host_memory import give
from offloadtrain.engine.memory_map import Staging
from offloadtrain.runtime.arena import Ledger
from offloadtrain.runtime.dtypes import DTYPES
from offloadtrain.runtime.lanes import Buffer
from offloadtrain.step.memory import MemoryRequest, staging_requests, weight_requests
from offloadtrain.step.operations import Memory
from offloadtrain.step.spec import StepSpec


class DeviceMemory:
    """Maps memory of one device, and books it in the Ledger."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._device = device

    def map(self, requests: Sequence[MemoryRequest]) -> list[Tensor]:
        """Allocate a 1-D tensor per request, of undefined contents, in their order."""
        take = self._ledger.device_tensor
        return [take(r.owner, r.numel, DTYPES[r.dtype], self._device) for r in requests]


def map_weights(memory: DeviceMemory, blocks: Sequence[Block], spec: StepSpec) -> None:
    """Map flat working weights of blocks that stay on the device, and shards of blocks that are
    gathered for their use."""
    buckets = {bucket.name: bucket for block in blocks for bucket in block.held}
    requests = list(weight_requests(spec))
    for request, tensor in zip(requests, memory.map(requests), strict=True):
        give(buckets[request.bucket], request, Buffer(request.name, tensor))


def map_staging(memory: DeviceMemory, spec: StepSpec) -> dict[Memory, Staging]:
    """Map a few slots for gathered gradients, or memory for each piece of them (ZeRO stage 1)."""
    requests = staging_requests(spec)

    # Mapped when the first gradient comes, and kept: `MemoryMap` asks for it once.
    def own(owner: str | int, nbytes: int) -> tuple[str, Tensor]:
        (place,) = memory.map([MemoryRequest("gradients", nbytes, "uint8")])
        return f"gradients {owner}[0]", place

    def slots(owner: str) -> Staging:
        pieces = memory.map([request for request in requests if request.owner == owner])
        return lambda slot, _: (f"{owner}[{slot}]", pieces[int(slot)])

    return {
        Memory.ROUNDED: slots("rounded gradients"),
        Memory.STAGING: own if spec.zero_stage == 1 else slots("gradient staging"),
    }
