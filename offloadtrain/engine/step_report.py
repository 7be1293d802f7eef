"""What a step says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from offloadtrain.runtime.lanes import Interval, exposed_by_lane


class Phase(Enum):
    """What the step is doing now."""

    FORWARD = auto()
    """No gradient of the next step has arrived."""
    BACKWARD = auto()
    """A micro-step is open: gradients are arriving."""
    ACCUMULATED = auto()
    """Whole micro-steps wait for step()."""
    CLOSED = auto()
    """The engine has let go of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What the last `step()` did.

    Attributes:
        step: optimizer steps done so far, this one included if it was not skipped.
        skipped: the gradient norm was not finite: no state changed.
        skipped_in_a_row: steps up to this one; 0 where it was not skipped.
        nonfinite: names of the parameters whose gradients made the norm so, in the model's order.
        grad_norm: of the unscaled mean gradient, before clipping.
        clip_coef: what the gradient was multiplied by: `clip_grad_norm_` and `clip_norm` together.
        loss_scale: in force during the step; 1.0 where there is none.
        micro_steps: backward passes that it used.
        early_buckets: buckets that were updated inside backward.
        speculation_hit: of these updates in mode "speculative"; None where there was none.
        exposed_ms: how long compute waited for transfers and the host since the step before; on
            CUDA, what its stream waited.
        busy_ms: by lane (compute, d2h, host, h2d, load, comm), work since the step before; of
            compute, the forwards and backwards of blocks. Of this and of what compute waited, on
            CUDA, what had not ended by now counts in the next step.
        d2h_bytes, h2d_bytes: moved since the step before.
        comm_bytes: sent to other ranks in collectives since the step before.
        timeline: intervals of the lanes, where this step was sampled; on the lane "wait", those in
            which compute waited, each named as the lane that it waited for.
    """

    step: int
    skipped: bool
    grad_norm: float
    clip_coef: float
    loss_scale: float
    micro_steps: int
    early_buckets: int
    speculation_hit: bool | None
    exposed_ms: float
    busy_ms: Mapping[str, float]
    d2h_bytes: int
    h2d_bytes: int
    comm_bytes: int
    skipped_in_a_row: int = 0
    nonfinite: tuple[str, ...] = ()
    timeline: tuple[Interval, ...] = field(default=(), repr=False)

    @property
    def exposed_by_lane(self) -> dict[str, float]:
        """Lane → milliseconds that compute waited while this one was at work on what it waited
        for, where this step was sampled; `exposed_ms` in all, but for the wait at its end."""
        return exposed_by_lane(self.timeline)
