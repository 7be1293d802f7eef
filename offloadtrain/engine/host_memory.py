"""What the host keeps of each bucket, and where: one mapping for all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offloadtrain.engine import device_memory
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.settings import Settings
from offloadtrain.memory import (
    Arena,
    HostMemoryError,
    Ledger,
    Request,
    Tier,
    available_bytes,
    largest_owners,
)
from offloadtrain.optim import UpdateRule
from offloadtrain.step import spec
from offloadtrain.transfer import Buffer
from offloadtrain.units import format_bytes


def map_host(
    arena: Arena,
    blocks: Sequence[Block],
    rule: UpdateRule,
    settings: Settings,
    num_params: int,
) -> Buffer:
    """Map everything the host keeps, bucket by bucket; returns the sums of squares.

    `arena`: on the device where the state is not offloaded.
    """
    buckets = [bucket for block in blocks for bucket in block.buckets]
    norms = Request("norms", num_params, torch.float64)
    base = [norms, *(r for b in buckets for r in _requests(b, rule, settings, doubled=False))]
    frozen = [b for block in blocks for b in block.frozen if b.from_host]
    still = [Request("frozen weights", bucket.shard_numel, bucket.dtype) for bucket in frozen]
    base += still
    if settings.accumulates:
        slot = Request("host staging", device_memory.host_staging_bytes(buckets), torch.uint8)
        base += [slot] * device_memory.RING_SLOTS
    if settings.state_on == "host":
        _check_limit(base, settings.host_memory_limit)
    doubled = _doubled(blocks, rule, settings, _span_bytes(base))
    requests = [r for b in buckets for r in _requests(b, rule, settings, doubled=b in doubled)]
    tensors: Iterator[Tensor] = iter(arena.map([norms, *requests, *still]))
    squares = Buffer("norms", next(tensors))
    for bucket in buckets:
        _give_host(bucket, tensors, rule, settings, doubled=bucket in doubled)
    for bucket in frozen:
        bucket.snapshot = Buffer(f"frozen weights {bucket.name}", next(tensors))
    return squares


def _give_host(
    bucket: Bucket,
    tensors: Iterator[Tensor],
    rule: UpdateRule,
    settings: Settings,
    *,
    doubled: bool,
) -> None:
    """Take a bucket's memory in the order of `_requests`."""
    fields = bucket.format.fields(rule.moments)
    bucket.state = tuple(Buffer(f"{f.name} {bucket.name}", next(tensors)) for f in fields)
    bucket.gradient = Buffer(f"gradient {bucket.name}", next(tensors))
    if _pends(bucket, settings, doubled):
        bucket.pending = Buffer(f"pending weights {bucket.name}", next(tensors))
    if _is_shown(bucket, settings):
        bucket.snapshot = Buffer(f"shown weights {bucket.name}", next(tensors))
    if doubled:
        other = (Buffer(f"other {f.name} {bucket.name}", next(tensors)) for f in fields)
        bucket.other = tuple(other)


def _pends(bucket: Bucket, settings: Settings, doubled: bool) -> bool:
    """Whether new weights need memory of their own until their upload."""
    if bucket.from_host:
        return not bucket.format.holds_weight
    if settings.accumulates and bucket.shard_numel * bucket.dtype.itemsize > spec.STAGING_BYTES:
        return not bucket.format.holds_weight  # no slot of the ring holds them
    early = doubled or settings.update != "speculative"
    return settings.weights_wait and early and not bucket.format.holds_weight


def _is_shown(bucket: Bucket, settings: Settings) -> bool:
    """Whether loads cannot read where an update writes: it may run inside backward."""
    return bucket.from_host and (settings.update != "exact" or settings.updates_early)


_OWNERS = {"master": "master weights", "weight": "host weights"}


def _requests(
    bucket: Bucket, rule: UpdateRule, settings: Settings, *, doubled: bool
) -> list[Request]:
    kept = [
        (
            _OWNERS.get(field.name, field.name),
            field.numel(bucket.shard_numel),
            field.dtype or bucket.dtype,
        )
        for field in bucket.format.fields(rule.moments)
    ]
    requests = [Request(*one) for one in kept]
    if settings.accumulates:
        requests.append(Request("gradient sums", bucket.shard_numel, torch.float32))
    else:
        requests.append(Request("gradients", bucket.shard_numel, bucket.dtype))
    if _pends(bucket, settings, doubled):
        requests.append(Request("pending weights", bucket.shard_numel, bucket.dtype))
    if _is_shown(bucket, settings):
        requests.append(Request("shown weights", bucket.shard_numel, bucket.dtype))
    if doubled:
        requests += [Request("other copy of the state", *one[1:]) for one in kept]
    return requests


def _span_bytes(requests: Sequence[Request]) -> int:
    return sum(request.span_bytes for request in requests)


def _check_limit(base: Sequence[Request], limit: int | None) -> None:
    if limit is not None and _span_bytes(base) > limit:
        raise HostMemoryError(
            f"the engine needs {format_bytes(_span_bytes(base))} of host memory and "
            f"host_memory_limit is {format_bytes(limit)}. Largest: {largest_owners(base)}. Raise "
            "it, or take a narrower state ('split16', 'int8')"
        )


def check_room(request: Request, ledger: Ledger, limit: int | None) -> None:
    """Before more is mapped than was known when the engine was made.

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


_HEADROOM = 0.9
"""Of the available host memory that speculation may fill: the rest of the machine lives too."""


def _doubled(
    blocks: Sequence[Block], rule: UpdateRule, settings: Settings, base_bytes: int
) -> set[Bucket]:
    """Buckets with a second copy of their state: the last blocks first, whose gradients come
    first, as far as the memory limit goes."""
    if settings.update != "speculative":
        return set()
    limit = settings.host_memory_limit
    room = (available_bytes() * _HEADROOM if limit is None else limit) - base_bytes
    doubled: set[Bucket] = set()
    for block in reversed(blocks):
        both, one = (
            [r for b in block.buckets for r in _requests(b, rule, settings, doubled=twice)]
            for twice in (True, False)
        )
        room -= _span_bytes(both) - _span_bytes(one)
        if room < 0:
            break
        doubled.update(block.buckets)
    return doubled
