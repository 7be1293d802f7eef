"""The count of steps with their loss scale, and the report of each step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.norm import Norm
from offloadtrain.events.waits import exposed_by_lane
from offloadtrain.optim import LossScaler
from offloadtrain.runtime.lanes import Interval, Lanes, Timeline
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.step.layout.state_tiers import device_share
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.updates import Decision, Speculation

_log = logging.getLogger(__name__)

ALARM = 3
"""Number of consecutive skipped steps that logs a warning."""
_NAMED = 3


class Phase(Enum):
    """The part of a step in progress."""

    FORWARD = auto()
    """No gradient of the next step has arrived."""
    BACKWARD = auto()
    """A micro-step is open: gradients are arriving."""
    ACCUMULATED = auto()
    """Complete micro-steps wait for step()."""
    CLOSED = auto()
    """The engine is closed and detached from the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """Activity of the lanes between two steps.

    Attributes:
        exposed_ms: time that compute waited for transfers and the host since the previous step; on
            CUDA, time that its stream waited.
        busy_ms: lane (compute, d2h, host, h2d, load, comm) → time of work since the previous step;
            for compute, time of the forwards and backwards of blocks. On CUDA, work and waits that
            have not ended by now count in the next step, and work of streams is measured in sampled
            steps: in others it counts with its usual duration ([Note: Timing events] in
            `runtime/lanes/stream_times.py`).
        d2h_bytes, h2d_bytes: bytes moved since the previous step.
        comm_bytes: bytes sent to other ranks in the engine's collectives since the previous step,
            without those inside of the model's forward and backward.
        disk_read_bytes, disk_written_bytes: bytes of optimizer state on the disk, since the
            previous step; a checkpoint reads it once.
        sampled: its timeline, if it was sampled.
    """

    exposed_ms: float
    busy_ms: Mapping[str, float]
    d2h_bytes: int
    h2d_bytes: int
    comm_bytes: int
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    sampled: Timeline | None = field(default=None, repr=False)

    @property
    def timeline(self) -> tuple[Interval, ...]:
        """The intervals of the lanes, if this step was sampled: work that ran when the step began,
        such as the update of the previous step, and work launched until `step()` returned. The lane
        "wait" has the waits of compute, each with the name of the awaited lane.

        Reading it waits until this step's update is complete. A training loop can avoid that
        wait by reading it after the next step.
        """
        return self.sampled.intervals if self.sampled else ()

    @property
    def exposed_by_lane(self) -> dict[str, float]:
        """Lane → milliseconds that compute waited for work of this lane, if this step was sampled.
        The sum is `exposed_ms`."""
        return exposed_by_lane(self.timeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(LaneReport):
    """The report of one `step()`, and of the lanes since the previous step.

    Attributes:
        step: number of optimizer steps done, including this one unless it was skipped.
        skipped: no state changed: the gradient norm was not finite, or `step(skip=True)`.
        skipped_in_a_row: consecutive skipped steps up to this one; 0 if it was not skipped.
        nonfinite: names of the parameters with non-finite gradients, in the model's order.
        nonfinite_ranks: for each of them, the ranks in whose shards the gradient is not finite;
            empty on a single rank.
        grad_norm: norm of the unscaled mean gradient, before clipping.
        clip_coef: factor on the gradient, of `clip_grad_norm_` and `clip_norm` together.
        loss_scale: loss scale during the step; 1.0 without loss scaling.
        micro_steps: number of backward passes of the step.
        early_buckets: number of buckets updated inside backward.
        speculation_hit: whether these updates, in mode "speculative", were right; None if there
            were none.
        state_on_device: share of the optimizer state that was on the device.
    """

    step: int
    skipped: bool
    grad_norm: float
    clip_coef: float
    loss_scale: float
    micro_steps: int
    early_buckets: int
    speculation_hit: bool | None
    state_on_device: float = 0.0
    skipped_in_a_row: int = 0
    nonfinite: tuple[str, ...] = ()
    nonfinite_ranks: tuple[tuple[int, ...], ...] = ()

    @property
    def named_nonfinite(self) -> str:
        """The first parameters with non-finite gradients, and the ranks that own them, for
        messages."""
        owners = self.nonfinite_ranks or ((),) * len(self.nonfinite)
        named = []
        for name, ranks in zip(self.nonfinite[:_NAMED], owners, strict=False):
            numbers, s = ", ".join(map(str, ranks)), "s" if len(ranks) > 1 else ""
            named.append(f"'{name}'" + (f" (in the shard{s} of rank {numbers})" if ranks else ""))
        more = len(self.nonfinite) - _NAMED
        return ", ".join(named) + (f" and {more} more" if more > 0 else "")


class StepCounter:
    """Counts steps, and reports overflows to the loss scaler.

    Attributes:
        scaler: None unless precision is fp16.
        steps: number of optimizer steps done.
        tries: number of steps decided, including skipped ones.
        skipped_in_a_row: number of consecutive skipped steps.
        shown: number of missed steps → `state[p]["step"]` of the parameters that have missed as
            many: 0-dim fp32 tensors, which follow `steps`.
    """

    def __init__(self, config: OffloadConfig, num_batches: int) -> None:
        """`num_batches`: number of ranks with different batches in a step."""
        self._num_batches = num_batches
        scales = config.precision == "fp16"
        self.scaler = LossScaler(hysteresis=config.loss_scale_hysteresis) if scales else None
        self.steps = self.tries = self.skipped_in_a_row = 0
        self.shown: dict[int, Tensor] = {}
        self._warmup_steps = config.warmup_steps if config.update == "delayed" else None
        self._decision: tuple[bool | None, bool] | None = None
        """For the last decided step, until the loss scale is updated: whether it overflowed, and
        whether the scale follows late."""
        self._undecided: float | None = None

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def undecided_scale(self) -> float:
        """The loss scale of the step that is decided next: in a pipeline without a flush,
        microbatches of the step after it may run by then, with `loss_scale`."""
        return self.loss_scale if self._undecided is None else self._undecided

    @property
    def divisor(self) -> float:
        """Divisor of the gradients of the step that is decided next: they arrive as the
        sum over ranks, times the loss scale."""
        return self.undecided_scale * self._num_batches

    def begin_next_step(self) -> None:
        """The next step's first microbatch is about to run before the last step is decided.

        Raises:
            LossScaleError: see `LossScaler.update`.
        """
        self._undecided = self.loss_scale
        if self.scaler is not None:
            self.scaler.catch_up()

    def count_from(self, steps: int) -> None:
        """Set the number of steps done."""
        self.steps = steps
        for missed, tensor in self.shown.items():
            tensor.fill_(steps - missed)

    def decide(self, *, skipped: bool, overflow: bool) -> None:
        """Count a step that the lanes, or `salvage`, will complete."""
        late = self._warmup_steps is not None and self.steps + 1 > self._warmup_steps
        self.tries += 1
        self.count_from(self.steps + (not skipped))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        # A step that was skipped without an overflow says nothing about the loss scale.
        self._decision = (overflow if overflow or not skipped else None), late

    def update_scale(self) -> None:
        """Update the loss scale after the last decided step; once per step.

        Raises:
            LossScaleError: see `LossScaler.update`. If the next step has begun, `begin_next_step`
                raises it instead, before anything is sent that other stages would wait for.
        """
        next_has_begun = self._undecided is not None
        scale, self._undecided = self.undecided_scale, None
        decision, self._decision = self._decision, None
        if self.scaler is not None and decision is not None:
            self.scaler.ended(decision[0], scale, late=decision[1])
            if not next_has_begun:
                self.scaler.check()


class Reporter:
    """Counts steps and reports them, with the activity of the lanes since the previous step.

    Attributes:
        last_step: the report of the last step; None before the first.
        state_on_device: share of the optimizer state that is on the device.
        layouts: number of layouts so far.
        warns_of_skips: log a warning of consecutive skips.
    """

    def __init__(self, lanes: Lanes, ranks: Ranks, spec: StepSpec) -> None:
        self.counter = StepCounter(spec.config, ranks.everyone.size)
        self.last_step: StepReport | None = None
        self.warns_of_skips = True
        self.layouts = 0
        self._lanes = lanes
        self._is_single, self._logs = ranks.is_single, ranks.rank == 0
        self._totals = lanes.read_totals()
        self._sampling = self._has_warned = False
        self.begin_layout(spec)

    def begin_layout(self, spec: StepSpec) -> Reporter:
        """The next steps use this layout."""
        self.state_on_device = device_share(spec)
        self.layouts += 1
        return self

    def sample_timeline(self) -> None:
        """Record the intervals of all lanes until the next report."""
        self._sampling = True
        self._lanes.start_timeline()

    def report(
        self, norm: Norm, decision: Decision, micro_steps: int, speculation: Speculation
    ) -> StepReport:
        """Report the step that was counted last, before its loss scale changes."""
        sampled, self._sampling = self._sampling, False
        timeline = self._lanes.end_timeline() if sampled else None
        totals = self._lanes.read_totals()
        spent, self._totals = totals.minus(self._totals), totals
        if speculation.mostly_wrong and not self._has_warned and self._logs:
            self._has_warned = True
            _log.warning(
                "update = 'speculative': most of the last steps were clipped or skipped, so that "
                "updates wait for the norm, as with 'exact', for as long as that is so. The second "
                "copy of the state has no use then: update = 'exact' does without"
            )
        self.last_step = StepReport(
            step=self.counter.steps,
            skipped=decision.skipped,
            grad_norm=norm.value,
            skipped_in_a_row=self.counter.skipped_in_a_row,
            nonfinite=tuple(norm.nonfinite),
            nonfinite_ranks=() if self._is_single else tuple(norm.nonfinite.values()),
            clip_coef=decision.coef,
            loss_scale=self.counter.undecided_scale,
            micro_steps=micro_steps,
            early_buckets=speculation.buckets,
            speculation_hit=speculation.right,
            state_on_device=self.state_on_device,
            exposed_ms=spent.exposed_ms,
            busy_ms={lane.value: busy for lane, busy in spent.busy_ms.items()},
            d2h_bytes=spent.d2h_bytes,
            h2d_bytes=spent.h2d_bytes,
            comm_bytes=spent.comm_bytes,
            disk_read_bytes=spent.disk_read_bytes,
            disk_written_bytes=spent.disk_written_bytes,
            sampled=timeline,
        )
        return self.last_step

    def end_step(self, report: StepReport) -> None:
        """Update the loss scale after the step; warn at the third consecutive skip, with the first
        parameters that caused it.

        Raises:
            LossScaleError: see `LossScaler.update`.
        """
        warns = self.warns_of_skips and self._logs
        if warns and report.skipped_in_a_row == ALARM:
            _log.warning(
                "%d steps in a row were skipped: the gradient norm is %s, so that nothing is "
                "trained. Not finite are the gradients of %s. %s last_step.skipped tells of every "
                "step.",
                report.skipped_in_a_row,
                report.grad_norm,
                report.named_nonfinite,
                "Are the loss and the inputs finite? A lower learning rate or a longer warm-up may "
                "help."
                if report.loss_scale == 1.0
                else f"The loss scale was {report.loss_scale:g} and is halved by such skips, which "
                "is ordinary in the first steps of fp16 and at no other time.",
            )
        self.counter.update_scale()
