"""The loop, in the order in which things happen.

    build     seeds, device, data, model, and the optimizer through `offload` (assembly.py)
    resume    the newest good checkpoint of the run: from there on every loss is the same, bit for
              bit, as if the run had never stopped
    step      learning rate; per microbatch data, forward, backward; update; one record
    exchange  ranks tell each other loss, time and whether one was asked to stop
    between   evaluation, checkpoint, a request to stop
    end       last evaluation, last checkpoint, a sample of text

A step whose gradients are not finite is skipped by the engine: no state changes. Its batch is used
up, it is counted and shown, and the learning rate stands still, because the schedule follows the
optimizer steps that were done. After MAX_SKIPS in a row the run ends with a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.config.job import Config, as_tables
from offloadtrain.data.batches import Batches
from offloadtrain.data.tokenizer import tokenizer
from offloadtrain.engine import StepReport
from offloadtrain.events.control import Requests
from offloadtrain.model.generate import generate
from offloadtrain.optim import LossScaleError
from offloadtrain.optim.lr_schedule import learning_rate
from offloadtrain.train import rng
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.checkpoint import checkpoint, disk_space
from offloadtrain.train.checkpoint.manifest import CheckpointError, NotFiniteError
from offloadtrain.train.progress import Progress, StepClock, StepStats
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.run_log import RunLog
from offloadtrain.train.signals import StopRequests

MAX_SKIPS = 20
SAMPLE_TEMPERATURE = 0.8
_SAMPLE_SEED = 0
_SLOWER = "Lower optim.lr or lengthen optim.warmup_steps"
_ADVICE = {
    "fp16": f'{_SLOWER}, or set offload.precision = "bf16" or "fp32"',
    "bf16": f'{_SLOWER}, or set offload.precision = "fp32"',
    "fp32": _SLOWER,
}


class TrainingError(OffloadTrainError):
    """Training cannot go on: the numbers are not finite any more."""


class AbortedError(OffloadTrainError):
    """Somebody asked to end the run at once."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start of a run ended: all steps done, or stopped on request and resumable."""

    status: Literal["done", "stopped"]
    step: int
    val_loss: float | None


