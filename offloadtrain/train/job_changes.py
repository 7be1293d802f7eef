"""The changes of a job between a checkpoint and its resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.hf_model import identity_of
from offloadtrain.config.job import Config, as_tables
from offloadtrain.config.model_shape import ModelShape
from offloadtrain.config.toml import field_kinds
from offloadtrain.train.checkpoint.checkpoint import Checkpoint

_STRUCTURAL = tuple(f"model.{key}" for key in (*field_kinds(ModelShape), "lora"))
"""Keys of a job that make it another model. The folder of `model.hf` may have moved."""


def changes_since(found: Checkpoint, job: Config) -> list[str]:
    """Return "key: old -> new" for every key of the job that changed.

    Raises:
        ConfigError: it is a job of another model.
    """
    _check_same_hf(found, job)
    changed = _differences(found.state["config"], as_tables(job))
    if structural := [line for line in changed if line.startswith(_STRUCTURAL)]:
        raise ConfigError(f"{found.path} is of another model: {'; '.join(structural)}")
    return changed


def _check_same_hf(found: Checkpoint, job: Config) -> None:
    before, hf = found.state["hf_config"], job.hf
    if (before is None) != (hf is None):
        how = "without model.hf" if before is None else "from a model.hf"
        raise ConfigError(f"{found.path} is of another model: it was trained {how}")
    if hf is not None and identity_of(before) != hf.identity:
        raise ConfigError(
            f"{found.path} is of another model: its config.json is not that of model.hf = {hf.hf!r}"
        )


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
