"""What the ranks of hybrid sharding send those that hold the same shard in other copies of the
state, and the time of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from offloadtrain.hardware.machine import Machine
from offloadtrain.step.spec import StepSpec


@dataclass(frozen=True)
class AmongCopies:
    """The all-reduces of one rank's shards of a microbatch's gradients.

    Attributes:
        parts: ranks that hold the parts of matrices, neighbours of each rank.
    """

    spec: StepSpec
    machine: Machine
    parts: int

    @cached_property
    def sent_bytes(self) -> int:
        """What a rank sends in a microbatch: of each piece of a shard, a reduce-scatter and an
        all-gather over the copies."""
        copies, spec = self.spec.copies, self.spec
        pieces = ((hi - lo, b) for b in spec.buckets for lo, hi in spec.pieces(b))
        sizes = (count * spec.reduced_bytes(bucket) for count, bucket in pieces)
        return sum(2 * (size // copies) * (copies - 1) for size in sizes)

    @property
    def seconds(self) -> float:
        """The time of a microbatch's all-reduces."""
        spec = self.spec
        return sum(self.sum_s(b.shard_numel * spec.reduced_bytes(b)) for b in spec.buckets)

    @property
    def hosts(self) -> int:
        """The hosts that hold copies of a shard: ranks fill hosts one by one, group after group."""
        group = self.spec.ranks * self.parts
        return len({copy * group // self.machine.gpus for copy in range(self.spec.copies)})

    def sum_s(self, nbytes: int) -> float:
        """Return the time of an all-reduce of one shard: among the GPUs of a host, or over the link
        of each host, which the shards on it share."""
        copies, hosts, machine = self.spec.copies, self.hosts, self.machine
        if copies == 1:
            return 0.0
        inside = 2 * nbytes * (copies - 1) / copies / (machine.gpu_link_gbps * 1e9)
        if hosts == 1:
            return inside
        shards = min(self.spec.ranks * self.parts, machine.gpus)
        across = 2 * nbytes * shards * (hosts - 1) / hosts
        return max(inside, across / (machine.node_link_gbps * 1e9))


def most_hosts(width: int, groups: int, gpus: int) -> int:
    """Return the most hosts that one of so many groups of neighbouring ranks is on.

    Args:
        width: ranks of a group.
        gpus: ranks of a host.
    """
    firsts = (number * width for number in range(groups))
    return max(ceil((first + width) / gpus) - first // gpus for first in firsts)
