"""Every byte that the engine will hold, by tier and owner: what its Ledger shows after a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from offloadtrain.plan.layout import Block, Bucket, num_tensors
from offloadtrain.plan.placement import RING_SLOTS, STAGING_BYTES, Placement, staging_total
from offloadtrain.units import parse_bytes

Owners = dict[str, int]

SPAN, STAGGER = 256, 4096 + 256
"""How the host arena separates what lies in it."""

HEADROOM = 0.9
"""Of the host's memory, that a second copy of the state may fill."""

_SCALE_BLOCK = 128
"""Elements that share a scale in "int8"."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor of a parameter's state on the host.

    Attributes:
        nbytes: per parameter; 0: those of a working weight.
        per_block: one value for so many elements.
    """

    owner: str
    nbytes: int
    per_block: int = 1


STATES: dict[str, tuple[Kept, ...]] = {
    "fp32": (Kept("master weights", 4), Kept("exp_avg", 4), Kept("exp_avg_sq", 4)),
    "split16": (Kept("host weights", 0), Kept("low", 2), Kept("exp_avg", 2), Kept("exp_avg_sq", 2)),
    "int8": (
        Kept("host weights", 0),
        Kept("correction", 1),
        Kept("exp_avg", 1),
        Kept("exp_avg_sq", 1),
        Kept("exp_avg_scale", 4, _SCALE_BLOCK),
        Kept("exp_avg_sq_scale", 4, _SCALE_BLOCK),
    ),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One piece of the host arena."""

    owner: str
    nbytes: int

    @property
    def span_bytes(self) -> int:
        return -(-self.nbytes // SPAN) * SPAN + STAGGER


def host(placed: Placement, available_bytes: int, *, copies: bool = True) -> Owners:
    """Bytes of one rank's host memory.

    Args:
        available_bytes: what a second copy of the state may grow into, where the job sets no limit.
        copies: count these, which an engine makes as far as there is room.
    """
    owners: Owners = {}
    state = requests(placed) if placed.offloaded else ()
    more = _second_copies(placed, available_bytes) if copies else ()
    for request in [*state, *_inputs(placed), *more]:
        owners[request.owner] = owners.get(request.owner, 0) + request.nbytes
        owners["padding"] = owners.get("padding", 0) + request.span_bytes - request.nbytes
    return owners


def device(placed: Placement) -> Owners:
    """Bytes that the engine holds on one device, without activations and what torch needs."""
    weight = placed.weight_bytes
    streamed = [block for block in placed.blocks if block.name in placed.streamed]
    stay = [block for block in placed.blocks if block.name not in placed.streamed]
    owners = {"working weights": weight * sum(block.numel for block in stay)}
    if placed.kept_on_device:
        owners["weight shards"] = weight * sum(block.numel for block in streamed) // placed.ranks
    if streamed:
        owners["streaming slots"] = placed.slots * weight * max(b.numel for b in streamed)
    staged = "gradients" if placed.stage == 1 else "gradient staging"
    owners[staged] = staging_total(placed)
    if placed.reduced_bytes > weight:
        slot = placed.staging_bytes // placed.ranks // 2
        owners["rounded gradients"] = placed.staging_slots * slot
    for request in () if placed.offloaded else requests(placed):
        owners[request.owner] = owners.get(request.owner, 0) + request.nbytes
    return owners


def requests(placed: Placement) -> Iterator[Request]:
    """What one arena holds: gradients and state, without second copies of it."""
    config = placed.config
    yield Request("norms", 8 * num_tensors(config.model))
    for block in placed.blocks:
        for bucket in block.buckets:
            yield from _kept(placed, bucket)
            yield from _gradient(placed, block, bucket)
    if placed.sums:
        yield from [Request("host staging", placed.host_staging_bytes)] * RING_SLOTS


def _inputs(placed: Placement) -> Iterator[Request]:
    """Layers' inputs on the host."""
    if placed.config.device.activation == "offload":
        layers = sum(block.repeated for block in placed.blocks)
        yield from [Request("block inputs", input_bytes(placed))] * layers


def input_bytes(placed: Placement) -> int:
    """Of one layer's input."""
    config = placed.config
    tokens = config.train.micro_batch * config.data.seq_len
    return tokens * config.model.d_model * placed.weight_bytes


def _kept(placed: Placement, bucket: Bucket, owner: str = "") -> Iterator[Request]:
    for kept in STATES[placed.config.optim.state]:
        values = bucket.shard_numel // kept.per_block
        yield Request(owner or kept.owner, values * (kept.nbytes or placed.weight_bytes))


def _gradient(
    placed: Placement, block: Block, bucket: Bucket, *, doubled: bool = False
) -> Iterator[Request]:
    """The gradient or its sum, and new weights where they wait or are shown."""
    weights = bucket.shard_numel * placed.weight_bytes
    if not doubled:
        sums = ("gradient sums", 4 * bucket.shard_numel)
        yield Request(*(sums if placed.sums else ("gradients", weights)))
    if _pends(placed, block, weights, doubled=doubled) and (
        not doubled or not _pends(placed, block, weights, doubled=False)
    ):
        yield Request("pending weights", weights)
    if not doubled and _is_shown(placed, block):
        yield Request("shown weights", weights)


def pends(placed: Placement, block: Block, bucket: Bucket) -> bool:
    """Whether new weights have memory of their own until their upload, without a second copy."""
    return _pends(placed, block, bucket.shard_numel * placed.weight_bytes, doubled=False)


def _pends(placed: Placement, block: Block, weights: int, *, doubled: bool) -> bool:
    optim = placed.config.optim
    if optim.state != "fp32":
        return False  # they are a part of the state
    if placed.from_host(block) or (placed.sums and weights > STAGING_BYTES):
        return True
    waits = optim.update != "exact" or (placed.early and placed.sums)
    return waits and (doubled or optim.update != "speculative")


def _is_shown(placed: Placement, block: Block) -> bool:
    return placed.from_host(block) and (placed.config.optim.update != "exact" or placed.early)


def _second_copies(placed: Placement, available_bytes: int) -> Iterator[Request]:
    """Of the state, for updates that are guessed: the last blocks first, as far as memory goes."""
    if placed.config.optim.update != "speculative":
        return
    limit = placed.config.device.host_memory_limit
    room = parse_bytes(limit) if limit else int(available_bytes * HEADROOM)
    room -= _spans(requests(placed))
    for block in reversed(placed.blocks):
        more = list(_doubled(placed, block))
        room -= _spans(more)
        if room < 0:
            return
        yield from more


def doubled_blocks(placed: Placement, available_bytes: int) -> int:
    """How many blocks have a second copy of their state."""
    copies = sum(1 for _ in _second_copies(placed, available_bytes))
    per_block = [len(list(_doubled(placed, block))) for block in reversed(placed.blocks)]
    count = 0
    while count < len(per_block) and sum(per_block[: count + 1]) <= copies:
        count += 1
    return count if copies else 0


def _doubled(placed: Placement, block: Block) -> Iterator[Request]:
    for bucket in block.buckets:
        yield from _kept(placed, bucket, "other copy of the state")
        yield from _gradient(placed, block, bucket, doubled=True)


def _spans(many: Iterable[Request]) -> int:
    return sum(request.span_bytes for request in many)
