"""What the ranks that hold different experts send each other in a microbatch, and its time."""

from __future__ import annotations

from dataclasses import dataclass

from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.among_copies import most_hosts
from offloadtrain.plan.placement import Placement


@dataclass(frozen=True, slots=True)
class AmongExperts:
    """The all-to-alls of one rank, whose tokens choose all experts alike often. How many rows each
    expert gets, which the ranks tell each other before, is not counted."""

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
        layers = self.placed.config.model.num_layers
        again = self.placed.repeated if self.placed.config.offload.recomputes else 0
        return 4 * layers + 2 * again

    @property
    def sent_bytes(self) -> int:
        """What a rank sends in them."""
        return self.exchanges * self._others(self.row_bytes)

    @property
    def exchange_s(self) -> float:
        """The time of one all-to-all: inside a host, and over its link what leaves it, which all
        its ranks send at once."""
        if self.count == 1:
            return 0.0
        machine = self.machine
        inside = self._others(self.row_bytes) / (machine.gpu_link_gbps * 1e9)
        if self.hosts == 1:
            return inside
        beside = min(self.count, machine.gpus)  # of one group on one host
        leaving = machine.gpus * self.row_bytes * (self.count - beside) / self.count
        return max(inside, leaving / (machine.node_link_gbps * 1e9))

    @property
    def hosts(self) -> int:
        """The most hosts that ranks with all experts are on."""
        groups = self.placed.spec.ranks // self.count
        return most_hosts(self.count, groups, self.machine.gpus)

    def _others(self, nbytes: int) -> int:
        return nbytes * (self.count - 1) // self.count
