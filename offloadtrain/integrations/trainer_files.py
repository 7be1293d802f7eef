"""Optimizer state in a checkpoint of the Trainer, which the plain Trainer resumes from as well.

The plain Trainer loads `optimizer.pt` and `scheduler.pt` if it finds both, and otherwise resumes
with the weights alone and says nothing. Where the state is that of torch's AdamW, `optimizer.pt`
therefore holds its steps and moments, as torch saves them, and the file of the rank the rest: the
master weights. Together they are as large as the whole state in one file. Where it is not,
`optimizer.pt` is there and empty: torch refuses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadtrain.engine import OffloadOptimizer
from offloadtrain.integrations import rank_files
from offloadtrain.optim import AdamW

_NAME = "optimizer.pt"
_OURS = "offloadtrain"
"""A key of `optimizer.pt` that torch ignores. A plain Trainer that writes into the same folder
leaves it out: the files of ranks in that folder are outdated then."""


def reason_against_torch(optimizer: OffloadOptimizer) -> str | None:
    """Return why torch's AdamW cannot take the state over; None if it can."""
    rules = {type(rule) for rule in optimizer._rules}
    if optimizer.ranks.size > 1:
        return f"the state is in shards on {optimizer.ranks.size} ranks"
    if optimizer.config.state.format != "fp32":
        return f"state = {optimizer.config.state.format!r} is not a format of torch's"
    if rules != {AdamW}:
        return f"the update rule is {', '.join(sorted(rule.__name__ for rule in rules))}, not AdamW"
    if optimizer.config.skip_unused:
        return "skip_unused counts the steps of each expert"
    return None


def save(optimizer: OffloadOptimizer, folder: str, *, writes: bool, fused: bool) -> None:
    """Write the state; all ranks call it. No copy of the state is made.

    Args:
        writes: this process writes the files that are the same for all ranks.
        fused: of the AdamW that the plain Trainer makes.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = optimizer.state_dict()
    if reason_against_torch(optimizer) is None:
        masters, moments = _divided(state["state"])
        groups = [_as_torchs(group, fused) for group in state["param_groups"]]
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
        torch.save(shared, Path(folder) / _NAME)
    rank_files.save_state(optimizer, folder, state)


def load(optimizer: OffloadOptimizer, folder: str) -> bool:
    """Load this rank's state; returns False if the folder has that of a plain Trainer.

    Raises:
        CheckpointError: the folder has the state of another number of ranks.
    """
    if not rank_files.has_state(folder):
        return False
    path, moments = Path(folder) / _NAME, {}
    if path.exists():  # earlier releases have written the whole state into the file of the rank
        shared = rank_files.read(path)
        if _OURS not in shared:
            return False
        moments = shared["state"]
    state = rank_files.read_state(optimizer, folder)
    for key, entry in moments.items():
        state["state"][key] |= entry
    optimizer.load_state_dict(state)
    return True


def _divided(
    entries: dict[int, dict[str, Any]],
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
    """Return the master weights, and what torch's AdamW has, with a separate step per parameter:
    torch counts in place."""
    masters = {key: {"master": entry["master"]} for key, entry in entries.items()}
    moments = {
        key: {name: x for name, x in entry.items() if name != "master"}
        | {"step": entry["step"].clone()}
        for key, entry in entries.items()
    }
    return masters, moments


def _as_torchs(group: dict[str, Any], fused: bool) -> dict[str, Any]:
    """Return a parameter group with all keys that torch's has."""
    plain = torch.optim.AdamW([nn.Parameter(torch.zeros(()))], fused=fused or None)
    return plain.param_groups[0] | group
