"""What the ranks of tensor parallel send each other in a microbatch, and the time of it."""

from __future__ import annotations

from dataclasses import dataclass

from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.placement import Placement


@dataclass(frozen=True, slots=True)
class AmongParts:
    """The exchanges of one rank with those that hold the other parts of its matrices."""

    placed: Placement
    machine: Machine

    @property
    def count(self) -> int:
        return self.placed.config.ranks.tensor

    @property
    def sums(self) -> int:
        """The sums over the parts: two forward and two backward in each layer, and one where
        forward runs again up to the input of its last product."""
        if self.count == 1:
            return 0
        keeps = self.placed.config.offload.activation == "keep"
        layers = self.placed.config.model.num_layers
        return 4 * layers + (0 if keeps else self.placed.repeated)

    @property
    def sum_bytes(self) -> int:
        """What a rank sends in one of them, a ring."""
        return 2 * self._others(self.placed.input_bytes)

    @property
    def sum_s(self) -> float:
        return self._seconds(self.sum_bytes)

    @property
    def sent_bytes(self) -> int:
        """What a rank sends: sums, and its part of each input that recompute starts from, where it
        keeps one."""
        sent = self.sums * self.sum_bytes
        if self.placed.spec.input_parts > 1:
            sent += self.placed.repeated * self._others(self.placed.input_bytes)
        return sent

    def gather_s(self, nbytes: int) -> float:
        """Return the seconds in which the parts of a tensor of so many bytes are gathered."""
        return self._seconds(self._others(nbytes))

    def _others(self, nbytes: int) -> int:
        return nbytes * (self.count - 1) // self.count

    def _seconds(self, sent: int) -> float:
        """Return the time of what a rank sends: inside a host, or over the links of hosts, which
        other ranks use at the same time, where it has fewer GPUs than there are parts."""
        if not sent:
            return 0.0
        inside = sent / (self.machine.gpu_link_gbps * 1e9)
        if self.count <= self.machine.gpus:
            return inside
        return max(inside, sent / (self.machine.node_link_gbps * 1e9))
