"""Communication of ranks other than ZeRO's collectives, in bytes and seconds: tensor parallel,
expert parallel, and copies of the state (hybrid sharding)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from offloadtrain.config.model_shape import chosen_experts, mlp_params
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.costs.device_time import Seconds
from offloadtrain.plan.placement import Placement
from offloadtrain.step.layout.block_spec import BlockSpec
from offloadtrain.step.layout.step_spec import StepSpec


@dataclass(frozen=True, slots=True)
class AmongParts:
    """Tensor parallel: the communication of one rank in a microbatch with the ranks that hold the
    other parts of its matrices."""

    placed: Placement
    machine: Machine

    @property
    def count(self) -> int:
        return self.placed.config.ranks.tensor

    @property
    def flops_again(self) -> float:
        """FLOPs per token in a layer's forward that exceed this rank's share, because every part
        computes the router and the experts completely."""
        shape = self.placed.config.model
        if not shape.num_experts:
            return 0.0
        router = shape.num_experts * shape.d_model
        expert = (mlp_params(shape) - router) / shape.num_experts
        return 2.0 * (router + chosen_experts(shape) * expert) * (1 - 1 / self.count)

    @property
    def sums_of_layer(self) -> int:
        """Number of all-reduces over the parts in a layer's forward, and again in its backward: one
        for attention, and one for the MLP unless it has experts, which every part computes
        completely."""
        return 1 if self.placed.config.model.num_experts else 2

    @property
    def sums(self) -> int:
        """Number of all-reduces over the parts in a microbatch: in each layer forward and backward,
        and one per recomputed layer, whose forward runs again up to the input of its last
        product."""
        if self.count == 1:
            return 0
        of_layer = 2 * self.sums_of_layer
        return of_layer * self.placed.config.model.num_layers + self.placed.recomputed

    @property
    def sum_bytes(self) -> int:
        """Bytes that a rank sends in one all-reduce, as a ring."""
        return 2 * _of_others(self.placed.hidden_bytes, self.count)

    @property
    def sum_s(self) -> float:
        return self._sent_s(self.sum_bytes)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in a microbatch: all-reduces, and the gathers of partitioned
        layer inputs before recompute."""
        sent = self.sums * self.sum_bytes
        if self.placed.spec.input_parts > 1:
            sent += self.placed.recomputed * _of_others(self.placed.hidden_bytes, self.count)
        return sent

    def added(self, alone: Seconds, block: BlockSpec) -> Seconds:
        """Return the seconds of a block on a rank: `alone` plus its all-reduces over the parts."""
        summed_s = self.sums_of_layer * self.sum_s if block.repeated else 0.0
        again_s = self.sum_s if block.recomputed else 0.0
        return alone + Seconds(summed_s, summed_s + again_s)

    def gather_s(self, nbytes: int) -> float:
        """Return the seconds of gathering the parts of a tensor of `nbytes`."""
        return self._sent_s(_of_others(nbytes, self.count))

    def _sent_s(self, sent: int) -> float:
        """Return the seconds in which a rank sends `sent` bytes. If a host has fewer GPUs than
        there are parts, other ranks use the host's link at the same time."""
        return links_s(self.machine, sent, sent if self.count > self.machine.gpus else 0)


