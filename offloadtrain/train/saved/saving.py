"""The checkpoints of a run, as the trainer sees them: room for them, saving, resuming."""

from __future__ import annotations

import math
import time
from pathlib import Path

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.config.job import Config, TrainConfig
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.checkpoint import checkpoint, disk_space, save
from offloadtrain.train.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    NotFiniteError,
)
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.progress import Progress
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.saved.run_state import Position, RunState
from offloadtrain.train.saved.saved_state import require_run_state
from offloadtrain.train.saved.untrained import Untrained, Versions
from offloadtrain.train.spikes import Spikes

_SLOWER = "Lower optim.lr or lengthen optim.warmup_steps"
ADVICE = {
    "fp16": f'{_SLOWER}, or set offload.precision = "bf16" or "fp32"',
    "bf16": f'{_SLOWER}, or set offload.precision = "fp32"',
    "fp32": _SLOWER,
}
"""Precision → what to change when values are no longer finite."""


class TrainingError(OffloadTrainError):
    """Training cannot continue: values are no longer finite."""


class Saving:
    """Saves the state after a step, prunes older checkpoints, and resumes from one."""

    def __init__(
        self, config: Config, context: TrainingContext, run: RunFolder, log: RunLog
    ) -> None:
        """`run`: must have begun when a checkpoint is saved."""
        self._config, self._run, self._log = config, run, log
        self._ranks, self._precision = context.ranks, context.precision
        self._model, self._optimizer = context.model.module, context.optimizer
        self._batches = context.batches
        self._saved_step = -1
        self.spikes = Spikes(config.train, context.replicas)
        self._state = RunState(config, context, self.spikes)
        self.untrained = Untrained(self._model, self._optimizer)
        self.saved_untrained: Versions = {}
        """What was not trained, as the newest checkpoint has it."""
        self._begun_untrained: Versions = {}
        """As the checkpoint that is being written has it."""
        self._writing: save.Save | None = None
        self._told_of_page_cache = False

    def here(self) -> Position:
        """Return the position of the run now; between steps it is the end of the last one."""
        return self._state.here()

    @property
    def folder(self) -> Path:
        return self._run.checkpoints

    def check_room(self, step: int) -> None:
        """Check before the run goes on from `step` that its checkpoints fit on the disk.

        Raises:
            CheckpointError: not even one fits.
        """
        config, folder = self._config.train, self._run.checkpoints
        if step >= config.steps:
            return
        every = config.checkpoint_every
        saves = 1 + ((config.steps - 1) // every - step // every if every else 0)
        problem = disk_space.shortage(
            folder,
            save.num_bytes(self._model, self._optimizer, self._ranks),
            self._ranks,
            there=len(checkpoint.find(folder)),
            unfinished=checkpoint.unfinished(folder),
            saves=saves,
            keep_last=config.keep_last,
            kept=_num_permanent(config, step),
        )
        if problem:
            self._log.warn("disk-small", problem)

    # ---- resume

    def resume(self, found: checkpoint.Checkpoint) -> Progress:
        """Load the state of a checkpoint; its tensors are verified meanwhile.

        Raises:
            DamagedCheckpointError: bytes of them have changed; another one must be loaded.
            CheckpointError, ConfigError: it is of another model.
            DataError: it was trained on other tokens.
        """
        for code, message in self._state.changes(found):
            self._log.warn(code, message)
        delayed = restore(found, self._model, self._optimizer, self._ranks)
        self._optimizer.finish_load(**found.state["optimizer"], delayed=delayed)
        self._state.load(found)
        self._saved_step, self.saved_untrained = found.step, self.untrained.versions()
        return Progress(**found.state["progress"])

    def roll_back(self, spike: str, progress: Progress) -> None:
        """Go back to the newest good checkpoint, and on from it behind the batches used so far. See
        [Note: Spikes] in `spikes.py`. Every rank calls this, between steps.

        Raises:
            TrainingError: no rollback is left, or there is no checkpoint.
        """
        if self.spikes.last_rollback_is_used:
            most = self._config.train.max_rollbacks
            raise self._no_rollback(spike, f"train.max_rollbacks = {most} rollbacks are used up")
        # One that was begun before the spike is the newest to go back to.
        self.finish(progress)
        data_state, at = self._batches.state_dict(), progress.step
        earlier = self._resume_newest()
        if earlier is None:
            raise self._no_rollback(spike, "there is no checkpoint to go back to")
        self._batches.load_state_dict(data_state)
        progress.go_back(earlier)
        self.spikes.rollbacks.append((at + 1, progress.step))
        self._log.warn(
            "rolled-back",
            f"{spike}: back to step {progress.step}; the data goes on at sample "
            f"{data_state['sample']} of epoch {data_state['epoch']}, behind the batches that led "
            f"to it (rollback {len(self.spikes.rollbacks)} of {self._config.train.max_rollbacks})",
            at + 1,
        )

    def _resume_newest(self) -> Progress | None:
        """Load the newest checkpoint whose tensors verify; None if there is none."""
        before: int | None = None
        while True:
            newest = checkpoint.newest_good(
                *(self.folder, self._warn_of_damage, self._ranks),
                whole=False,
                before=before,
                accept=require_run_state,
            )
            if newest is None:
                return None
            try:
                return self.resume(newest)
            except DamagedCheckpointError as damage:
                self._warn_of_damage(newest.path, damage)
                before = newest.step

    def _warn_of_damage(self, path: Path, damage: DamagedCheckpointError) -> None:
        """Of one that is skipped; it is set aside, for its step is trained and saved again."""
        self._log.warn("checkpoint-damaged", f"{damage}. An earlier one is used.")
        if self._ranks.rank == 0:
            try:
                checkpoint.set_aside(path)
            except OSError as error:
                self._log.warn("checkpoint-damaged", f"{path} cannot be renamed: {error.strerror}")

    def _no_rollback(self, spike: str, why: str) -> TrainingError:
        return TrainingError(
            f"{spike}, and {why}. {ADVICE[self._precision]}, raise train.spike_score, or set "
            'train.on_spike = "skip"'
        )

    # ---- save

    def begin(self, progress: Progress) -> None:
        """Begin to save the state after this step, unless that was begun already; training goes on
        while it is written. A full disk does not end a run whose last checkpoint is valid.

        Raises:
            TrainingError: weights of the checkpoint before it, which ends first, are not finite.
        """
        try:
            self._begin(progress, self._state.here())
        except CheckpointError as error:
            self._failed(progress.step, error)
        # Where writes are not asynchronous, or the model is small, all is written by now.
        self.poll(progress, self._ranks.all_gather_host([self.written])[:, 0].all().item())

    def save(self, progress: Progress, at: Position | None = None) -> None:
        """Save the state after this step, unless it was saved already, and wait for it.

        Args:
            at: where the step ended, after a failure of the device, with which a checkpoint that
                is being written is lost; None: here.

        Raises:
            TrainingError: its weights are not finite.
            CheckpointError: the disk is full or failing.
        """
        if at is not None and self._writing is not None:
            # The lanes have stopped in the midst of a checkpoint, which is removed.
            self._writing.give_up()
            self._writing, self._saved_step = None, -1
        self._begin(progress, at or self._state.here())
        if self._writing is not None:
            self._commit(progress)

    @property
    def written(self) -> bool:
        """This rank has written its part of the checkpoint that is not committed yet."""
        return self._writing is not None and self._writing.written

    def poll(self, progress: Progress, all_written: object) -> None:
        """Between steps: commit the checkpoint that every rank has written.

        Args:
            all_written: `written` of every rank; the same on all of them.

        Raises:
            TrainingError: its weights are not finite.
        """
        if all_written:
            self.finish(progress)

    def finish(self, progress: Progress) -> None:
        """Wait for the checkpoint that is being written, if there is one, and commit it.

        Raises:
            TrainingError: its weights are not finite.
        """
        if self._writing is None:
            return
        step = self._writing.step
        try:
            self._commit(progress)
        except CheckpointError as error:
            self._failed(step, error)

    def _begin(self, progress: Progress, at: Position) -> None:
        if self._saved_step == progress.step:
            return
        # One at a time: the disk is the bound, and each holds its windows of memory.
        self.finish(progress)
        self._log.doing("saving a checkpoint")
        began_s = time.perf_counter()
        self._writing = save.Save(
            self._run.checkpoints,
            progress.step,
            self._model,
            self._optimizer,
            self._state.at(progress, at),
            ranks=self._ranks,
        )
        self._saved_step, self._begun_untrained = progress.step, self.untrained.versions()
        progress.seconds += time.perf_counter() - began_s

    def _commit(self, progress: Progress) -> None:
        """Wait for the checkpoint that is being written, commit it, and prune.

        Raises:
            TrainingError: its weights are not finite.
            CheckpointError: a rank could not write it.
        """
        writing, self._writing = self._writing, None
        assert writing is not None
        began_s = time.perf_counter()
        try:
            saved = writing.commit()
        except CheckpointError as error:
            self._saved_step = -1
            if isinstance(error, NotFiniteError):
                raise self.spoilt(f"after step {writing.step} {error}", progress) from error
            raise
        progress.seconds += time.perf_counter() - began_s
        self.saved_untrained = self._begun_untrained
        self._log.saved(writing.step, saved)
        self._prune()
        if not saved.direct and not self._told_of_page_cache:
            self._told_of_page_cache = True
            self._log.warn(
                "checkpoint-buffered",
                f"the file system of {self._run.checkpoints} refuses O_DIRECT: checkpoints go "
                "through the page cache, which counts against the memory limit of a container",
            )

    def _prune(self) -> None:
        if self._ranks.rank:
            return
        try:
            config = self._config.train
            checkpoint.prune(self._run.checkpoints, config.keep_last, config.keep_every)
        except OSError as error:
            self._log.warn("prune-failed", f"old checkpoints were not removed: {error}")

    def _failed(self, step: int, error: CheckpointError) -> None:
        self._saved_step = -1
        self._log.checkpoint_failed(step, error)

    def spoilt(self, problem: str, progress: Progress) -> TrainingError:
        """Return the error of a run whose later steps would be useless."""
        # One that was begun before the problem may be the only good one.
        self.finish(progress)
        saved = checkpoint.find(self._run.checkpoints)
        last = f"the last checkpoint is {saved[0].name}" if saved else "there is no checkpoint yet"
        advice = ADVICE[self._precision]
        if not self._config.offload.skip_nonfinite:
            advice = f"Resume from it with offload.skip_nonfinite = true, or: {advice}"
        return TrainingError(f"{problem}. It was not saved; {last}. {advice}.")


def _num_permanent(config: TrainConfig, step: int) -> int:
    """Return the number of later checkpoints that `keep_every` keeps."""
    if not (config.keep_every and config.checkpoint_every):
        return 0
    every = math.lcm(config.keep_every, config.checkpoint_every)
    return config.steps // every - step // every
