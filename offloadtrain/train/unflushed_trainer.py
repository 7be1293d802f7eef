"""The training loop of a pipeline without flushes, whose steps overlap.

[Note: Overlapping steps]
A step's microbatches begin before the step before is decided (`parallel.pipeline.split_step`). An
iteration of this loop therefore runs the microbatches of step t, then counts and logs step t - 1,
whose losses and decision are known by now, and only then asks for the update of step t: with the
learning rate after t - 1, also where that was skipped. Ranks exchange their figures of step t
without waiting for each other, and take them in an iteration later: to wait at once would be a
flush.

Where something must be done between two steps, as one process does it - an evaluation, a
checkpoint, a stop, the end - the iteration ends step t, too, and keeps the delay: the run is where
`offload.update = "delayed"` of one process is after step t, to the bit. That costs one flush.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from offloadtrain.config.job import Config
from offloadtrain.optim import LossScaleError
from offloadtrain.parallel.pipeline.steps import Pipeline
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.losses import loss_divisor, of_step, to_device
from offloadtrain.train.progress import StepClock, StepStats
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.signals import StopRequests
from offloadtrain.train.trainer import MAX_SKIPS, Trainer

_NOTHING = StepStats(loss=math.nan, own_ms=(), asks=False, saves=False, written=False)
"""Before the first step is decided."""


def trainer_of(config: Config, context: TrainingContext, run: RunFolder, log: RunLog) -> Trainer:
    """Return the training loop of a job; the arguments are those of `Trainer`."""
    kind = Trainer if config.ranks.flushes else UnflushedTrainer
    return kind(config, context, run, log)


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose microbatches were run and whose update was asked for.

    Attributes:
        divides: its loss is the mean of its microbatches'.
        receive: waits for the figures of all ranks.
    """

    clock: StepClock
    lr: float
    divides: bool
    receive: Callable[[], Tensor]


class UnflushedTrainer(Trainer):
    """See [Note: Overlapping steps]."""

    _pending: _PendingStep | None = None
    """The step whose update has not been decided yet, or None."""

    @property
    def _pipeline(self) -> Pipeline:
        assert self._pipelined is not None
        return self._pipelined.pipeline

    def _step(self, stop: StopRequests) -> tuple[bool, StepStats]:
        """Run the microbatches of a step, and end the step before; return whether a step has ended
        with nothing in flight and was not skipped, and what ranks exchanged."""
        clock, stats = StepClock(), _NOTHING
        if self._pending is None:
            self._log.before_step(self.optimizer)
        try:
            losses, divides = self._run(clock)
        except LossScaleError as error:
            # On every stage, before a microbatch of this step is sent: the one in flight can end.
            assert self._pending is not None
            named = self._named_nonfinite
            self._end(self._pending)
            self.saving.save(self.progress)
            raise LossScaleError(f"{error}. {named}") from error
        if self._pending is not None:
            stats = self._ended(self._pending, losses)
            self._log.before_step(self.optimizer)
        lr = self._set_learning_rate()
        self._pipeline.step()
        clock.lap("optimizer")
        row = self._row(math.nan, clock, self.optimizer.last_step, stop)
        # No rank waits for another one here: the rows are taken in when the step has ended.
        self._pending = pending = _PendingStep(clock, lr, divides, self._ranks.send_host(row))
        if not self._flush_is_due(stats):
            return False, stats
        stats = self._end(pending)
        assert self.optimizer.last_step is not None
        return not self.optimizer.last_step.skipped, stats

    def _end(self, pending: _PendingStep) -> StepStats:
        """End the step in flight, and keep the delay."""
        HEARTBEAT.enter(f"end of step {self.progress.step + 1}")
        left = self._pipeline.drain(newest=False)
        pending.clock.lap("backward")
        assert left is not None
        self._pending = None
        return self._ended(pending, left)

    def _run(self, clock: StepClock) -> tuple[Tensor, bool]:
        """Run the microbatches of a step; return the losses of the step before, and whether this
        one's loss is the mean of its own."""
        assert self._pipelined is not None
        number = self.progress.step + (1 if self._pending is None else 2)
        HEARTBEAT.enter(f"forward and backward of step {number}")
        count, device = self._local.train.grad_accum_steps, self.optimizer.device
        divisor = loss_divisor(self.batches, count, self._replicas.size)
        batches = [to_device(self._prefetch.next(), device) for _ in range(count)]
        clock.lap("data")
        losses = self._pipelined.run(batches, divisor)
        clock.lap("backward")
        return losses, divisor is None

    def _ended(self, pending: _PendingStep, losses: Tensor) -> StepStats:
        """Count and log a step that was decided; `losses`: of its microbatches."""
        own_loss = of_step(losses, divides=pending.divides).item()
        # Waits for the replicas of this stage, which have just decided the step together, and not
        # for other stages.
        of_replicas = self._replicas.all_gather_host([own_loss])[:, 0].tolist()
        # Every stage has sent its row before what this one has received since.
        stats = self._stats_of(pending.receive())
        stats = replace(stats, loss=sum(of_replicas) / len(of_replicas))
        assert self.optimizer.last_step is not None
        self._count(self.optimizer.last_step, pending.clock, stats, pending.lr)
        return stats

    def _flush_is_due(self, stats: StepStats) -> bool:
        """Return True if something must be done after the step in flight; the same on all ranks."""
        config, step = self.config.train, self.progress.step + 1
        every = [number for number in (config.eval_every, config.checkpoint_every) if number]
        return (
            step >= config.steps
            or any(step % number == 0 for number in every)
            or stats.asks
            or stats.saves
            or self._all_stop
            # If it is skipped, the run ends after it, with a checkpoint.
            or self.progress.skipped_in_a_row == MAX_SKIPS - 1
        )
