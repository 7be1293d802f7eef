"""The optimizer's state in a framework's checkpoint folder, as one file per rank.

[Note: Checkpoints of the Trainer]
The plain Trainer loads `optimizer.pt` and `scheduler.pt` if it finds both; otherwise it silently
resumes with the weights alone. If torch's AdamW can hold the state, `optimizer.pt`
therefore contains the steps and moments in torch's format, and the rank's file contains the
master weights. Together they are as large as the complete state in one file. If torch's AdamW
cannot, `optimizer.pt` exists but is empty, so that torch refuses it.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadtrain.config.errors import OffloadTrainError, broken
from offloadtrain.engine import OffloadOptimizer
from offloadtrain.integrations import torch_optimizers
from offloadtrain.optim import AdamW

_RANK_FILE = "offload_rank{}_of_{}.pt"
_TRAINER_FILE = "optimizer.pt"
_OURS = "offloadtrain"
"""A key of `optimizer.pt` that torch ignores. If a plain Trainer writes into the same folder,
the key is missing, which shows that the files of ranks there are outdated."""


class CheckpointError(OffloadTrainError):
    """A checkpoint folder does not fit this run."""


def save_state(
    optimizer: OffloadOptimizer,
    folder: str | os.PathLike[str],
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write this rank's state; all ranks must call it. Makes no copy of the state.

    Args:
        state: state to write; default: the optimizer's.
    """
    path = _path(optimizer, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(optimizer.state_dict() if state is None else state, path)


def load_state(optimizer: OffloadOptimizer, folder: str | os.PathLike[str]) -> None:
    """Load this rank's state; raises what `read_state` raises."""
    optimizer.load_state_dict(read_state(optimizer, folder))


def read_state(optimizer: OffloadOptimizer, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return this rank's state; see `read_file`.

    Raises:
        CheckpointError: the folder has no state, or that of a different number of ranks.
    """
    path = _path(optimizer, folder)
    if not path.exists():
        there = sorted(file.name for file in Path(folder).glob(_RANK_FILE.format("*", "*")))
        raise CheckpointError(
            f"'{folder}' has no {path.name}, and has {', '.join(there) or 'no state of offload'}: "
            "a checkpoint resumes on the number of ranks that wrote it"
        )
    return read_file(path)


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a file; its tensors are memory-mapped, without a second copy.

    Raises:
        CheckpointError: the file is damaged; its checksums, which torch ignores, are verified here.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if (member := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"the checksum of {member} is another one")
        state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # zipfile and torch raise many classes, depending on the damage
        reason = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError(f"'{path}' cannot be read ({reason}): take another one") from error
    return state


def _path(optimizer: OffloadOptimizer, folder: str | os.PathLike[str]) -> Path:
    ranks = optimizer.ranks
    return Path(folder) / _RANK_FILE.format(ranks.rank, ranks.size)


def reason_against_torch(optimizer: OffloadOptimizer) -> str | None:
    """Return why torch's AdamW cannot load the state; None if it can."""
    rules = {type(rule) for rule in optimizer._rules}
    names, config = ", ".join(sorted(rule.__name__ for rule in rules)), optimizer.config
    reasons = broken(
        (
            optimizer.ranks.size > 1,
            f"the state is in shards on {optimizer.ranks.size} ranks",
        ),
        (
            config.state.format != "fp32",
            f"state = {config.state.format!r} is not a format of torch's",
        ),
        (rules != {AdamW}, f"the update rule is {names}, not AdamW"),
        (config.skip_unused, "skip_unused counts the steps of each expert"),
    )
    return reasons[0] if reasons else None


def save_for_trainer(
    optimizer: OffloadOptimizer, folder: str, *, writes: bool, fused: bool
) -> None:
    """Write the state; all ranks must call it. Makes no copy of the state.

    Args:
        writes: this process writes the files that are equal for all ranks.
        fused: the plain Trainer would create a fused AdamW.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = optimizer.state_dict()
    if reason_against_torch(optimizer) is None:
        masters, moments = _divided(state["state"])
        # Includes all keys of torch's parameter groups.
        plain = torch.optim.AdamW([nn.Parameter(torch.zeros(()))], fused=fused or None)
        groups = [plain.param_groups[0] | group for group in state["param_groups"]]
        shared = {
            "state": moments,
            "param_groups": groups,
            _OURS: "the masters are in the file of the rank",
        }
        state["state"] = masters
    else:
        refusal = "written by OffloadTrainer, which alone can resume from this checkpoint"
        shared = {"state": {}, "param_groups": [], _OURS: refusal}
    if writes:
        torch.save(shared, Path(folder) / _TRAINER_FILE)
    save_state(optimizer, folder, state)


def load_for_trainer(optimizer: OffloadOptimizer, folder: str) -> bool:
    """Load this rank's state, or that of a plain Trainer's optimizer; return False if the folder
    has neither, for example if only the model was saved.

    Raises:
        CheckpointError: the folder has the state of a different number of ranks.
        EngineError: it has the state of another optimizer.
    """
    path = Path(folder) / _TRAINER_FILE
    # Earlier releases wrote the complete state into the rank's file.
    shared: dict[str, Any] = read_file(path) if path.exists() else {"state": {}, _OURS: ""}
    if _OURS not in shared:
        steps = json.loads((Path(folder) / "trainer_state.json").read_text())["global_step"]
        torch_optimizers.complete(shared, optimizer, step=steps)
        optimizer.load_state_dict(shared)
        return True
    if not any(Path(folder).glob(_RANK_FILE.format("*", "*"))):  # for any number of ranks
        return False
    moments = shared["state"]
    state = read_state(optimizer, folder)
    for key, entry in moments.items():
        state["state"][key] |= entry
    optimizer.load_state_dict(state)
    return True


def _divided(
    entries: dict[int, dict[str, Any]],
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """Return (master weights, state of torch's AdamW). The latter has a separate step tensor per
    parameter, since torch increments it in place."""
    masters = {key: {"master": entry["master"]} for key, entry in entries.items()}
    moments = {
        key: {name: x for name, x in entry.items() if name != "master"}
        | {"step": entry["step"].clone()}
        for key, entry in entries.items()
    }
    return masters, moments
