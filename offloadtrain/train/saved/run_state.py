"""The contents of a checkpoint beside tensors: all that the rest of a run depends on.

`saved_state.py` checks what was read of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.hf_model import identity_of, read_config
from offloadtrain.config.job import Config, as_tables
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.toml import field_kinds
from offloadtrain.parallel.unused_experts import merged_steps
from offloadtrain.train.build import TrainingContext
from offloadtrain.train.checkpoint.checkpoint import Checkpoint
from offloadtrain.train.progress import Progress
from offloadtrain.train.saved import rng
from offloadtrain.train.spikes import Spikes

_STRUCTURAL = tuple(f"model.{key}" for key in (*field_kinds(ModelShape), "lora"))
"""Keys of a job that make it another model. The folder of `model.hf` may have moved."""


@dataclass(frozen=True, slots=True)
class Position:
    """The end of a step: the next one begins with these random states, at this place in the
    data, and compares its loss with these."""

    rng: rng.Snapshot
    data: Mapping[str, Any]
    spikes: Mapping[str, Any]


class RunState:
    """The state of a run outside of its tensors: collected for a checkpoint, and loaded."""

    def __init__(self, config: Config, context: TrainingContext, spikes: Spikes) -> None:
        self._config, self._spikes = config, spikes
        self._ranks, self._precision = context.ranks, context.precision
        self._optimizer, self._batches = context.optimizer, context.batches
        self._tokens, self._val_tokens = context.train_tokens.header, context.val_tokens
        self._hf_config = None if config.hf is None else read_config(config.hf.folder)

    def here(self) -> Position:
        """Return the position of the run now; between steps it is the end of the last one."""
        return Position(rng.snapshot(), self._batches.state_dict(), self._spikes.state_dict())

    def at(self, progress: Progress, at: Position) -> Mapping[str, Any]:
        """Return what a checkpoint at this position keeps. A collective."""
        hyperparameters = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        return {
            "optimizer": {
                "step": progress.step,
                "scaler": self._optimizer.scaler_state(),
                # Only where experts are skipped: earlier versions know no such key.
                **({"expert_steps": steps} if (steps := self._expert_steps()) else {}),
            },
            "progress": asdict(progress),
            "data": at.data,
            "spikes": at.spikes,
            "held_out": self._held_out(),
            "tokenizer": self._tokens.tokenizer_id,
            # The ranks that hold the parts of matrices draw the same.
            "rng": self._ranks.gather(at.rng.as_json)[:: self._config.ranks.tensor],
            "param_groups": hyperparameters,
            "precision": self._precision,
            "threads": torch.get_num_threads(),
            "config": as_tables(self._config),
            "tokenizer_name": self._tokens.tokenizer,
            "hf_config": self._hf_config,
        }

    def _expert_steps(self) -> dict[str, list[int]]:
        """Return the steps of all experts, of those that are skipped where they are unused. Where
        there are any, a collective: ranks may hold different ones."""
        if not self._config.offload.skip_unused:
            return {}
        return merged_steps(self._ranks.gather(self._optimizer.expert_steps))

    def _held_out(self) -> str | None:
        """Return the hash of the validation tokens."""
        return None if self._val_tokens is None else self._val_tokens.header.content

    def load(self, found: Checkpoint) -> None:
        """Go on as the checkpoint says, with its data, random numbers and losses."""
        state, ranks = found.state, self._ranks
        self._batches.load_state_dict(state["data"])
        self._spikes.load_state_dict(state["spikes"])
        replica = ranks.rank // self._config.ranks.tensor
        if replica < len(state["rng"]):
            rng.restore(state["rng"][replica])
        else:  # a new rank: numbers that no other rank draws
            rng.seed_all(self._config.train.seed + replica + found.step * ranks.size)

    def changes(self, found: Checkpoint) -> Iterator[tuple[str, str]]:
        """Yield (code, warning) for what has changed since the checkpoint.

        Raises:
            ConfigError: the changes make it another run.
        """
        if self._precision != found.state["precision"]:
            raise ConfigError(
                f"{found.path} was trained with offload.precision = {found.state['precision']!r}, "
                f"but this run uses {self._precision!r}"
            )
        tokenizer_id = self._tokens.tokenizer_id
        if tokenizer_id and found.state["tokenizer"] not in ("", tokenizer_id):
            raise ConfigError(
                f"{found.path} was trained on tokens of another tokenizer than the data's, "
                f"{self._tokens.tokenizer}: its tokens would mean something else"
            )
        before, threads = found.state.get("threads"), torch.get_num_threads()
        if before not in (None, threads):
            yield (
                "threads-changed",
                f"torch had {before} threads when {found.path} was saved, and has {threads} now: "
                "losses may now differ in their last digits",
            )
        changed = _changes_since(found, self._config)
        if found.state.get("held_out", self._held_out()) != self._held_out():
            changed.append(
                "the held-out tokens: validation losses are not comparable with earlier ones"
            )
        if changed:
            yield "job-changed", f"changed since the checkpoint: {'; '.join(changed)}"


def _changes_since(checkpoint: Checkpoint, job: Config) -> list[str]:
    """Return "key: old -> new" for every key of the job that changed.

    Raises:
        ConfigError: it is a job of another model.
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
    changed = _differences(checkpoint.state["config"], as_tables(job))
    if structural := [line for line in changed if line.startswith(_STRUCTURAL)]:
        raise ConfigError(f"{checkpoint.path} is of another model: {'; '.join(structural)}")
    return changed


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return "key: old -> new" for every leaf that differs; lists and tuples are alike."""
    changes: list[str] = []
    for key, value in now.items():
        before = saved.get(key)
        if isinstance(value, Mapping):
            nested = before if isinstance(before, Mapping) else {}
            changes += _differences(nested, value, f"{prefix}{key}.")
        elif before != (list(value) if isinstance(value, tuple) else value):
            changes.append(f"{prefix}{key}: {before} -> {value}")
    return changes