@dataclass(frozen=True, slots=True)
class AmongExperts:
    """Expert parallel: the all-to-alls of one rank in a microbatch whose tokens choose all experts
    equally often. The preceding exchange of row counts is not included."""

    placed: Placement
    machine: Machine

    @property
    def count(self) -> int:
        return self.placed.config.ranks.expert

    @property
    def row_bytes(self) -> int:
        """Bytes of a layer's tokens, once for each expert that they chose."""
        return self.placed.input_bytes * self.placed.config.model.experts_per_token

    @property
    def exchanges(self) -> int:
        """Number of all-to-alls in a microbatch: in each layer to the experts and back, forward and
        backward, and again in recomputed layers."""
        if self.count == 1:
            return 0
        return 4 * self.placed.config.model.num_layers + 2 * self.placed.recomputed

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in these all-to-alls."""
        return self.exchanges * _of_others(self.row_bytes, self.count)

    @property
    def exchange_s(self) -> float:
        """Seconds of one all-to-all: over links inside a host, and over the host's link for rows
        that leave it, which all its ranks send at once."""
        gpus = self.machine.gpus
        on_host = max(min(self.count, gpus // self._apart), 1)  # ranks of one group on a host
        leaving = gpus * self.row_bytes * (self.count - on_host) / self.count
        sent = _of_others(self.row_bytes, self.count)
        return links_s(self.machine, sent, leaving if self.hosts > 1 else 0)

    @property
    def hosts(self) -> int:
        """The most hosts over which one group of ranks with all experts is spread."""
        groups = self.placed.spec.ranks // self.count * self.placed.config.ranks.pipeline
        return most_hosts(self.count * self._apart, groups, self.machine.gpus)

    @property
    def _apart(self) -> int:
        """Distance between neighbouring ranks of a group; tensor parallel ranks lie between."""
        return self.placed.config.ranks.tensor


@dataclass(frozen=True)
class AmongCopies:
    """Hybrid sharding: the all-reduces of one rank's gradient shards in a microbatch with the ranks
    that hold the same shard in other copies of the state.

    Attributes:
        parts: number of tensor parallel parts, which are neighbouring ranks.
    """

    spec: StepSpec
    machine: Machine
    parts: int

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in a microbatch: for each piece of a shard a reduce-scatter and
        an all-gather over the copies."""
        copies, spec = self.spec.copies, self.spec
        pieces = ((hi - lo, b) for b in spec.buckets for lo, hi in spec.pieces(b))
        sizes = (count * spec.reduced_bytes(bucket) for count, bucket in pieces)
        return sum(2 * (size // copies) * (copies - 1) for size in sizes)

    @property
    def seconds(self) -> float:
        """Seconds of a microbatch's all-reduces."""
        spec = self.spec
        return sum(self.sum_s(b.shard_numel * spec.reduced_bytes(b)) for b in spec.buckets)

    @property
    def hosts(self) -> int:
        """Number of hosts that hold copies of a shard: groups of ranks fill hosts one by one."""
        group = self.spec.ranks * self.parts
        return len({copy * group // self.machine.gpus for copy in range(self.spec.copies)})

    def sum_s(self, nbytes: int) -> float:
        """Return the seconds of an all-reduce of one shard: among the GPUs of a host, or over the
        links between hosts, which all shards on a host share."""
        copies, hosts = self.spec.copies, self.hosts
        shards = min(self.spec.ranks * self.parts, self.machine.gpus)
        across = 2 * nbytes * shards * (hosts - 1) / hosts
        return links_s(self.machine, 2 * nbytes * (copies - 1) / copies, across)


def links_s(machine: Machine, sent: float, leaving: float) -> float:
    """Return the seconds of a collective that uses the links inside a host and, at the same time,
    the link between hosts.

    Args:
        sent: bytes that one rank sends.
        leaving: bytes that all ranks of a host send to other hosts.
    """
    inside_s = sent / (1e9 * machine.gpu_link_gbps) if sent else 0.0
    return max(inside_s, leaving / (1e9 * machine.node_link_gbps)) if leaving else inside_s


def _of_others(nbytes: int, count: int) -> int:
    """Return the part of `nbytes` that the other ranks of `count` hold."""
    return nbytes * (count - 1) // count


def most_hosts(width: int, groups: int, gpus: int) -> int:
    """Return the most hosts over which one of `groups` groups of neighbouring ranks is spread.

    Args:
        width: ranks of a group.
        gpus: ranks of a host.
    """
    firsts = (number * width for number in range(groups))
    return max(ceil((first + width) / gpus) - first // gpus for first in firsts)
