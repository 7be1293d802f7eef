"""Exports a run as a checkpoint for torch: model, state of its AdamW, and step, as one file of
`torch.save` or as a folder of torch.distributed.checkpoint.

The file is laid out without values first, and then filled through a shared mapping: the host holds
one parameter and its state at a time. A folder is copied from such a file.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.convert.run_import import ADAMS
from offloadtrain.hardware.atomic_io import sync_folder
from offloadtrain.integrations import hf_job
from offloadtrain.integrations.export import sha256, write_checksums
from offloadtrain.optim.update_rules import decay_groups, update_rule
from offloadtrain.train.build import empty_model
from offloadtrain.train.checkpoint.manifest import DTYPES, CheckpointError
from offloadtrain.train.checkpoint.restore import saved_state
from offloadtrain.train.trained_model import SavedRun

MASTER = "master"


def to_torch(saved: SavedRun, out: Path) -> list[str]:
    """Write {"model", "optimizer", "step"}; return remarks for the user.

    "model" is a state dict with fp32 masters of trained parameters; "optimizer" is that of
    `torch.optim.AdamW` or `Adam` over the job's parameter groups, `fused`, which rounds as our
    kernels.

    Raises:
        ConfigError: `out` exists, or the run was not trained with Adam.
        OffloadTrainError: the disk is full or failing; the partial file is removed.
    """
    with _atomic_path(out) as temporary:
        tree = _write(saved, temporary)
        temporary.chmod(0o600)
        digest = sha256(temporary)
    return [f"SHA-256 of {out.name}: {digest}", *_remarks(saved, tree)]


def to_dcp(saved: SavedRun, out: Path) -> list[str]:
    """Write a folder with {"model", "optim", "step"}; return remarks for the user.

    "model" and "optim" are the results of `get_state_dict` for a model and its AdamW, by parameter
    names: `torch.distributed.checkpoint.load` reads them on any number of ranks. During the
    export the disk holds the bytes twice.

    Raises: as `to_torch`.
    """
    with _atomic_path(out) as temporary:
        flat = temporary.with_name("state.pt")
        tree = _write(saved, flat)
        values = torch.load(flat, mmap=True, weights_only=True)
        named = {"model": values["model"], "optim": _by_name(values["optimizer"])}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            state_dict_saver.save(
                {**named, "step": values["step"]}, checkpoint_id=temporary, no_dist=True
            )
        write_checksums(temporary)
    return list(_remarks(saved, tree))


@contextmanager
def _atomic_path(out: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `out`; it is renamed to `out` once complete."""
    if out.exists():
        raise ConfigError(f"{out} exists already: name a new file, or remove it")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as at:
            temporary = Path(at) / out.name
            yield temporary
            os.rename(temporary, out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise OffloadTrainError(f"{out} cannot be written: {error.strerror}") from error
    except CheckpointException as error:  # a BaseException of torch's writer
        why = "; ".join(str(cause) for cause, _ in error.failures.values())
        raise CheckpointError(f"{out} cannot be written: {why}") from error


def _write(saved: SavedRun, path: Path) -> dict[str, Any]:
    """Write the file of `torch.save`; return its content without values."""
    if saved.job.optim.name not in ADAMS:
        raise ConfigError(
            f'the run was trained with optim.name = "{saved.job.optim.name}", whose state '
            "torch.optim.AdamW does not have"
        )
    tree = _laid_out(saved)
    # Allocate all of it: a full disk must fail here, not later at a write to a mapped page.
    with path.open("xb") as file:
        with torch.serialization.skip_data():
            torch.save(tree, file)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    _fill(saved, path)
    return tree


def _by_name(adam: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with parameter names instead of numbers."""
    groups = adam["param_groups"]
    names = [name for group in groups for name in group["param_names"]]
    options = [{key: of[key] for key in of if key != "param_names"} for of in groups]
    return {
        "state": {names[number]: state for number, state in adam["state"].items()},
        "param_groups": [
            {**group, "params": list(of["param_names"])}
            for group, of in zip(options, groups, strict=True)
        ],
    }


def _model(saved: SavedRun) -> nn.Module:
    if saved.job.hf is None:
        return empty_model(saved.job)
    model: nn.Module = hf_job.empty_model(saved.hf_config(), saved.job.hf.lora)
    return model


def _laid_out(saved: SavedRun) -> dict[str, Any]:
    """Return the tree to be written, with tensors whose memory is never touched."""
    model = _model(saved)
    dtypes = {e.name: e.dtype for e in saved.checkpoint.manifest.entries}
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    made: dict[Any, Tensor] = {}
    weights: dict[str, Tensor] = {}
    first = {param: name for name, param in reversed(list(model.named_parameters()))}
    for name, value in model.state_dict(keep_vars=True).items():
        first_name = first.get(value, name)  # tied weights are saved once
        dtype = torch.float32 if first_name in trained else DTYPES[dtypes[first_name]]
        if first_name not in made:
            made[first_name] = torch.empty(value.shape, dtype=dtype, device="cpu")
        weights[name] = made[first_name]
    adam = _adam(saved, model, {param: name for param, name in first.items() if name in trained})
    return {"model": weights, "optimizer": adam, "step": saved.checkpoint.step}


def _adam(saved: SavedRun, model: nn.Module, names: dict[Any, str]) -> dict[str, Any]:
    """Return the state dict of torch's optimizer, with steps but without values of moments."""
    chosen = saved.job.optim
    groups = [
        group | {"params": [(names[param], param) for param in group["params"]]}
        for group in decay_groups(model, saved.job)
    ]
    optimizer = _kind(saved)(
        groups,
        lr=float(saved.checkpoint.state["param_groups"][0]["lr"]),
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
    )
    state_dict = optimizer.state_dict()
    for group in state_dict["param_groups"]:
        group["fused"] = True
    params = [param for group in optimizer.param_groups for param in group["params"]]
    moments = update_rule(saved.job.optim).moments
    state_dict["state"] = {
        key: {"step": torch.tensor(float(saved.checkpoint.step))}
        | {kind: torch.empty(param.shape, dtype=torch.float32, device="cpu") for kind in moments}
        for key, param in enumerate(params)
    }
    return state_dict


def _kind(saved: SavedRun) -> type[torch.optim.Adam]:
    return torch.optim.AdamW if saved.job.optim.name == "adamw" else torch.optim.Adam


def _fill(saved: SavedRun, path: Path) -> None:
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        tree = torch.load(path, mmap=True, weights_only=True)
    weights, adam = tree["model"], tree["optimizer"]
    keys = [name for group in adam["param_groups"] for name in group["param_names"]]
    states = dict(zip(keys, adam["state"].values(), strict=True))
    for name, tensors in saved_state(saved.checkpoint, update_rule(saved.job.optim)):
        weights[name].copy_(tensors.pop(MASTER))
        steps = _expert_steps(saved).get(name, [])
        states[name]["step"].fill_(float(steps[0] if len(steps) == 1 else saved.checkpoint.step))
        for kind, value in tensors.items():
            states[name][kind].copy_(value)
    for name, value in saved.weights(wanted=lambda name: name not in states):
        weights[name].copy_(value)
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # includes the mapping's pages


def _expert_steps(saved: SavedRun) -> dict[str, list[int]]:
    """Return parameter → steps of its experts, for parameters with `skip_unused`."""
    steps: dict[str, list[int]] = saved.checkpoint.state["optimizer"].get("expert_steps", {})
    return steps


def _remarks(saved: SavedRun, tree: dict[str, Any]) -> Iterator[str]:
    groups = tree["optimizer"]["param_groups"]
    if len(groups) > 1:
        decays = " and ".join(f"{group['weight_decay']:g}" for group in groups)
        yield (
            f'optim.decay = "{saved.job.optim.decay}": the optimizer has two groups, parameters of '
            f"two and more dimensions, then the others, with weight_decay {decays}"
        )
    state = saved.job.offload.state.format
    if state != "fp32":
        yield f'offload.state = "{state}": moments have its precision'
    stacked = [steps for steps in _expert_steps(saved).values() if len(steps) > 1]
    if any(set(steps) != {saved.checkpoint.step} for steps in stacked):
        yield (
            f"offload.skip_unused: {len(stacked)} tensors of stacked experts have steps from "
            f"{min(map(min, stacked))} to {max(map(max, stacked))}; torch has one for each tensor, "
            f"{saved.checkpoint.step}"
        )
    yield f"step {saved.checkpoint.step} as the state of torch.optim.{_kind(saved).__name__}"
