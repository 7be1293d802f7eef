"""Where a job puts its blocks: what of a resolved job decides over memory and schedule.

The rules are the engine's (`engine.device_memory`, `engine.host_memory`), over sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from offloadtrain.config import Config
from offloadtrain.errors import OffloadTrainError
from offloadtrain.plan.layout import ALIGN, Block, Bucket, blocks_of
from offloadtrain.units import format_bytes, parse_bytes

RING_SLOTS = 2
STAGING_SLOTS_MOST = 8
STAGING_BYTES = 64 << 20
WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


class PlanError(OffloadTrainError):
    """The job cannot be placed as it asks."""


@dataclass(frozen=True)
class Placement:
    """A job on so many ranks, as one of them sees it.

    Attributes:
        config: the rank's part of the job (`share.shared`), its precision resolved.
        stage: of ZeRO; 0 where there is one rank.
        blocks: in forward order.
        streamed: names of those that come to a slot of the device when they are used.
    """

    config: Config
    ranks: int
    stage: int
    blocks: tuple[Block, ...]
    streamed: frozenset[str]

    @property
    def weight_bytes(self) -> int:
        return WEIGHT_BYTES[self.config.device.precision]

    @property
    def offloaded(self) -> bool:
        """Gradients and state are on the host."""
        return self.config.optim.state_on == "host"

    @property
    def sums(self) -> bool:
        """Microbatches are summed beside the state."""
        return self.config.train.grad_accum_steps > 1

    @property
    def kept_on_device(self) -> bool:
        """Streamed blocks come from shards on the devices."""
        return bool(self.streamed) and self.config.device.working == "device"

    @cached_property
    def buckets(self) -> list[Bucket]:
        return [bucket for block in self.blocks for bucket in block.buckets]

    @cached_property
    def largest_numel(self) -> int:
        """Of any bucket; asked for by every operation of a step."""
        return max(bucket.numel for bucket in self.buckets)

    @property
    def early(self) -> bool:
        """In mode "exact": nothing global has to be known before an update."""
        optim = self.config.optim
        return optim.update == "exact" and not optim.clip_norm and not optim.skip_nonfinite

    @property
    def reduced_bytes(self) -> int:
        """Of an element of a gradient while ranks sum it."""
        wide = self.ranks > 1 and self.config.ranks.reduction == "fp32"
        return 4 if wide else self.weight_bytes

    @property
    def slots(self) -> int:
        return min(self.config.device.slots, len(self.streamed))

    @property
    def staging_bytes(self) -> int:
        """Of one slot for gradients on the device."""
        largest = self.largest_numel * self.reduced_bytes
        return max(min(largest, STAGING_BYTES), ALIGN * 4 * self.ranks)

    @property
    def staging_slots(self) -> int:
        """For gradients on the device: enough for a bucket that goes down in pieces."""
        largest = self.largest_numel * self.reduced_bytes
        pieces = -(-largest // self.staging_bytes)
        return max(RING_SLOTS, min(pieces + 1, STAGING_SLOTS_MOST))

    @property
    def host_staging_bytes(self) -> int:
        """Of one slot for gradients and weights on the host."""
        largest = max(bucket.shard_numel for bucket in self.buckets) * self.weight_bytes
        return max(min(largest, STAGING_BYTES), ALIGN * 4)

    def from_host(self, block: Block) -> bool:
        return block.name in self.streamed and not self.kept_on_device

    def pieces(self, bucket: Bucket) -> int:
        """In how many pieces a gradient goes down."""
        per_shard = self.staging_bytes // (self.reduced_bytes * self.ranks)
        per_piece = max(per_shard // ALIGN * ALIGN, ALIGN)
        return -(-bucket.shard_numel // per_piece)


def place(config: Config, ranks: int = 1) -> Placement:
    """`config`: the rank's part of the job, its precision resolved.

    Raises:
        PlanError: `device.memory_limit` holds not even the rest and the slots, or the stage does
            not go with where the weights live.
    """
    stage = 0 if ranks == 1 else config.ranks.zero_stage
    if ranks > 1 and stage == 0:
        stage = 3 if config.device.working == "host" else 2
    if config.device.working == "host" and stage in (1, 2):
        raise PlanError(
            f"device.working = 'host' and ranks.zero_stage = {stage}: among {ranks} ranks each "
            "host's copy of the weights is a shard, gathered for its use: set ranks.zero_stage = 3"
        )
    blocks = blocks_of(config, ranks)
    placed = Placement(config, ranks, stage, blocks, frozenset())
    comes_and_goes = config.device.working == "host" or stage == 3
    return Placement(config, ranks, stage, blocks, _streamed(placed, comes_and_goes))


def _streamed(placed: Placement, comes_and_goes: bool) -> frozenset[str]:
    """`comes_and_goes`: layers need not stay on the device."""
    device = placed.config.device
    repeated = [block for block in placed.blocks if block.repeated and comes_and_goes]
    limit = parse_bytes(device.memory_limit) if device.memory_limit else None
    if not repeated:
        if limit is not None:
            _room(placed, repeated, limit)
        return frozenset()
    room = len(repeated) if limit is None else _room(placed, repeated, limit)
    asked = device.resident_blocks
    if room < min(asked, len(repeated)):
        raise PlanError(
            f"device.resident_blocks = {asked}, and device.memory_limit = {device.memory_limit} "
            f"has room for {room} beside the rest and {device.slots} slots"
        )
    stay = min(asked, len(repeated)) if asked >= 0 else (0 if limit is None else room)
    kept = {repeated[(2 * i + 1) * len(repeated) // (2 * stay)].name for i in range(stay)}
    return frozenset(block.name for block in repeated) - kept


def _room(placed: Placement, repeated: Sequence[Block], limit: int) -> int:
    """How many of the layers can stay on the device."""
    weight, device = placed.weight_bytes, placed.config.device
    sizes = [weight * block.numel for block in repeated]
    rest = weight * sum(block.numel for block in placed.blocks) - sum(sizes) + staging_total(placed)
    if device.working == "device" and placed.stage == 3:
        rest += sum(sizes) // placed.ranks
    least = rest + device.slots * max(sizes, default=0)
    if least > limit and rest + sum(sizes) > limit:
        raise PlanError(
            f"device.memory_limit is {format_bytes(limit)}, and the engine needs "
            f"{format_bytes(least)}: {format_bytes(rest)} for what stays on the device, the rest "
            f"for {device.slots} slots. Raise it, or set device.slots = 1"
        )
    if rest + sum(sizes) <= limit:
        return len(repeated)
    return sum(1 for n in range(1, len(sizes)) if least + sum(sorted(sizes)[-n:]) <= limit)


def staging_total(placed: Placement) -> int:
    """Device memory of gradients on their way down."""
    if placed.stage == 1:
        return sum(bucket.numel for bucket in placed.buckets) * placed.reduced_bytes
    return placed.staging_slots * placed.staging_bytes
