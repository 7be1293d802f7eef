"""The checkpoints of a run, as the trainer sees them: room for them, saving, resuming."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.config.hf_model import read_config
from offloadtrain.config.job import Config, as_tables
from offloadtrain.train import rng
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.checkpoint import checkpoint, disk_space, save
from offloadtrain.train.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    NotFiniteError,
)
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.job_changes import changes_since
from offloadtrain.train.progress import Progress
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.run_log import RunLog
from offloadtrain.train.spikes import Spikes
from offloadtrain.train.untrained import Untrained, Versions

_SLOWER = "Lower optim.lr or lengthen optim.warmup_steps"
ADVICE = {
    "fp16": f'{_SLOWER}, or set offload.precision = "bf16" or "fp32"',
    "bf16": f'{_SLOWER}, or set offload.precision = "fp32"',
    "fp32": _SLOWER,
}
"""Precision → what to change when values are no longer finite."""


class TrainingError(OffloadTrainError):
    """Training cannot continue: values are no longer finite."""


@dataclass(frozen=True, slots=True)
class Position:
    """The end of a step: the next one begins with these random states, at this place in the
    data, and compares its loss with these."""

    rng: rng.Snapshot
    data: Mapping[str, Any]
    spikes: Mapping[str, Any]


class Saving:
    """Saves the state after a step, prunes older checkpoints, and resumes from one."""

    def __init__(
        self, config: Config, context: TrainingContext, run: RunFolder, log: RunLog
    ) -> None:
        """`run`: must have begun when a checkpoint is saved."""
        self._config, self._run, self._log = config, run, log
        self._ranks, self._precision = context.ranks, context.precision
        self._model, self._optimizer = context.model.module, context.optimizer
        self._batches, self._val_tokens = context.batches, context.val_tokens
        self._hf_config = None if config.hf is None else read_config(config.hf.folder)
        self._tokens = context.train_tokens.header
        self._saved_step = -1
        self.spikes = Spikes(config.train, context.ranks)
        self.untrained = Untrained(self._model, self._optimizer)
        self.saved_untrained: Versions = {}
        """What was not trained, as the newest checkpoint has it."""

    @property
    def folder(self) -> Path:
        return self._run.checkpoints

    def here(self) -> Position:
        """Return the position of the run now; between steps it is the end of the last one."""
        return Position(rng.snapshot(), self._batches.state_dict(), self.spikes.state_dict())

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
        self._check_same_job(found)
        restore(found, self._model, self._optimizer, self._ranks)
        state, ranks = found.state, self._ranks
        self._optimizer.finish_load(**state["optimizer"])
        self._batches.load_state_dict(state["data"])
        self.spikes.load_state_dict(state["spikes"])
        if ranks.rank < len(state["rng"]):
            rng.restore(state["rng"][ranks.rank])
        else:  # a new rank: numbers that no other rank draws
            rng.seed_all(self._config.train.seed + ranks.rank + found.step * ranks.size)
        self._saved_step, self.saved_untrained = found.step, self.untrained.versions()
        return Progress(**state["progress"])

    def _check_same_job(self, found: checkpoint.Checkpoint) -> None:
        """Refuse changes that make it another run, and report the others."""
        if self._precision != found.state["precision"]:
            raise ConfigError(
                f"{found.path} was trained with offload.precision = {found.state['precision']!r}, "
                f"but this run uses {self._precision!r}"
            )
        own = self._tokens.tokenizer_id
        if own and found.state["tokenizer"] not in ("", own):
            raise ConfigError(
                f"{found.path} was trained on tokens of another tokenizer than the data's, "
                f"{self._tokens.tokenizer}: its tokens would mean something else"
            )
        before, threads = found.state.get("threads"), torch.get_num_threads()
        if before not in (None, threads):
            self._log.warn(
                "threads-changed",
                f"torch had {before} threads when {found.path} was saved, and has {threads} now: "
                "losses may now differ in their last digits",
            )
        changed = changes_since(found, self._config)
        if found.state.get("held_out", self._held_out()) != self._held_out():
            changed.append(
                "the held-out tokens: validation losses are not comparable with earlier ones"
            )
        if changed:
            self._log.warn("job-changed", f"changed since the checkpoint: {'; '.join(changed)}")

    def roll_back(self, spike: str, progress: Progress) -> None:
        """Go back to the newest good checkpoint, and on from it behind the batches used so far. See
        [Note: Spikes] in `spikes.py`. Every rank calls this, between steps.

        Raises:
            TrainingError: no rollback is left, or there is no checkpoint.
        """
        if self.spikes.last_rollback_is_used:
            most = self._config.train.max_rollbacks
            raise self._no_rollback(spike, f"train.max_rollbacks = {most} rollbacks are used up")
        behind, at = self._batches.state_dict(), progress.step
        earlier = self._resume_newest()
        if earlier is None:
            raise self._no_rollback(spike, "there is no checkpoint to go back to")
        self._batches.load_state_dict(behind)
        progress.go_back(earlier)
        self.spikes.rollbacks.append((at + 1, progress.step))
        self._log.warn(
            "rolled-back",
            f"{spike}: back to step {progress.step}; the data goes on at sample "
            f"{behind['sample']} of epoch {behind['epoch']}, behind the batches that led to it "
            f"(rollback {len(self.spikes.rollbacks)} of {self._config.train.max_rollbacks})",
            at + 1,
        )

    def _resume_newest(self) -> Progress | None:
        """Load the newest checkpoint whose tensors verify; None if there is none."""
        before: int | None = None
        while True:
            found = checkpoint.newest_good(
                self.folder, self._warn_of_damage, self._ranks, whole=False, before=before
            )
            if found is None:
                return None
            try:
                return self.resume(found)
            except DamagedCheckpointError as damage:
                self._warn_of_damage(found.path, damage)
                before = found.step

    def _warn_of_damage(self, path: Path, damage: DamagedCheckpointError) -> None:
        self._log.warn("checkpoint-damaged", f"{damage}. An earlier one is used.")

    def _no_rollback(self, spike: str, why: str) -> TrainingError:
        return TrainingError(
            f"{spike}, and {why}. {ADVICE[self._precision]}, raise train.spike_score, or set "
            'train.on_spike = "skip"'
        )

    # ---- save

    def save_or_warn(self, progress: Progress) -> None:
        """Save; a full disk must not end a run whose last checkpoint is valid."""
        try:
            self.save(progress)
        except CheckpointError as error:
            self._log.checkpoint_failed(progress.step, error)

    def save(self, progress: Progress, at: Position | None = None) -> None:
        """Save the state after this step, unless it was saved already, and prune.

        Args:
            at: where the step ended; None: here.

        Raises:
            TrainingError: its weights are not finite.
            CheckpointError: the disk is full or failing.
        """
        if self._saved_step == progress.step:
            return
        self._log.doing("saving a checkpoint")
        try:
            saved = save.save(
                self._run.checkpoints,
                progress.step,
                self._model,
                self._optimizer,
                self._state(progress, at or self.here()),
                ranks=self._ranks,
            )
        except NotFiniteError as error:
            raise self.spoilt(f"after step {progress.step} {error}") from error
        self._saved_step, self.saved_untrained = progress.step, self.untrained.versions()
        progress.seconds += saved.seconds
        self._log.saved(progress.step, saved)
        if self._ranks.rank:
            return
        try:
            checkpoint.prune(self._run.checkpoints, self._config.train.keep_last)
        except OSError as error:
            self._log.warn("prune-failed", f"old checkpoints were not removed: {error}")

    def spoilt(self, problem: str) -> TrainingError:
        """Return the error of a run whose later steps would be useless."""
        saved = checkpoint.find(self._run.checkpoints)
        last = f"the last checkpoint is {saved[0].name}" if saved else "there is no checkpoint yet"
        advice = ADVICE[self._precision]
        if not self._config.offload.skip_nonfinite:
            advice = f"Resume from it with offload.skip_nonfinite = true, or: {advice}"
        return TrainingError(f"{problem}. It was not saved; {last}. {advice}.")

    def _state(self, progress: Progress, at: Position) -> Mapping[str, Any]:
        """Return all state outside tensors that the rest of the run depends on."""
        scaler = self._optimizer.state_dict()["scaler"]
        hyperparameters = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        return {
            "optimizer": {"step": progress.step, "scaler": scaler},
            "progress": asdict(progress),
            "data": at.data,
            "spikes": at.spikes,
            "held_out": self._held_out(),
            "tokenizer": self._tokens.tokenizer_id,
            "rng": self._ranks.gather(at.rng.as_json),
            "param_groups": hyperparameters,
            "precision": self._precision,
            "threads": torch.get_num_threads(),
            "config": as_tables(self._config),
            "tokenizer_name": self._tokens.tokenizer,
            "hf_config": self._hf_config,
        }

    def _held_out(self) -> str | None:
        """Return the hash of the validation tokens."""
        return None if self._val_tokens is None else self._val_tokens.header.content
