"""The training loop, in order.

    build     seeds, device, data, model, and the optimizer through `offload` (build.py)
    resume    the newest valid checkpoint of the run; every later loss is the same, bit for bit, as
              if the run had never stopped
    step      learning rate; data, forward and backward of each microbatch; update; one record
    exchange  ranks exchange losses, times and stop requests
    between   evaluation, checkpoint, stop requests
    end       last evaluation, last checkpoint, a text sample

A step whose gradients are not finite is skipped by the engine: no state changes. Its batch is
consumed, the step is counted and shown, and the learning rate does not change, because the schedule
counts completed optimizer steps. After MAX_SKIPS in a row the run ends with a checkpoint.

In a pipeline without flushes steps overlap: `UnflushedTrainer`.

[Note: Overlapping steps]
A step's microbatches begin before the previous step is decided (`parallel.pipeline.steps`). An
iteration of this loop therefore runs the microbatches of step t, then counts and logs step t - 1,
whose losses and decision are known by now, and only then requests the update of step t: with the
learning rate after t - 1, also if that step was skipped. Ranks exchange their figures of step t
without waiting for each other, and read them one iteration later: waiting at once would be a
flush.

If something must be done between two steps as a single process does it - an evaluation, a
checkpoint, a stop, the end - the iteration also ends step t, but keeps the delay: the state then
equals, bit for bit, that of `offload.update = "delayed"` in one process after step t. This costs
one flush.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.job import Config
from offloadtrain.data.batches import Batches, Prefetch
from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.engine import OffloadOptimizer, StepReport
from offloadtrain.events.control import Request, Requests
from offloadtrain.model.language_model import Sampling
from offloadtrain.optim import LossScaleError
from offloadtrain.optim.lr_schedule import learning_rate
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.thread_pools import shared_pool
from offloadtrain.train.build import TrainingContext, masking_of
from offloadtrain.train.checkpoint.checkpoint import Checkpoint, OnDamaged
from offloadtrain.train.emergency import Emergency
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.losses import (
    LateLoss,
    loss_divisor,
    loss_of,
    of_step,
    pinned,
    to_device,
)
from offloadtrain.train.progress import Progress, StepClock, StepStats
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.saving import ADVICE, Saving, TrainingError
from offloadtrain.train.signals import StopRequests

if TYPE_CHECKING:
    from offloadtrain.parallel.pipeline.steps import Pipeline

MAX_SKIPS = 20
SAMPLE_TEMPERATURE = 0.8
_SAMPLE_SEED = 0


class AbortedError(OffloadTrainError):
    """An abort was requested."""


class Trainer:
    """One run, from its first or latest step to its last, or until a stop is requested."""

    _prefetch: Prefetch
    """Prefetches batches; exists only inside `train`."""

    def __init__(
        self, config: Config, context: TrainingContext, run: RunFolder, log: RunLog
    ) -> None:
        """`run` must have begun before `train` is called."""
        self.config, self._context, self._log = config, context, log
        self.model, self.optimizer = context.model.module, context.optimizer
        self.optimizer.warns_of_skips = False  # the run log reports each one
        # Groups may have different peak rates (Muon's matrices and the rest), on one schedule.
        self._lr_ratios = [group["lr"] / config.optim.lr for group in self.optimizer.param_groups]
        self.progress = Progress()
        self.saving = Saving(config, context, run, log)
        self._requests: Requests | None = None
        self._polled: list[Request] = []
        """Requests that were not answered yet."""
        self._loss = LateLoss(self.optimizer.device)
        self._all_stop = False
        self._steps_s = 0.0
        """Step time of the slowest rank since this start, in seconds; equal on all ranks."""
        self._emergency = Emergency(config, context, self.saving, log)

    def resume(self, source: Checkpoint, on_damaged: OnDamaged) -> bool:
        """Continue from a checkpoint, or an earlier one if it is damaged; False if none is valid.
        Raises what `Saving.resume_newest` raises."""
        progress = self.saving.resume_newest(on_damaged, before=source.step + 1)
        self.progress = progress or self.progress
        return progress is not None

    # ---- the loop

    def train(self, requests: Requests | None, stop: StopRequests) -> Literal["done", "stopped"]:
        """Train from `progress.step` to the job's last step, or until a stop; a stopped run can be
        resumed.

        Args:
            requests: requests from outside, answered by rank 0; None on other ranks.
            stop: stop and checkpoint requests by signal.

        Raises:
            TrainingError, LossScaleError: gradients stayed non-finite, and a checkpoint was saved;
                or the loss or a weight is not finite, and none was saved.
            CheckpointError: the last checkpoint could not be saved.
            DeviceLostError: the device has failed; the last step was saved.
            DeviceFailedError: the device has failed; the last step was not saved.
            DeviceMemoryError: the device ran out of memory; says whether the last step was saved.
        """
        config, self._requests = self.config.train, requests
        # On a GPU a busy CPU is no progress: a thread that waits for the device may spin.
        HEARTBEAT.cpu_counts = self.optimizer.device.type == "cpu"
        self._emergency.step_ended()
        ready = partial(pinned, device=self.optimizer.device)
        prefetch = closing(Prefetch(self._context.batches, ready, shared_pool("batches")))
        with self._emergency.guarded(self.progress), prefetch as self._prefetch:
            if self.progress.step == 0:
                self._evaluate()
            while not self._is_over and not self._stops(stop):
                done, stats = self._step(stop)
                if stats.written:
                    self.saving.finish(self.progress)
                if done:
                    self._between_steps()
                self._answer(stop, stats)
            finished, step = self._is_over, self.progress.step
            if finished and step < config.steps:
                problem = f"train.max_s = {config.max_s:g} is over: the run ends at step {step} of "
                self._log.warn("time-limit", f"{problem}{config.steps}; a resume goes on", step)
            if finished:
                self._evaluate()
            self.saving.save(self.progress)
            if finished and config.sample_tokens:
                self._sample()
        return "done" if finished else "stopped"

    @property
    def _is_over(self) -> bool:
        """True if the last step is done, or the time limit of this start is reached."""
        config = self.config.train
        late = config.max_s > 0 and self._steps_s >= config.max_s
        return late or self.progress.step >= config.steps

    def _step(self, stop: StopRequests) -> tuple[bool, StepStats]:
        """Try one optimizer step; return (True if it was not skipped, the ranks' statistics)."""
        clock = StepClock()
        lr = self._set_learning_rate()
        self._log.before_step(self.optimizer)
        self._accumulate(clock)
        spike = self.saving.spikes.problem_of(self._loss, self.progress.step + 1)
        HEARTBEAT.enter(f"update of step {self.progress.step + 1}")
        try:
            self.optimizer.step(skip=bool(spike))
        except LossScaleError as error:
            named = self._named_nonfinite
            self.saving.save(self.progress)  # the previous step: an overflow changes nothing
            raise LossScaleError(f"{error}. {named}") from error
        clock.lap("optimizer")
        report = self.optimizer.last_step
        assert report is not None
        row = self._row(self._loss.wait(), clock, report, stop)
        stats = self._stats_of(self._context.ranks.all_gather_host(row))
        self._count(report, clock, stats, lr, spike)
        step_ms = None if report.skipped else max(stats.own_ms)
        self._log.decided(self.saving.update_choice.after_step(step_ms), self.progress.step)
        if spike and self.config.train.on_spike == "rollback":
            self.saving.roll_back(spike, self.progress)
            self._emergency.step_ended()
        return not report.skipped, stats

    @property
    def _named_nonfinite(self) -> str:
        """A sentence that names the non-finite gradients of the last decided step."""
        last = self.optimizer.last_step
        return f"Not finite: the gradients of {last.named_nonfinite if last else 'no parameter'}"

    def _count(
        self, report: StepReport, clock: StepClock, stats: StepStats, lr: float, spike: str = ""
    ) -> None:
        """Count and log a decided step, and report its problems."""
        number = self.progress.step + 1
        self.progress.count(
            tokens=self.config.batch_tokens, skipped=report.skipped, seconds=clock.total_ms / 1e3
        )
        self._emergency.step_ended()
        self._log.step(number, self.progress, report, clock, stats, lr=lr)
        self._check_step(number, report, stats.loss, spike)

    def _row(
        self, loss: float, clock: StepClock, report: StepReport | None, stop: StopRequests
    ) -> list[float]:
        """Return this rank's figures of a step, and its stop and save requests, for all ranks.
        `report` is of the last decided step."""
        comm_ms = 0.0 if report is None else report.busy_ms["comm"]
        if self._requests is not None:
            self._polled += self._requests.poll()
        stops = not self._context.ranks.is_single and stop.requested is not None
        asks = bool(self._polled)
        row = [loss, clock.total_ms, comm_ms, stops, asks, stop.wants_checkpoint]
        return [*row, self.saving.written]

    def _stats_of(self, of_ranks: Tensor) -> StepStats:
        """Return the statistics of a step from all ranks' rows; record stop requests."""
        parts, replicas = self.config.ranks.tensor, self._context.replicas.size
        stats = StepStats.of(of_ranks, replicas=replicas, parts=parts)
        self._all_stop = stats.stops
        self._steps_s += max(stats.own_ms) / 1e3
        return stats

    def _stops(self, stop: StopRequests) -> bool:
        """Return True if the run ends here; all ranks end after the same step."""
        return bool(stop.requested) if self._context.ranks.is_single else self._all_stop

    def _set_learning_rate(self) -> float:
        optim = self.config.optim
        lr = learning_rate(
            self.progress.step,
            peak=optim.lr,
            schedule=optim.schedule,
            total_steps=self.config.train.steps,
            warmup_steps=optim.warmup_steps,
            min_ratio=optim.min_lr_ratio,
        )
        for group, ratio in zip(self.optimizer.param_groups, self._lr_ratios, strict=True):
            group["lr"] = lr * ratio
        return lr

    def _accumulate(self, clock: StepClock) -> None:
        """Run forward and backward of all microbatches; `_loss` gets the rank's loss."""
        if self._context.pipelined is not None:
            losses, divides = self._run_pipeline(clock, self.progress.step + 1)
            self._loss.launch(of_step(losses, divides=divides))
            return
        count = self._context.local.train.grad_accum_steps
        total = torch.zeros((), device=self.optimizer.device)
        divisor = loss_divisor(self._context.batches, count, self._context.replicas.size)
        optimizer = self.optimizer
        assert isinstance(optimizer, OffloadOptimizer)
        for number in range(count):
            HEARTBEAT.enter(f"forward of step {self.progress.step + 1}")
            batch = to_device(self._prefetch.next(), self.optimizer.device)
            clock.lap("data")
            loss = loss_of(self._context.model, batch, divisor)
            total += loss.detach()
            if number == count - 1:
                self._loss.launch(total / count if divisor is None else total)
            clock.lap("forward")
            HEARTBEAT.enter(f"backward of step {self.progress.step + 1}")
            optimizer.backward(loss, divide=divisor is None)
            clock.lap("backward")

    def _run_pipeline(self, clock: StepClock, number: int) -> tuple[Tensor, bool]:
        """Run this rank's stages in step `number`. Forwards and backwards alternate, so all their
        time counts as "backward".

        Returns:
            (losses of microbatches, True if the step's loss is their mean).
        """
        context = self._context
        assert context.pipelined is not None
        HEARTBEAT.enter(f"forward and backward of step {number}")
        count = context.local.train.grad_accum_steps
        divisor = loss_divisor(context.batches, count, context.replicas.size)
        batches = [to_device(self._prefetch.next(), self.optimizer.device) for _ in range(count)]
        clock.lap("data")
        losses = context.pipelined.run(batches, divisor)
        clock.lap("backward")
        return losses, divisor is None

    def _check_step(self, number: int, report: StepReport, loss: float, spike: str) -> None:
        """Report a skipped step; `spike` is the reason if its loss was finite but too high."""
        if spike:
            self._log.warn("step-skipped", f"step {number} was skipped: {spike}", number)
        elif not math.isfinite(loss):
            self._log.warn("loss-not-finite", f"the loss of step {number} is {loss}", number)
            if not report.skipped:
                raise self.saving.spoilt(f"the loss of step {number} is {loss}", self.progress)
        elif report.skipped and self._context.precision != "fp16":
            count = self.progress.skipped_in_a_row
            times = f", {count} times in a row" if count > 1 else ""
            problem = f"the gradients of {report.named_nonfinite} are not finite"
            self._log.warn("step-skipped", f"step {number} was skipped{times}: {problem}", number)
        if self.progress.skipped_in_a_row >= MAX_SKIPS:
            self.saving.save(self.progress)
            why = spike or (
                f"in step {number} the gradients of {report.named_nonfinite} are not finite (loss "
                f"{loss}, loss scale {report.loss_scale:g})"
            )
            raise TrainingError(
                f"{MAX_SKIPS} steps in a row were skipped: {why}. The state before them is in the "
                f"last checkpoint. {ADVICE[self._context.precision]}."
            )

    # ---- between steps

    def _answer(self, stop: StopRequests, stats: StepStats) -> None:
        """Answer SIGUSR1 and rank 0's requests; the state is consistent between steps.

        Raises:
            AbortedError: an abort was requested.
        """
        if stats.saves:
            stop.wants_checkpoint = False
            self.saving.begin(self.progress)
        if not stats.asks:
            return
        polled, self._polled = self._polled, []
        for entry in self._context.ranks.broadcast_object([asdict(request) for request in polled]):
            request, step = Request(**entry), self.progress.step
            if request.refused:
                self._log.control(request, "refused", step)
                continue
            if request.action in ("checkpoint", "stop"):
                self._log.control(request, "accepted", step)
            if request.action == "checkpoint":
                self.saving.begin(self.progress)
                self.saving.finish(self.progress)
            elif request.action == "stop":
                stop.requested, self._all_stop = "request", True
            self._log.control(request, "done", step)
            if request.action == "abort":
                raise AbortedError(f"aborted on request after step {step}; nothing was saved")

    def _between_steps(self) -> None:
        step, config = self.progress.step, self.config.train
        if config.eval_every and step % config.eval_every == 0 and step < config.steps:
            self._evaluate()
        if config.checkpoint_every and step % config.checkpoint_every == 0 and step < config.steps:
            self.saving.begin(self.progress)

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Compute the mean loss over the first `eval_batches` of the validation tokens, the same
        ones in every evaluation."""
        if self._context.val_tokens is None or not self.config.train.eval_every:
            return
        self._log.doing("validation")
        clock = StepClock()
        batch, seq_len = self._context.local.train.micro_batch, self.config.data.seq_len
        ranks = self._context.replicas
        batches = Batches(
            self._context.val_tokens,
            batch=batch,
            seq_len=seq_len,
            packing=self.config.data.packing,
            rank=ranks.rank,
            world=ranks.size,
            shuffle=False,
            masking=masking_of(self.config, self._context.val_tokens),
        )
        count = self._context.local.train.eval_batches
        count = max(1, min(count, batches.windows // (batch * ranks.size)))
        self.model.eval()
        divisor = loss_divisor(batches, count, ranks.size)
        device, model = self.optimizer.device, self._context.model
        losses = []
        for _ in range(count):
            losses.append(loss_of(model, to_device(batches.next(), device), divisor))
            HEARTBEAT.beat()
        self.model.train()
        of_all = torch.stack(losses).double()
        mean = (of_all.mean() if divisor is None else of_all.sum()).item()  # waits for the device
        self.progress.val_loss = ranks.all_gather_host([mean]).mean().item()
        clock.lap("evaluation")
        self.progress.seconds += clock.total_ms / 1e3
        self._log.evaluated(self.progress, count * batch * seq_len * ranks.size, clock.total_ms)

    def _sample(self) -> None:
        """Log the model's continuation of the prompt."""
        self._log.doing("writing a sample")
        # In mode "delayed", use the newest weights. The run is saved, so its delay may end here.
        self.optimizer.synchronize()
        words = tokenizer(self._context.train_tokens.header.tokenizer)
        prompt = self.config.train.sample_prompt
        (encoded,) = words.encode_batch([prompt])
        tokens = [*words.begin, *encoded.tolist()] or [words.end_of_document]
        generated_BT = self._context.model.generate(
            torch.tensor([tokens], device=self.optimizer.device),
            self.config.train.sample_tokens,
            Sampling(temperature=SAMPLE_TEMPERATURE, seed=_SAMPLE_SEED),
        )
        new = [t for t in generated_BT[0, len(tokens) :].tolist() if t < words.vocab_size]
        self._log.sampled(self.progress.step, prompt, words.decode(new))


_NOTHING = StepStats(loss=math.nan, own_ms=(), asks=False, saves=False, written=False)
"""Statistics before the first step is decided."""


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose microbatches have run and whose update was requested.

    Attributes:
        divides: the step's loss is the mean of its microbatches' losses.
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
        assert self._context.pipelined is not None
        return self._context.pipelined.pipeline

    def _step(self, stop: StopRequests) -> tuple[bool, StepStats]:
        """Run the microbatches of a step, and end the previous step. Return (True if a step ended
        with nothing in flight and was not skipped, the ranks' statistics)."""
        clock, stats = StepClock(), _NOTHING
        if self._pending is None:
            self._log.before_step(self.optimizer)
        try:
            number = self.progress.step + (1 if self._pending is None else 2)
            # The losses are those of the previous step.
            losses, divides = self._run_pipeline(clock, number)
        except LossScaleError as error:
            # Raised on every stage before it sends this step's microbatches: the last step can end.
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
        # No rank waits here: the rows are read when the step has ended.
        receive = self._context.ranks.send_host(row)
        self._pending = pending = _PendingStep(clock, lr, divides, receive)
        if not self._flush_is_due(stats):
            return False, stats
        stats = self._end(pending)
        assert self.optimizer.last_step is not None
        return not self.optimizer.last_step.skipped, stats

    def _end(self, pending: _PendingStep) -> StepStats:
        """End the step in flight, but keep the delay."""
        HEARTBEAT.enter(f"end of step {self.progress.step + 1}")
        left = self._pipeline.drain(newest=False)
        pending.clock.lap("backward")
        assert left is not None
        self._pending = None
        return self._ended(pending, left)

    def _ended(self, pending: _PendingStep, losses: Tensor) -> StepStats:
        """Count and log a decided step; `losses` are those of its microbatches."""
        own_loss = of_step(losses, divides=pending.divides).item()
        # Waits for the replicas of this stage, which have just decided the step together, but not
        # for other stages.
        of_replicas = self._context.replicas.all_gather_host([own_loss])[:, 0].tolist()
        # Does not wait: a stage sends its row before data that this stage has received.
        stats = self._stats_of(pending.receive())
        stats = replace(stats, loss=sum(of_replicas) / len(of_replicas))
        assert self.optimizer.last_step is not None
        self._count(self.optimizer.last_step, pending.clock, stats, pending.lr)
        return stats

    def _flush_is_due(self, stats: StepStats) -> bool:
        """Return True if the step in flight must end before the next one; equal on all ranks."""
        config, step = self.config.train, self.progress.step + 1
        every = [number for number in (config.eval_every, config.checkpoint_every) if number]
        return (
            step >= config.steps
            or any(step % number == 0 for number in every)
            or stats.asks
            or stats.saves
            or self._all_stop
            or self._is_over
            # If the step in flight is skipped too, the run ends after it, with a checkpoint.
            or self.progress.skipped_in_a_row == MAX_SKIPS - 1
        )


def trainer_of(config: Config, context: TrainingContext, run: RunFolder, log: RunLog) -> Trainer:
    """Return the training loop for a job; the arguments are those of `Trainer`."""
    kind = Trainer if config.ranks.flushes else UnflushedTrainer
    return kind(config, context, run, log)
