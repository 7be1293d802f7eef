"""The count of steps with their loss scale, and the report of each."""

from __future__ import annotations

from offloadtrain.config.offload import OffloadConfig
from offloadtrain.engine.norm import Norm
from offloadtrain.engine.step_report import StepReport
from offloadtrain.optim import LossScaler
from offloadtrain.runtime.lanes import Lanes
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.step.program.modes import Decision, Speculation


class StepCounter:
    """Counts steps, and tells the loss scale of overflows.

    Attributes:
        scaler: None unless precision is fp16.
        steps: optimizer steps done.
        tries: steps decided, skipped ones included.
        skipped_in_a_row: skipped steps since the last one that was not.
    """

    def __init__(self, config: OffloadConfig) -> None:
        scales = config.precision == "fp16"
        self.scaler = LossScaler(hysteresis=config.loss_scale_hysteresis) if scales else None
        self.steps = self.tries = self.skipped_in_a_row = 0
        self._warmup_steps = config.warmup_steps if config.update == "delayed" else None
        self._decision: tuple[bool | None, bool] | None = None
        """Of the last decided step, until the loss scale is updated: whether it overflowed, and
        whether the scale follows late."""
        self._undecided: float | None = None

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def undecided_scale(self) -> float:
        """The loss scale of the step that is decided next: without a flush, the next step's
        microbatches may run by then, and `loss_scale` is theirs."""
        return self.loss_scale if self._undecided is None else self._undecided

    def begin_beside(self) -> None:
        """The next step's first microbatch is about to run, and the last step is not decided.

        Raises:
            LossScaleError: see `LossScaler.update`.
        """
        self._undecided = self.loss_scale
        if self.scaler is not None:
            self.scaler.catch_up()

    def decide(self, *, skipped: bool, overflow: bool) -> None:
        """Count a step that the lanes, or `salvage`, will do."""
        late = self._warmup_steps is not None and self.steps + 1 > self._warmup_steps
        self.tries += 1
        self.steps += not skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        # A step that was skipped without an overflow says nothing about the loss scale.
        self._decision = (overflow if overflow or not skipped else None), late

    def update_scale(self) -> None:
        """Tell the loss scale of the step that was decided last; once.

        Raises:
            LossScaleError: see `LossScaler.update`; with the next step under way `begin_beside` of
                the one behind it, when nothing is sent yet that other stages would wait for.
        """
        is_beside = self._undecided is not None
        scale, self._undecided = self.undecided_scale, None
        decision, self._decision = self._decision, None
        if self.scaler is not None and decision is not None:
            self.scaler.ended(decision[0], scale, late=decision[1])
            if not is_beside:
                self.scaler.check()


class Reporter:
    """Reports steps, with what the lanes did since the step before."""

    def __init__(self, lanes: Lanes, ranks: Ranks) -> None:
        self._lanes, self._ranks = lanes, ranks
        self._totals = lanes.read_totals()
        self._sampling = False

    def sample_timeline(self) -> None:
        """Record the intervals of all lanes until the next report."""
        self._sampling = True
        self._lanes.start_timeline()

    def report(
        self,
        counter: StepCounter,
        norm: Norm,
        decision: Decision,
        micro_steps: int,
        speculation: Speculation,
    ) -> StepReport:
        """Report the step that `counter` counted last, before its loss scale changes."""
        sampled, self._sampling = self._sampling, False
        timeline = self._lanes.end_timeline() if sampled else None
        totals = self._lanes.read_totals()
        spent, self._totals = totals.minus(self._totals), totals
        return StepReport(
            step=counter.steps,
            skipped=decision.skipped,
            grad_norm=norm.value,
            skipped_in_a_row=counter.skipped_in_a_row,
            nonfinite=tuple(norm.nonfinite),
            nonfinite_ranks=() if self._ranks.is_single else tuple(norm.nonfinite.values()),
            clip_coef=decision.coef,
            loss_scale=counter.undecided_scale,
            micro_steps=micro_steps,
            early_buckets=speculation.buckets,
            speculation_hit=speculation.right,
            exposed_ms=spent.exposed_ms,
            busy_ms={lane.value: busy for lane, busy in spent.busy_ms.items()},
            d2h_bytes=spent.d2h_bytes,
            h2d_bytes=spent.h2d_bytes,
            comm_bytes=spent.comm_bytes,
            disk_read_bytes=spent.disk_read_bytes,
            disk_written_bytes=spent.disk_written_bytes,
            sampled=timeline,
        )
