"""The figures of one predicted step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offloadtrain.plan.costs.disk import DiskLoad
from offloadtrain.step.proof.simulate import bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One optimizer step in the long run.

    Attributes:
        busy_s: lane → seconds of work.
        exposed_s: lane → seconds the device waited for it.
        tokens_per_s: of all ranks.
        tflops: of one rank: 6·N + 12·L·d·T per token, recompute not counted.
        hardware_tflops: of one rank, recompute counted.
        mfu: share of the data sheet's FLOPs, recompute not counted; None if unknown.
        d2h_bytes, h2d_bytes, comm_bytes: of one rank; `h2d_bytes` includes loads.
        copies_bytes, copies_s: of one rank, what of `comm_bytes` it sends to the ranks that hold
            the same shard in other copies of the state, and the time of it.
        parts_bytes, parts_s: of one rank, what it sends to the other parts of its matrices, and the
            time of the sums, in which the device computes nothing.
        experts_bytes, experts_s: of one rank, tokens that it sends to experts of other ranks and
            back, and the time of it, in which the device computes nothing.
        dram_bytes: memory traffic of one rank's host work.
        disk: what one rank asks of its drive.
    """

    seconds: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    tokens_per_s: float
    tflops: float
    hardware_tflops: float
    mfu: float | None
    d2h_bytes: int
    h2d_bytes: int
    comm_bytes: int
    copies_bytes: int
    copies_s: float
    parts_bytes: int
    parts_s: float
    experts_bytes: int
    experts_s: float
    dram_bytes: int
    disk: DiskLoad

    @property
    def exposed(self) -> float:
        return sum(self.exposed_s.values())

    @property
    def bound(self) -> tuple[float, str]:
        """The busiest lane, or link that lanes share, and its seconds: no schedule is faster."""
        return bound(self.busy_s)
