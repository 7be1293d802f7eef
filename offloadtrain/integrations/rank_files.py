"""The optimizer's state in a framework's checkpoint folder: a file per rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine import OffloadOptimizer

_NAME = "offload_rank{}_of_{}.pt"


class CheckpointError(OffloadTrainError):
    """A checkpoint folder does not fit this run."""


def save_state(
    optimizer: OffloadOptimizer,
    folder: str | os.PathLike[str],
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write this rank's state; all ranks call it. No copy of the state is made.

    Args:
        state: in place of the optimizer's.
    """
    path = _path(optimizer, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(optimizer.state_dict() if state is None else state, path)


def has_state(folder: str | os.PathLike[str]) -> bool:
    """Tell whether `save_state` has written there, on any number of ranks."""
    return any(Path(folder).glob(_NAME.format("*", "*")))


def load_state(optimizer: OffloadOptimizer, folder: str | os.PathLike[str]) -> None:
    """Load this rank's state; raises as `read_state`."""
    optimizer.load_state_dict(read_state(optimizer, folder))


def read_state(optimizer: OffloadOptimizer, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return this rank's state, see `read`.

    Raises:
        CheckpointError: the folder has no state, or that of another number of ranks.
    """
    path = _path(optimizer, folder)
    if not path.exists():
        there = sorted(file.name for file in Path(folder).glob(_NAME.format("*", "*")))
        raise CheckpointError(
            f"'{folder}' has no {path.name}, and has {', '.join(there) or 'no state of offload'}: "
            "a checkpoint resumes on the number of ranks that wrote it"
        )
    return read(path)


def read(path: Path) -> dict[str, Any]:
    """Return what a file holds; the file's pages hold the tensors: no second copy in memory."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return state


def _path(optimizer: OffloadOptimizer, folder: str | os.PathLike[str]) -> Path:
    ranks = optimizer.ranks
    return Path(folder) / _NAME.format(ranks.rank, ranks.size)
