"""The emergency checkpoint: saved after a failure of the device, from host memory alone.

[Note: Emergency]
The device holds nothing that must be saved: weights are rounded masters, and gradients belong to
a step that is abandoned. The optimizer completes on the host the updates that were decided ([Note:
Salvage] in `engine.interpreter`), and the run is saved as of the end of that step, with the random
states and the position in the data recorded there. If a tensor exists only on the device and may
have changed since the last checkpoint, nothing is saved, and the message says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from offloadtrain.config.errors import DeviceMemoryError, OffloadTrainError
from offloadtrain.config.job import Config
from offloadtrain.config.units import format_bytes
from offloadtrain.engine import OffloadOptimizer
from offloadtrain.optim.update_rules import update_rule
from offloadtrain.step.layout.state_tiers import may_be_on_device
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.checkpoint.restore import saved_weights
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.progress import Progress
from offloadtrain.train.saving import Position, Saving

_NAMED = 4
"""Number of owners of device memory in a message."""

_SAYS = ("CUDA error", "CUDA driver error", "cuEvent", "cuDNN error", "CUBLAS_STATUS", "NCCL error")
"""Parts of messages of plain RuntimeErrors, from libraries without a class for device errors."""


class DeviceLostError(OffloadTrainError):
    """The device has failed, but no step is lost: a checkpoint holds the last one."""


class DeviceFailedError(OffloadTrainError):
    """The device has failed, and the state after the last step could not be saved."""


class Emergency:
    """Tracks the state that is needed to save a run without its device."""

    def __init__(
        self, config: Config, context: TrainingContext, saving: Saving, log: RunLog
    ) -> None:
        self._config, self._optimizer = config, context.optimizer
        self._saving, self._log, self._ranks = saving, log, context.ranks
        self.step_ended()

    def step_ended(self) -> None:
        """Record the end of a counted step: an emergency checkpoint returns to it."""
        self._tries, self._at = self._optimizer.tries, self._saving.position()
        untrained = self._saving.untrained
        self._buffers = untrained.versions(untrained.buffers)

    @contextmanager
    def guarded(self, progress: Progress) -> Iterator[None]:
        """Save an emergency checkpoint if the device fails inside.

        Raises:
            DeviceLostError: the device failed, and the state was saved.
            DeviceFailedError: the device failed, and the state was not saved; the message says why.
            DeviceMemoryError: the device ran out of memory; the message says whether the step was
                saved, and what to change.
        """
        try:
            yield
        except Exception as error:
            failure = device_failure(error)
            if failure is None:
                raise
            raise self._rescued(failure, progress) from error

    def _rescued(self, failure: BaseException, progress: Progress) -> OffloadTrainError:
        full = isinstance(failure, torch.OutOfMemoryError)
        problem = (str(failure).splitlines() or [type(failure).__name__])[0]
        if full:
            rows = [r for r in self._log.memory.rows() if r.tier == "device" and r.num_bytes]
            rows.sort(key=lambda row: -row.num_bytes)
            largest = [f"{row.owner} {format_bytes(row.num_bytes)}" for row in rows[:_NAMED]]
            problem += (
                f" Largest owners of device memory: {', '.join(largest) or 'none'}. Set "
                f"{' or '.join(_smaller(self._config))}"
            )
        what = "ran out of memory" if full else "failed"
        problem = f"the device {what} in step {progress.step + 1}: {problem}"
        try:
            self._saving.save(progress, self._salvage(failure, progress))
        except (OffloadTrainError, OSError) as refused:
            kind: type[OffloadTrainError] = DeviceMemoryError if full else DeviceFailedError
            saved = checkpoint.find(self._saving.folder)
            last = (
                f"The last checkpoint is {saved[0].name}: resume from it with --resume "
                f"{self._saving.folder.parent}"
                if saved
                else "There is no checkpoint yet"
            )
            return kind(f"{problem}\nNo emergency checkpoint: {refused}. {last}.")
        outcome = f"the state after step {progress.step} was saved from host memory"
        if self._config.offload.update == "delayed":
            outcome += ', its newest weights only: update mode "delayed" begins anew'
        self._log.warn("emergency-checkpoint", f"{problem}; {outcome}", progress.step)
        kind = DeviceMemoryError if full else DeviceLostError
        return kind(
            f"{problem}\nNothing is lost: {outcome}, without the device. Resume with --resume "
            f"{self._saving.folder.parent}."
        )

    def _salvage(self, failure: BaseException, progress: Progress) -> Position:
        """Complete the last decided step on the host, and count it; return its position.

        Raises:
            DeviceFailedError, SalvageError, CheckpointError: the state cannot be completed.
        """
        if not self._ranks.is_single:
            raise DeviceFailedError(
                f"the state is in parts on {self._ranks.size} ranks, and the others "
                "cannot be asked any more"
            )
        assert isinstance(self._optimizer, OffloadOptimizer)
        step = self._optimizer.salvage(failure)
        uncounted = self._optimizer.tries > self._tries
        if uncounted:  # the step was decided, but not counted yet
            tokens, skipped = self._config.batch_tokens, step == progress.step
            progress.count(tokens=tokens, skipped=skipped, seconds=0.0)
            self._at = self._saving.position()
        if progress.step == 0:
            raise DeviceFailedError("no step is done yet")
        self._bring_untrained(uncounted=uncounted)
        return self._at

    # ---- untrained tensors, which may be only on the device

    def _bring_untrained(self, *, uncounted: bool) -> None:
        """Replace tensors on the device by their values in the newest checkpoint.

        Raises:
            DeviceFailedError, CheckpointError: a tensor has no known value on the host.
        """
        untrained, saved = self._saving.untrained, self._saving.saved_untrained
        lost = {name for name, tensor in untrained if on_device(tensor)}
        for name, version in untrained.versions().items():
            if name in lost and saved.get(name) != version:
                why = "has changed since the last checkpoint" if saved else "is in no checkpoint"
                raise DeviceFailedError(f"'{name}' is on the device only and {why}")
        for name, version in untrained.versions(untrained.buffers).items():
            if name not in lost and not uncounted and version != self._buffers[name]:
                raise DeviceFailedError(f"the step that failed has changed the buffer '{name}'")
        if not lost:
            return
        newest = checkpoint.newest_good(self._saving.folder, lambda path, why: None)
        if newest is None:
            raise CheckpointError("frozen weights are in no valid checkpoint")
        rule = update_rule(self._config.optim)
        for name, value in saved_weights(newest, rule, wanted=lost.__contains__):
            untrained.replace(name, value)


def device_failure(error: BaseException) -> BaseException | None:
    """Return the device failure that is, or has caused, this error; None if there is none."""
    cause: BaseException | None = error
    visited: set[int] = set()
    while cause is not None and id(cause) not in visited:
        if isinstance(cause, torch.OutOfMemoryError | torch.AcceleratorError):
            return cause
        if type(cause) is RuntimeError and any(text in str(cause) for text in _SAYS):
            return cause
        visited.add(id(cause))
        # Follow `raise ... from`, or the exception that was being handled.
        cause = cause.__cause__ or cause.__context__
    return None


def on_device(tensor: Tensor) -> bool:
    """Return True if a tensor is lost with the device."""
    return tensor.device.type != "cpu"


def _smaller(config: Config) -> list[str]:
    """Return settings that need less device memory than the job's."""
    train, offload = config.train, config.offload
    some, mode = offload.activations.recompute_blocks is not None, offload.activations.mode
    has_state_there = may_be_on_device(offload)
    settings = (
        # First, since it changes neither batches nor recomputation.
        (has_state_there, 'offload.state_on = "host"'),
        (
            train.micro_batch > 1,
            f"train.micro_batch = {train.micro_batch // 2} with train.grad_accum_steps = "
            f"{2 * train.grad_accum_steps}",
        ),
        (some, "offload.recompute_blocks left out, for all layers"),
        (not some and mode == "keep", 'offload.activation = "recompute"'),
        (not some and mode not in ("keep", "offload"), 'offload.activation = "offload"'),
        (config.makes_logits, "train.chunked_loss = true"),
        (offload.gradients.sums_tier != "host", 'offload.sums_on = "host"'),
        (
            not has_state_there and offload.weights.tier == "device",
            'offload.working = "host"',
        ),
        (True, "data.seq_len to less"),
    )
    return [setting for helps, setting in settings if helps]