class Trainer:
    """One run, from its first or latest step to its last, or until it is asked to stop."""

    def __init__(
        self, config: Config, context: TrainingContext, run: RunFolder, log: RunLog
    ) -> None:
        """`run`: has begun when `train` is called."""
        self.config = config
        self._local, self._ranks = context.local, context.ranks
        self.model, self.optimizer = context.model, context.optimizer
        self.optimizer.warns_of_skips = False  # the run log tells of each
        self.batches, self.val_tokens = context.batches, context.val_tokens
        self.progress = Progress()
        self._precision = context.precision
        self._tokenizer = context.train_tokens.header.tokenizer
        self._run = run
        self._log = log
        self._requests: Requests | None = None
        self._loss = _LateLoss(self.optimizer.device)
        self._saved_step = -1
        self._all_stop = False

    # ---- resume

    def resume(self, found: checkpoint.Checkpoint) -> None:
        """Take over the state of a verified checkpoint.

        Raises:
            CheckpointError, ConfigError: it is of another model.
            DataError: it was trained on other tokens.
        """
        self._check_same_job(found)
        checkpoint.restore(found, self.model, self.optimizer)
        state = found.state
        self.optimizer.finish_load(**state["optimizer"])
        self.batches.load_state_dict(state["data"])
        self.progress = Progress(**state["progress"])
        if self._ranks.rank < len(state["rng"]):
            rng.restore(state["rng"][self._ranks.rank])
        else:  # a rank that was not there: numbers that nobody else draws
            rng.seed_all(self.config.train.seed + self._ranks.rank + found.step * self._ranks.size)
        self._saved_step = found.step

    def _check_same_job(self, found: checkpoint.Checkpoint) -> None:
        """Refuse what makes another run of it, and tell what else was changed."""
        if self._precision != found.state["precision"]:
            raise ConfigError(
                f"{found.path} was trained with offload.precision = {found.state['precision']!r}, "
                f"and here it is {self._precision!r}"
            )
        before, threads = found.state.get("threads"), torch.get_num_threads()
        if before not in (None, threads):
            self._log.warn(
                "threads-changed",
                f"torch had {before} threads when {found.path} was saved, and has {threads} now: "
                "from here on losses may differ in their last digits",
            )
        changed = _differences(found.state["config"], as_tables(self.config))
        if structural := [line for line in changed if line.startswith("model.")]:
            raise ConfigError(f"{found.path} is of another model: {'; '.join(structural)}")
        if found.state.get("held_out", self._held_out()) != self._held_out():
            changed.append(
                "the held-out tokens: validation losses do not compare with earlier ones"
            )
        if changed:
            self._log.warn("job-changed", f"changed since the checkpoint: {'; '.join(changed)}")

    def check_room(self) -> None:
        """Before the run begins: whether its checkpoints fit the disk.

        Raises:
            CheckpointError: not even one does.
        """
        step, config = self.progress.step, self.config.train
        if step >= config.steps:
            return
        every = config.checkpoint_every
        saves = 1 + ((config.steps - 1) // every - step // every if every else 0)
        folder = self._run.checkpoints
        problem = disk_space.shortage(
            folder,
            checkpoint.tensor_bytes(self.model, self.optimizer, self._ranks),
            self._ranks,
            there=len(checkpoint.find(folder)),
            unfinished=checkpoint.unfinished(folder),
            saves=saves,
            keep_last=config.keep_last,
        )
        if problem:
            self._log.warn("disk-small", problem)

    # ---- the loop

    def train(self, requests: Requests | None) -> Outcome:
        """Train from `progress.step` to the job's last step.

        Args:
            requests: from outside; rank 0 answers them.

        Raises:
            TrainingError, LossScaleError: gradients stayed non-finite; a checkpoint was saved. Or
                the loss or a weight is not, and none was.
            CheckpointError: the last checkpoint could not be saved.
        """
        config, self._requests = self.config.train, requests
        with StopRequests() as stop:
            if self.progress.step == 0:
                self._evaluate()
            while self.progress.step < config.steps and not self._stops(stop):
                done, told = self._step(stop)
                if done:
                    self._between_steps()
                self._answer(stop, told)
            if self.progress.step < config.steps:
                self._save()
                return Outcome("stopped", self.progress.step, self.progress.val_loss)
            self._finish()
        return Outcome("done", self.progress.step, self.progress.val_loss)

    def _step(self, stop: StopRequests) -> tuple[bool, bool]:
        """Try one optimizer step; whether it was not skipped, and whether somebody asks for
        something."""
        clock = StepClock()
        lr = self._set_learning_rate()
        self._log.before_step(self.optimizer)
        self._accumulate(clock)
        try:
            self.optimizer.step()
        except LossScaleError:
            self._save()  # of the step before: what overflows changes nothing
            raise
        clock.lap("optimizer")
        report = self.optimizer.last_step
        assert report is not None
        told = self._exchange(self._loss.wait(), clock, report, stop)
        number = self.progress.step + 1
        self.progress.count(
            tokens=self.config.batch_tokens, skipped=report.skipped, seconds=clock.total_ms / 1e3
        )
        self._log.step(number, self.progress, report, clock, told, lr=lr)
        self._check_finite(number, report, told.loss)
        return not report.skipped, told.asks

    def _exchange(
        self, loss: float, clock: StepClock, report: StepReport, stop: StopRequests
    ) -> StepStats:
        """What ranks say to each other of a step; a request to stop counts from any of them."""
        comm_ms = report.busy_ms["comm"]
        asks = self._requests is not None and self._requests.waiting()
        noted = not self._ranks.is_single and stop.requested is not None
        of_ranks = self._ranks.all_gather_host([loss, clock.total_ms, comm_ms, noted, asks])
        self._all_stop = bool(of_ranks[:, 3].any())
        return StepStats.of(of_ranks)

    def _stops(self, stop: StopRequests) -> bool:
        """Whether the run ends here: ranks end at the step after which all of them know it."""
        return bool(stop.requested) if self._ranks.is_single else self._all_stop

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
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _accumulate(self, clock: StepClock) -> None:
        """Forward and backward of every microbatch; `_loss` gets their mean."""
        count = self._local.train.grad_accum_steps
        total = torch.zeros((), device=self.optimizer.device)
        for number in range(count):
            tokens_BT, targets_BT = self._next_batch(self.batches)
            clock.lap("data")
            loss = self.model(tokens_BT, targets_BT)
            total += loss.detach()
            if number == count - 1:
                self._loss.launch(total / count)
            clock.lap("forward")
            self.optimizer.backward(loss)
            clock.lap("backward")

    def _next_batch(self, batches: Batches) -> tuple[Tensor, Tensor]:
        tokens_BT, targets_BT = batches.next()
        device = self.optimizer.device
        if device.type == "cpu":
            return tokens_BT, targets_BT
        # From pinned memory the copies are asynchronous; torch keeps it until they are done.
        return (
            tokens_BT.pin_memory().to(device, non_blocking=True),
            targets_BT.pin_memory().to(device, non_blocking=True),
        )

    def _check_finite(self, number: int, report: StepReport, loss: float) -> None:
        if not math.isfinite(loss):
            self._log.warn("loss-not-finite", f"the loss of step {number} is {loss}", number)
            if not report.skipped:
                raise self._spoilt(f"the loss of step {number} is {loss}")
        elif report.skipped and self._precision != "fp16":
            self._log.warn(
                "step-skipped",
                f"step {number} was skipped: the gradient norm is {report.grad_norm}",
                number,
            )
        if self.progress.skipped_in_a_row >= MAX_SKIPS:
            self._save()
            raise TrainingError(
                f"{MAX_SKIPS} steps in a row were skipped: the gradients of step {number} are not "
                f"finite (loss {loss}, loss scale {report.loss_scale:g}). The state before them is "
                f"in the last checkpoint. {_ADVICE[self._precision]}."
            )

    def _spoilt(self, problem: str) -> TrainingError:
        """No step from here on would be of use."""
        saved = checkpoint.find(self._run.checkpoints)
        last = f"the last checkpoint, {saved[0].name}, is from before" if saved else "none was yet"
        advice = _ADVICE[self._precision]
        if not self.config.offload.skip_nonfinite:
            advice = f"Go on from there with offload.skip_nonfinite = true, or: {advice}"
        return TrainingError(f"{problem}. Nothing was saved of it; {last}. {advice}.")

    # ---- between steps

    def _answer(self, stop: StopRequests, asked: bool) -> None:
        """Do what was asked from outside of rank 0, here where the state is whole.

        Raises:
            AbortedError: that is what was asked.
        """
        if not asked:
            return
        for request in self._ranks.broadcast_object(
            self._requests.poll() if self._requests else []
        ):
            step = self.progress.step
            if request.refused:
                self._log.control(request, "refused", step)
                continue
            if request.action in ("checkpoint", "stop"):
                self._log.control(request, "accepted", step)
            if request.action == "checkpoint":
                self._save_or_warn()
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
            self._save_or_warn()

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Mean loss over the first `eval_batches` of the held-out tokens: always the same ones."""
        if self.val_tokens is None or not self.config.train.eval_every:
            return
        self._log.doing("validation")
        clock = StepClock()
        batch, seq_len, ranks = self._local.train.micro_batch, self.config.data.seq_len, self._ranks
        batches = Batches(
            self.val_tokens,
            batch=batch,
            seq_len=seq_len,
            rank=ranks.rank,
            world=ranks.size,
            shuffle=False,
        )
        count = self._local.train.eval_batches
        count = max(1, min(count, batches.windows // (batch * ranks.size)))
        self.model.eval()
        losses = [self.model(*self._next_batch(batches)) for _ in range(count)]
        self.model.train()
        mean = torch.stack(losses).double().mean().item()  # waits for the device
        self.progress.val_loss = ranks.all_gather_host([mean]).mean().item()
        clock.lap("evaluation")
        self.progress.seconds += clock.total_ms / 1e3
        self._log.evaluated(self.progress, count * batch * seq_len * ranks.size, clock.total_ms)

    def _save_or_warn(self) -> None:
        """Save; a full disk must not end a run whose last checkpoint is good."""
        try:
            self._save()
        except CheckpointError as error:
            self._log.checkpoint_failed(self.progress.step, error)

    def _save(self) -> None:
        """Save the state after this step, unless it was saved already, and prune.

        Raises:
            TrainingError: its weights are not finite.
            CheckpointError: the disk is full or failing.
        """
        if self._saved_step == self.progress.step:
            return
        self._log.doing("saving a checkpoint")
        try:
            saved = checkpoint.save(
                self._run.checkpoints,
                self.progress.step,
                self.model,
                self.optimizer,
                self._state(),
                ranks=self._ranks,
            )
        except NotFiniteError as error:
            raise self._spoilt(f"after step {self.progress.step} {error}") from error
        self._saved_step = self.progress.step
        self.progress.seconds += saved.seconds
        self._log.saved(self.progress.step, saved)
        if self._ranks.rank:
            return
        try:
            checkpoint.prune(self._run.checkpoints, self.config.train.keep_last)
        except OSError as error:
            self._log.warn("prune-failed", f"old checkpoints stay: {error}")

    def _state(self) -> Mapping[str, Any]:
        """Return all that is not a tensor and that the rest of the run depends on."""
        scaler = self.optimizer.state_dict()["scaler"]
        hyperparameters = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        return {
            "optimizer": {"step": self.progress.step, "scaler": scaler},
            "progress": asdict(self.progress),
            "data": self.batches.state_dict(),
            "held_out": self._held_out(),
            "rng": self._ranks.gather(rng.capture()),
            "param_groups": hyperparameters,
            "precision": self._precision,
            "threads": torch.get_num_threads(),
            "config": as_tables(self.config),
        }

    def _held_out(self) -> str | None:
        """The hash of the tokens that losses are validated on."""
        return None if self.val_tokens is None else self.val_tokens.header.content

    # ---- the end

    def _finish(self) -> None:
        self._evaluate()
        self._save()
        if self.config.train.sample_tokens:
            self._sample()

    def _sample(self) -> None:
        """Let the model write on from the prompt."""
        self._log.doing("writing a sample")
        words = tokenizer(self._tokenizer)
        prompt = self.config.train.sample_prompt
        tokens = words.encode(prompt) or [words.end_of_document]
        generated_BT = generate(
            self.model,
            torch.tensor([tokens], device=self.optimizer.device),
            self.config.train.sample_tokens,
            temperature=SAMPLE_TEMPERATURE,
            generator=torch.Generator().manual_seed(_SAMPLE_SEED),
        )
        new = [t for t in generated_BT[0, len(tokens) :].tolist() if t < words.vocab_size]
        self._log.sampled(self.progress.step, prompt, words.decode(new))


class _LateLoss:
    """A loss on its way to the host, read when the step is over instead of stopping the device.

    The copy is launched before backward, and the step waits for gradients, so that `wait` finds it
    done.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None

    def launch(self, loss: Tensor) -> None:
        self._host.copy_(loss, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.item()


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return "key: old -> new" for every leaf that differs; lists and tuples are alike."""
    found: list[str] = []
    for key, value in now.items():
        before = saved.get(key)
        if isinstance(value, Mapping):
            nested = before if isinstance(before, Mapping) else {}
            found += _differences(nested, value, f"{prefix}{key}.")
        elif before != (list(value) if isinstance(value, tuple) else value):
            found.append(f"{prefix}{key}: {before} -> {value}")
    return found
