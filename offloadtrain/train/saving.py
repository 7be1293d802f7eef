"""The checkpoints of a run for the trainer: checks disk space, saves, resumes.

`Saving` writes and restores checkpoints, including the state other than tensors (checked by
`saved_state.py`). `Untrained` tracks frozen parameters and buffers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.config.hf_model import identity_of, read_config
from offloadtrain.config.job import Config, as_tables, with_defaults
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.toml import field_kinds
from offloadtrain.config.units import format_bytes
from offloadtrain.engine import EngineError
from offloadtrain.parallel.unused_experts import merged_steps
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.checkpoint import checkpoint, save
from offloadtrain.train.checkpoint.checkpoint import Checkpoint
from offloadtrain.train.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    NotFiniteError,
)
from offloadtrain.train.checkpoint.restore import restore
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.losses import Spikes
from offloadtrain.train.progress import Progress
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.saved_state import (
    RandomStates,
    random_states,
    require_run_state,
    restore_random_states,
    seed_all,
)
from offloadtrain.train.update_choice import UpdateChoice

_SLOWER = "Lower optim.lr or lengthen optim.warmup_steps"
ADVICE = {
    "fp16": f'{_SLOWER}, or set offload.precision = "bf16" or "fp32"',
    "bf16": f'{_SLOWER}, or set offload.precision = "fp32"',
    "fp32": _SLOWER,
}
"""Precision → advice if values are not finite."""


class TrainingError(OffloadTrainError):
    """Training cannot continue: values are not finite."""


@dataclass(frozen=True, slots=True)
class Position:
    """Everything that changes between steps outside tensors: random states, position in the
    data, and the losses that the next loss is compared with."""

    rng: RandomStates
    data: Mapping[str, Any]
    spikes: Mapping[str, Any]


class Saving:
    """Saves the state after a step, prunes older checkpoints, and resumes from one."""

    def __init__(
        self, config: Config, context: TrainingContext, run: RunFolder, log: RunLog
    ) -> None:
        """`run` must have begun before a checkpoint is saved."""
        self._config, self._context = config, context
        self._run, self._log = run, log
        self._saved_step = -1
        self.spikes = Spikes(config.train, context.replicas)
        self.update_choice = UpdateChoice(config, context)
        self._hf_config = None if config.hf is None else read_config(config.hf.folder)
        val_tokens = context.val_tokens
        self._held_out = None if val_tokens is None else val_tokens.header.content
        self.untrained = Untrained(context.model.module, context.optimizer)
        self._first_untrained = self.untrained.versions()
        self.saved_untrained: Versions = {}
        """Versions of untrained tensors in the newest committed checkpoint."""
        self._begun_untrained: Versions = {}
        """Versions of untrained tensors in the checkpoint that is being written."""
        self._writing: save.Save | None = None
        self._warned_of_page_cache = False

    @property
    def folder(self) -> Path:
        return self._run.checkpoints

    def check_room(self, step: int) -> None:
        """Check that the checkpoints of a run that continues from `step` fit on the disk.

        Raises:
            CheckpointError: not even one checkpoint fits.
        """
        config, folder = self._config.train, self.folder
        if step >= config.steps:
            return
        regions, _ = save.lay_out_state("", self._context.model.module, self._context.optimizer)
        needed, free = save.require_space(
            folder, save.size_of(regions), self._context.ranks, checkpoint.unfinished(folder)
        )
        every, permanent = config.checkpoint_every, 0
        saves = 1 + ((config.steps - 1) // every - step // every if every else 0)
        if every and config.keep_every:
            steps_apart = math.lcm(config.keep_every, every)
            permanent = config.steps // steps_apart - step // steps_apart
        existing = min(len(checkpoint.find(folder)), config.keep_last)
        at_once = min(saves, config.keep_last + 1 - existing + permanent)
        if free < at_once * needed:
            self._log.warn(
                "disk-small",
                f"{format_bytes(free)} is free in {folder}, which is {free // needed} times the "
                f"{format_bytes(needed)} of a checkpoint, and train.keep_last = {config.keep_last} "
                f"takes {at_once} times that (a new one is written before the oldest goes): later "
                "ones will fail. Free some space, or set runs_dir to a larger disk",
            )

    # ---- resume

    def resume_newest(
        self, on_damaged: checkpoint.OnDamaged, before: int | None = None
    ) -> Progress | None:
        """Load the state of the newest checkpoint with valid tensors; None if there is none.
        Every rank calls this.

        Args:
            before: consider only checkpoints of earlier steps.

        Raises:
            CheckpointError, ConfigError: the checkpoint is of another model.
            DataError: the checkpoint was trained on other tokens.
        """
        loaded: list[Progress] = []

        def load(source: Checkpoint) -> None:
            require_run_state(source)
            loaded.append(self._resume(source))

        checkpoint.newest_good(
            *(self.folder, on_damaged, self._context.ranks),
            verified=False,
            before=before,
            accept=load,
        )
        return loaded[0] if loaded else None

    def _resume(self, source: Checkpoint) -> Progress:
        """Load a checkpoint's tensors, which are verified while loading, and its position in data,
        random numbers and losses."""
        for code, message in self._changes(source):
            self._log.warn(code, message)
        context = self._context
        try:
            delayed = restore(source, context.model.module, context.optimizer, context.ranks)
        except EngineError as error:
            raise ConfigError(
                f"{source.path} does not hold the state of optim.name = "
                f"{self._config.optim.name!r}: {error}. Set [optim] as it was, or start a new run"
            ) from error
        state, ranks = source.state, context.ranks
        context.optimizer.finish_load(**state["optimizer"], delayed=delayed)
        context.batches.load_state_dict(state["data"])
        self.spikes.load_state_dict(state["spikes"])
        if mode := state.get("update"):
            self._log.decided(self.update_choice.decide(mode), source.step)
        replica = ranks.rank // self._config.ranks.tensor
        if replica < len(state["rng"]):
            restore_random_states(state["rng"][replica])
        else:  # a new rank: draw numbers that no other rank draws
            seed_all(self._config.train.seed + replica + source.step * ranks.size)
        self._saved_step, self.saved_untrained = source.step, self.untrained.versions()
        self._first_untrained = self.saved_untrained
        return Progress(**state["progress"])

    def roll_back(self, spike: str, progress: Progress) -> None:
        """Load the newest valid checkpoint, and continue from it with the batches not used yet. See
        [Note: Spikes] in `losses.py`. Every rank calls this, between steps.

        Raises:
            TrainingError: no rollback is left, or there is no checkpoint.
        """
        most, batches, at = self._config.train.max_rollbacks, self._context.batches, progress.step
        problem = f"train.max_rollbacks = {most} rollbacks are used up"
        earlier: Progress | None = None
        if len(self.spikes.rollbacks) < most:
            # A save that was begun before the spike becomes the newest checkpoint.
            self.finish(progress)
            data_state, problem = batches.state_dict(), "there is no checkpoint to go back to"
            earlier = self.resume_newest(self._warn_of_damage)
        if earlier is None:
            raise TrainingError(
                f"{spike}, and {problem}. {ADVICE[self._context.precision]}, raise "
                'train.spike_score, or set train.on_spike = "skip"'
            )
        batches.load_state_dict(data_state)
        progress.go_back(earlier)
        self.spikes.rollbacks.append((at + 1, progress.step))
        self._log.warn(
            "rolled-back",
            f"{spike}: back to step {progress.step}; the data goes on at sample "
            f"{data_state['sample']} of epoch {data_state['epoch']}, behind the batches that led "
            f"to it (rollback {len(self.spikes.rollbacks)} of {most})",
            at + 1,
        )

    def _warn_of_damage(self, path: Path, damage: DamagedCheckpointError) -> None:
        """Warn about a damaged checkpoint and rename it, so that its step can be saved again."""
        self._log.warn("checkpoint-damaged", f"{damage}. An earlier one is used.")
        if self._context.ranks.rank == 0:
            try:
                checkpoint.set_aside(path)
            except OSError as error:
                self._log.warn("checkpoint-damaged", f"{path} cannot be renamed: {error.strerror}")

    # ---- state other than tensors

    def position(self) -> Position:
        """Return the current position; between steps, this is the end of the last step."""
        data, spikes = self._context.batches.state_dict(), self.spikes.state_dict()
        return Position(random_states(), data, spikes)

    def _state(self, progress: Progress, at: Position) -> Mapping[str, Any]:
        """Return a checkpoint's state other than tensors, at this position. A collective."""
        hyperparameters = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._context.optimizer.param_groups
        ]
        expert_steps = {}
        if self._config.offload.skip_unused:
            # A collective: ranks may hold different experts.
            of_ranks = self._context.ranks.gather(self._context.optimizer.expert_steps)
            expert_steps = merged_steps(of_ranks)
        return {
            "optimizer": {
                "step": progress.step,
                "scaler": self._context.optimizer.scaler_state(),
                # Only if experts are skipped: earlier versions refuse this key.
                **({"expert_steps": expert_steps} if expert_steps else {}),
            },
            "progress": asdict(progress),
            "data": at.data,
            "spikes": at.spikes,
            "update": self.update_choice.decided,
            "held_out": self._held_out,
            "tokenizer": self._context.train_tokens.header.tokenizer_id,
            # Tensor-parallel ranks of one replica draw the same numbers: save one of them.
            "rng": self._context.ranks.gather(at.rng.as_json)[:: self._config.ranks.tensor],
            "param_groups": hyperparameters,
            "precision": self._context.precision,
            "threads": torch.get_num_threads(),
            "config": as_tables(self._config),
            "tokenizer_name": self._context.train_tokens.header.tokenizer,
            "hf_config": self._hf_config,
        }

    def _changes(self, source: Checkpoint) -> Iterator[tuple[str, str]]:
        """Yield (code, warning) for each change since the checkpoint.

        Raises:
            ConfigError: a change makes it a different run.
        """
        if self._context.precision != source.state["precision"]:
            raise ConfigError(
                f"{source.path} was trained with offload.precision = "
                f"{source.state['precision']!r}, but this run uses {self._context.precision!r}"
            )
        tokens = self._context.train_tokens.header
        if tokens.tokenizer_id and source.state["tokenizer"] not in ("", tokens.tokenizer_id):
            raise ConfigError(
                f"{source.path} was trained on tokens of another tokenizer than the data's, "
                f"{tokens.tokenizer}: its tokens would mean something else"
            )
        before, threads = source.state.get("threads"), torch.get_num_threads()
        if before not in (None, threads):
            yield (
                "threads-changed",
                f"torch had {before} threads when {source.path} was saved, and has {threads} now: "
                "losses may now differ in their last digits",
            )
        changed = _changes_since(source, self._config)
        if source.state.get("held_out", self._held_out) != self._held_out:
            changed.append(
                "the held-out tokens: validation losses are not comparable with earlier ones"
            )
        if changed:
            yield "job-changed", f"changed since the checkpoint: {'; '.join(changed)}"

    # ---- save

    def begin(self, progress: Progress) -> None:
        """Begin to save the state after this step unless that was begun already; training continues
        during the writes. A full disk does not end a run with an earlier valid checkpoint.

        Raises:
            TrainingError: the previous checkpoint, which is finished first, has weights that are
                not finite.
        """
        try:
            self._begin(progress, self.position())
        except CheckpointError as error:
            self._failed(progress.step, error)
        # If writes are synchronous or the model is small, everything is written by now.
        if self._context.ranks.all_gather_host([self.written]).all():
            self.finish(progress)

    def save(self, progress: Progress, at: Position | None = None) -> None:
        """Save the state after this step unless it is already saved, and wait for it.

        Args:
            at: position at the end of the step, after a failure of the device, which also aborts
                a checkpoint that is being written; None: the current position.

        Raises:
            TrainingError: weights are not finite.
            CheckpointError: the disk is full or failing.
        """
        if at is not None and self._writing is not None:
            # The lanes stopped in the middle of a checkpoint: remove it.
            self._writing.give_up()
            self._writing, self._saved_step = None, -1
        self._begin(progress, at or self.position())
        if self._writing is not None:
            self._commit(progress)

    @property
    def written(self) -> bool:
        """True if this rank has written its part of the uncommitted checkpoint."""
        return self._writing is not None and self._writing.written

    def finish(self, progress: Progress) -> None:
        """Wait for the checkpoint that is being written, if any, and commit it.

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
        # One save at a time: the disk is the bottleneck, and each save uses scratch windows.
        self.finish(progress)
        self._log.doing("saving a checkpoint")
        began_s = time.perf_counter()
        versions, first = self.untrained.versions(), self._first_untrained
        self._writing = save.Save(
            self.folder,
            progress.step,
            self._context.model.module,
            self._context.optimizer,
            self._state(progress, at),
            ranks=self._context.ranks,
            changing=[name for name, version in versions.items() if version != first[name]],
        )
        self._saved_step, self._begun_untrained = progress.step, versions
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
        self._log.checkpoint_saved(writing.step, saved)
        if self._context.ranks.rank == 0:
            train = self._config.train
            try:
                checkpoint.prune(self.folder, train.keep_last, train.keep_every)
            except OSError as error:
                self._log.warn("prune-failed", f"old checkpoints were not removed: {error}")
        if not saved.direct and not self._warned_of_page_cache:
            self._warned_of_page_cache = True
            self._log.warn(
                "checkpoint-buffered",
                f"the file system of {self.folder} refuses O_DIRECT: checkpoints go "
                "through the page cache, which counts against the memory limit of a container",
            )

    def _failed(self, step: int, error: CheckpointError) -> None:
        self._saved_step = -1
        self._log.checkpoint_failed(step, error)

    def spoilt(self, problem: str, progress: Progress) -> TrainingError:
        """Return the error of a run in which further steps are useless."""
        # A save that was begun before the problem may be the only valid checkpoint.
        self.finish(progress)
        saved = checkpoint.find(self.folder)
        last = f"the last checkpoint is {saved[0].name}" if saved else "there is no checkpoint yet"
        advice = ADVICE[self._context.precision]
        if not self._config.offload.skip_nonfinite:
            again = "Resume from it" if saved else "Start again"
            advice = f"{again} with offload.skip_nonfinite = true, or: {advice}"
        return TrainingError(f"{problem}. It was not saved; {last}. {advice}.")


_STRUCTURAL = tuple(f"model.{key}" for key in (*field_kinds(ModelShape), "lora"))
"""Keys of a job that define its model. The folder of `model.hf` may have moved."""


def _changes_since(checkpoint: Checkpoint, job: Config) -> list[str]:
    """Return "key: old -> new" for every key of the job that changed.

    Raises:
        ConfigError: the job is of another model.
    """
    before, hf = checkpoint.state["hf_config"], job.hf
    if (before is None) != (hf is None):
        how = "without model.hf" if before is None else "from a model.hf"
        raise ConfigError(f"{checkpoint.path} is of another model: it was trained {how}")
    if hf is not None and identity_of(before) != hf.identity:
        raise ConfigError(
            f"{checkpoint.path} is of another model: its config.json is not that of model.hf = "
            f"{hf.hf!r}"
        )
    changed = _differences(with_defaults(checkpoint.state["config"]), as_tables(job))
    if structural := [line for line in changed if line.startswith(_STRUCTURAL)]:
        raise ConfigError(f"{checkpoint.path} is of another model: {'; '.join(structural)}")
    return changed


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return "key: old -> new" for every leaf that differs; lists and tuples are equal."""
    changes: list[str] = []
    for key, value in now.items():
        before = saved.get(key)
        if isinstance(value, Mapping):
            nested = before if isinstance(before, Mapping) else {}
            changes += _differences(nested, value, f"{prefix}{key}.")
        elif before != (list(value) if isinstance(value, tuple) else value):
            changes.append(f"{prefix}{key}: {before} -> {value}")
    return changes


