"""Weights, slots and staging on the device: mapped as the step's spec asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadtrain.dtypes import DTYPES
from offloadtrain.engine.block import Block
from offloadtrain.engine.collectives import Collectives
from offloadtrain.engine.host_memory import give
from offloadtrain.engine.reduce import Reduction, TakeStaging
from offloadtrain.engine.ring import Reserved, Ring
from offloadtrain.engine.streamer import Streamer
from offloadtrain.memory import Ledger
from offloadtrain.step.memory import Request, slot_requests, staging_requests, weight_requests
from offloadtrain.step.spec import StepSpec
from offloadtrain.transfer import Buffer, Lane, Lanes


class DeviceMemory:
    """Maps on one device, and books it."""

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self._ledger = ledger
        self._device = device

    def map(self, requests: Sequence[Request]) -> list[Tensor]:
        """Tensors of undefined contents in the order of the requests."""
        take = self._ledger.device_tensor
        return [take(r.owner, r.numel, DTYPES[r.dtype], self._device) for r in requests]


def map_weights(memory: DeviceMemory, blocks: Sequence[Block], spec: StepSpec) -> None:
    """Flat working weights of blocks that stay on the device, and shards of those that are
    gathered."""
    buckets = {bucket.name: bucket for block in blocks for bucket in block.held}
    requests = list(weight_requests(spec))
    for request, tensor in zip(requests, memory.map(requests), strict=True):
        give(buckets[request.bucket], request, Buffer(request.name, tensor))


def make_streamer(
    memory: DeviceMemory,
    blocks: Sequence[Block],
    lanes: Lanes,
    collectives: Collectives,
    spec: StepSpec,
) -> Streamer | None:
    """Slots for the streamed blocks; until its first load a block's weights are nowhere."""
    streamed = [block for block in blocks if block.name in spec.streamed]
    slots = memory.map(slot_requests(spec))
    return Streamer(lanes, collectives, streamed, slots) if streamed else None


def make_reduction(
    memory: DeviceMemory, lanes: Lanes, collectives: Collectives, spec: StepSpec
) -> Reduction:
    """Gathers gradients in a few slots, or in a place for each of them (ZeRO stage 1)."""
    staging = staging_requests(spec)

    def ring(owner: str) -> Ring | None:
        slots = [request for request in staging if request.owner == owner]
        if not slots:
            return None
        made = Ring(owner, lanes, slots[0].nbytes, lambda _: memory.map(slots))
        made.prepare()
        return made

    rounded, shared = ring("rounded gradients"), ring("gradient staging")
    take: TakeStaging
    if shared is not None:
        take = lambda key, numel, dtype: shared.take(numel, dtype, Lane.COMPUTE)  # noqa: E731
    else:
        whole = Reserved(
            "gradients", lanes, lambda n: memory.map([Request("gradients", n, "uint8")])[0]
        )
        take = lambda key, numel, dtype: whole.take(key, numel, dtype, Lane.COMPUTE)  # noqa: E731
    return Reduction(
        lanes,
        collectives,
        take,
        piece_bytes=spec.staging_bytes,
        dtype=torch.float32 if spec.config.reduction == "fp32" else None,
        rounded=rounded,
    )
