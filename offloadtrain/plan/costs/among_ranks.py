"""What ranks send each other beside ZeRO's collectives, and the time of it: those that hold the
parts of matrices, different experts, or copies of the state."""

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
    """Tensor parallel: the exchanges of one rank in a microbatch with those that hold the other
    parts of its matrices."""

    placed: Placement
    machine: Machine

    @property
    def count(self) -> int:
        return self.placed.config.ranks.tensor

    @property
    def flops_again(self) -> float:
        """FLOPs per token, in a layer's forward, of the router and the experts, which every part
        computes whole: those beyond its share."""
        shape = self.placed.config.model
        if not shape.num_experts:
            return 0.0
        router = shape.num_experts * shape.d_model
        expert = (mlp_params(shape) - router) / shape.num_experts
        return 2.0 * (router + chosen_experts(shape) * expert) * (1 - 1 / self.count)

    @property
    def sums_of_layer(self) -> int:
        """The sums over the parts in a layer, forward, and as many backward: of attention, and of
        the MLP unless it has experts, which every part computes whole."""
        return 1 if self.placed.config.model.num_experts else 2

    @property
    def sums(self) -> int:
        """The sums over the parts: in each layer forward and backward, and one where forward runs
        again up to the input of its last product."""
        if self.count == 1:
            return 0
        of_layer = 2 * self.sums_of_layer
        return of_layer * self.placed.config.model.num_layers + self.placed.recomputed

    @property
    def sum_bytes(self) -> int:
        """What a rank sends in one of them, a ring."""
        return 2 * _of_others(self.placed.hidden_bytes, self.count)

    @property
    def sum_s(self) -> float:
        return self._sent_s(self.sum_bytes)

    @property
    def sent_bytes(self) -> int:
        """What a rank sends: sums, and its part of each input that recompute starts from, where it
        keeps one."""
        sent = self.sums * self.sum_bytes
        if self.placed.spec.input_parts > 1:
            sent += self.placed.recomputed * _of_others(self.placed.hidden_bytes, self.count)
        return sent

    def added(self, alone: Seconds, block: BlockSpec) -> Seconds:
        """Return the seconds of a block on a rank, with those of the sums over the parts."""
        summed_s = self.sums_of_layer * self.sum_s if block.repeated else 0.0
        again_s = self.sum_s if block.recomputed else 0.0
        return alone + Seconds(summed_s, summed_s + again_s)

    def gather_s(self, nbytes: int) -> float:
        """Return the seconds in which the parts of a tensor of so many bytes are gathered."""
        return self._sent_s(_of_others(nbytes, self.count))

    def _sent_s(self, sent: int) -> float:
        """Return the time of what a rank sends; other ranks use the links of hosts at the same
        time, where a host has fewer GPUs than there are parts."""
        return links_s(self.machine, sent, sent if self.count > self.machine.gpus else 0)


@dataclass(frozen=True, slots=True)
class AmongExperts:
    """Expert parallel: the all-to-alls of one rank in a microbatch, whose tokens choose all experts
    alike often. How many rows each expert gets, which the ranks tell each other before, is not
    counted."""

    placed: Placement
    machine: Machine

    @property
    def count(self) -> int:
        return self.placed.config.ranks.expert

    @property
    def row_bytes(self) -> int:
        """The tokens of a layer, once for each expert that they chose."""
        return self.placed.input_bytes * self.placed.config.model.experts_per_token

    @property
    def exchanges(self) -> int:
        """The all-to-alls of rows: in each layer to their experts and back, forward and backward,
        and again where forward runs again."""
        if self.count == 1:
            return 0
        return 4 * self.placed.config.model.num_layers + 2 * self.placed.recomputed

    @property
    def sent_bytes(self) -> int:
        """What a rank sends in them."""
        return self.exchanges * _of_others(self.row_bytes, self.count)

    @property
    def exchange_s(self) -> float:
        """The time of one all-to-all: inside a host, and over its link what leaves it, which all
        its ranks send at once."""
        gpus = self.machine.gpus
        on_host = max(min(self.count, gpus // self._apart), 1)  # of one group on one host
        leaving = gpus * self.row_bytes * (self.count - on_host) / self.count
        sent = _of_others(self.row_bytes, self.count)
        return links_s(self.machine, sent, leaving if self.hosts > 1 else 0)

    @property
    def hosts(self) -> int:
        """The most hosts that ranks with all experts are on."""
        groups = self.placed.spec.ranks // self.count * self.placed.config.ranks.pipeline
        return most_hosts(self.count * self._apart, groups, self.machine.gpus)

    @property
    def _apart(self) -> int:
        """From one rank of a group to the next: the parts of matrices lie between."""
        return self.placed.config.ranks.tensor


@dataclass(frozen=True)
class AmongCopies:
    """Hybrid sharding: the all-reduces of one rank's shards of a microbatch's gradients with those
    that hold the same shard in other copies of the state.

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
        copies, hosts = self.spec.copies, self.hosts
        shards = min(self.spec.ranks * self.parts, self.machine.gpus)
        across = 2 * nbytes * shards * (hosts - 1) / hosts
        return links_s(self.machine, 2 * nbytes * (copies - 1) / copies, across)


def links_s(machine: Machine, sent: float, leaving: float) -> float:
    """Return the seconds of an exchange: over the links inside a host and, at the same time, over
    the link that leaves it.

    Args:
        sent: bytes of one rank.
        leaving: bytes of all ranks of a host to other hosts.
    """
    inside_s = sent / (1e9 * machine.gpu_link_gbps) if sent else 0.0
    return max(inside_s, leaving / (1e9 * machine.node_link_gbps)) if leaving else inside_s


def _of_others(nbytes: int, count: int) -> int:
    """Return what of so many bytes the other ranks of `count` hold."""
    return nbytes * (count - 1) // count


def most_hosts(width: int, groups: int, gpus: int) -> int:
    """Return the most hosts that one of so many groups of neighbouring ranks is on.

    Args:
        width: ranks of a group.
        gpus: ranks of a host.
    """
    firsts = (number * width for number in range(groups))
    return max(ceil((first + width) / gpus) - first // gpus for first in firsts)