Versions = Mapping[str, tuple[int, int]]
"""Name → (id, version) of the tensor, which changes with its values."""


class Untrained:
    """The tensors of a model in a checkpoint that are not optimizer state.

    Attributes:
        buffers: names of tensors that a forward may change.
    """

    def __init__(self, model: nn.Module, optimizer: save.OffloadedState) -> None:
        self._tables: dict[str, tuple[dict[str, Any], str]] = {}
        for name in save.untrained(model, optimizer):
            prefix, _, leaf = name.rpartition(".")
            module = model.get_submodule(prefix)
            table = module._parameters if leaf in module._parameters else module._buffers
            self._tables[name] = table, leaf
        self.buffers = tuple(name for name, tensor in self if not _frozen(tensor))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor)."""
        return ((name, table[leaf]) for name, (table, leaf) in self._tables.items())

    def versions(self, names: Iterable[str] | None = None) -> Versions:
        """Return the versions of the named tensors; None: of all tensors."""
        chosen = (
            (name, *self._tables[name]) for name in (self._tables if names is None else names)
        )
        return {name: (id(table[x]), table[x]._version) for name, table, x in chosen}

    def replace(self, name: str, value: Tensor) -> None:
        """Set a tensor of the model to these values, on the host."""
        table, leaf = self._tables[name]
        value = value.to(table[leaf].dtype).view(table[leaf].shape)
        frozen = _frozen(table[leaf])
        table[leaf] = nn.Parameter(value, requires_grad=False) if frozen else value


def _frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)
