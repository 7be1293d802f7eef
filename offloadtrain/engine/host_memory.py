"""The host memory of each bucket, mapped from the step's spec."""

from __future__ import annotations

from collections.abc import Sequence

from offloadtrain.config.errors import HostMemoryError
from offloadtrain.config.units import format_bytes
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.runtime.arena import Arena, Ledger, Tier
from offloadtrain.runtime.lanes import Buffer
from offloadtrain.step.memory import MemoryRequest, Role, kept_requests
from offloadtrain.step.spec import StepSpec


def map_host(arena: Arena, blocks: Sequence[Block], spec: StepSpec) -> Buffer:
    """Map all that is kept, bucket by bucket, at once; returns the buffer of the sums of squares,
    (number of parameters,) fp64.

    `arena`: on the device where the state is not offloaded.
    """
    buckets = {bucket.name: bucket for block in blocks for bucket in block.held}
    requests = list(kept_requests(spec))
    norms, *kept = (
        Buffer(request.name, tensor)
        for request, tensor in zip(requests, arena.map(requests), strict=True)
    )
    for request, buffer in zip(requests[1:], kept, strict=True):
        give(buckets[request.bucket], request, buffer)
    return norms


def give(bucket: Bucket, request: MemoryRequest, buffer: Buffer) -> None:
    """Set a buffer as the bucket's attribute that the request names."""
    assert request.role is not None
    if request.role in (Role.STATE, Role.OTHER):
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
