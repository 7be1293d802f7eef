"""Checkpoints: written atomically, verified before anything is loaded, resumed exactly.

A checkpoint is a folder `step-00001200` of safetensors files (masters and moments, bounded groups
of parameters per file; then buffers and parameters that are not trained), `state.json` (everything
else a run needs to go on) and `manifest.json` (size and hash of every file, name, dtype and shape
of every tensor, and its own hash). There is no pickle in it.

[Note: Commit protocol]
Files are written and fsynced in `step-….tmp-<id>`, the manifest last; then the folder is fsynced,
renamed and its parent fsynced. Only after that may older checkpoints be pruned. So at any instant
the newest folder whose name is complete is whole, and a crash costs at most what was being written.
Disks also lie, so a checkpoint is trusted only after its hashes were verified; if they do not hold,
the one before it is used.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from offloadtrain import durable, tensor_file, units
from offloadtrain.errors import OffloadTrainError

FORMAT = "offloadtrain-checkpoint"
VERSION = 1
GROUP_BYTES = 1 << 30
MANIFEST, STATE = "manifest.json", "state.json"

_COMPLETE = re.compile(r"step-(\d{8})")
_UNFINISHED = re.compile(r"step-\d{8}\.tmp-\w+|\.trash-.*")

Tensors = dict[str, torch.Tensor]


class CheckpointError(OffloadTrainError):
    """A checkpoint cannot be written, or does not belong to this model or version."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, cut short or changed; an older one may be good."""


class OffloadedState(Protocol):
    """What a checkpoint needs of an optimizer; tensors are views of host memory, not copies."""

    param_groups: list[dict[str, Any]]

    def named_state(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]: ...
    def load_named_state(self, name: str, state: Mapping[str, torch.Tensor]) -> None: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files were all verified."""

    path: Path
    step: int
    manifest: Mapping[str, Any]
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Saved:
    path: Path
    num_bytes: int
    seconds: float


def save(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: OffloadedState,
    state: Mapping[str, Any],
    *,
    group_bytes: int = GROUP_BYTES,
) -> Saved:
    """Write `folder/step-<step>`; see [Note: Commit protocol].

    The optimizer must be synchronized, and nothing may change it before this returns.

    Args:
        state: what is not a tensor; must survive JSON.
        group_bytes: a file holds whole parameters, and ends when it has reached this size.

    Raises:
        CheckpointError: the disk is full or failing, or the step was saved before. What was
            written is removed again; older checkpoints are untouched.
    """
    started = time.perf_counter()
    final = folder / f"step-{step:08d}"
    unfinished = folder / f"{final.name}.tmp-{secrets.token_hex(4)}"
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        clean(folder)
        _check_space(folder, _tensor_bytes(model, optimizer))
        os.mkdir(unfinished, 0o700)
        num_bytes = _write(unfinished, step, model, optimizer, state, group_bytes)
        durable.rename_folder(unfinished, final)
    except OSError as error:
        _remove_quietly(unfinished)
        raise CheckpointError(_save_failure(final, error)) from error
    except BaseException:
        _remove_quietly(unfinished)
        raise
    return Saved(final, num_bytes, time.perf_counter() - started)


def prune(folder: Path, keep_last: int) -> list[Path]:
    """Remove all but the newest `keep_last` checkpoints and return what was removed.

    Call it after a save. At least 2 stay: the newest may turn out to be damaged.
    """
    if keep_last < 2:
        raise ValueError(f"keep_last = {keep_last} must be at least 2: one may be damaged")
    superseded = find(folder)[keep_last:]
    for path in superseded:
        trash = folder / f".trash-{path.name}"
        durable.rename_folder(path, trash)
        durable.remove_folder(trash)
    return superseded


def clean(folder: Path) -> None:
    """Remove what an interrupted save or prune left. Only for the one who may write `folder`."""
    for name in sorted(os.listdir(folder)):
        if _UNFINISHED.fullmatch(name):
            durable.remove_folder(folder / name)


def find(folder: Path) -> list[Path]:
    """Return the completely written checkpoints, newest first; not verified."""
    if not folder.is_dir():
        return []
    names = (name for name in os.listdir(folder) if _COMPLETE.fullmatch(name))
    return [folder / name for name in sorted(names, reverse=True)]


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def newest_good(
    folder: Path, on_damaged: Callable[[Path, DamagedCheckpointError], None]
) -> Checkpoint | None:
    """Return the newest checkpoint that verifies, or None; reports each damaged one it passes.

    Raises:
        CheckpointError: the newest was written by a newer version of the format. It is good, so
            it is not passed over for an older one.
    """
    for path in find(folder):
        try:
            return verify(path)
        except DamagedCheckpointError as damage:
            on_damaged(path, damage)
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it neither counts nor is in the way of a new one."""
    target = path.with_name(f"damaged-{path.name}-{secrets.token_hex(4)}")
    durable.rename_folder(path, target)
    return target


def verify(path: Path) -> Checkpoint:
    """Read every file of a checkpoint once and compare it with the manifest.

    Raises:
        DamagedCheckpointError: a file is missing, unreadable, cut short or changed.
        CheckpointError: a newer version of the format.
    """
    manifest = _read_manifest(path)
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format version {manifest['version']}; this offloadtrain reads "
            f"up to version {VERSION}. Use the version of offloadtrain that wrote it, or newer."
        )
    for name, expected in manifest["files"].items():
        _verify_file(path / name, expected)
    state = json.loads((path / STATE).read_bytes())
    return Checkpoint(path, manifest["step"], manifest, state)


def restore(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: OffloadedState) -> None:
    """Load the tensors of a verified checkpoint, one parameter at a time.

    The caller ends it with the optimizer's `finish_load`.

    Raises:
        CheckpointError: the checkpoint is of another model; nothing was loaded.
    """
    _check_same_model(checkpoint, model, optimizer)
    untrained = _untrained(model, optimizer)
    for name, owners in _by_file(checkpoint.manifest).items():
        with safe_open(checkpoint.path / name, framework="pt") as file, torch.no_grad():
            for owner, kinds in owners.items():
                loaded = {kind: file.get_tensor(f"{kind}/{owner}") for kind in kinds}
                if "untrained" in loaded:
                    untrained[owner].copy_(loaded["untrained"])
                else:
                    optimizer.load_named_state(owner, loaded)


def fingerprint(model: torch.nn.Module, optimizer: OffloadedState) -> str:
    """Return a hash of the sorted names and shapes of everything a checkpoint of it holds."""
    return _fingerprint_of(_shapes(model, optimizer))


# ---- writing


def _write(
    folder: Path,
    step: int,
    model: torch.nn.Module,
    optimizer: OffloadedState,
    state: Mapping[str, Any],
    group_bytes: int,
) -> int:
    """Write all files into an empty folder and return their total size."""
    files: dict[str, durable.FileRecord] = {}
    described: list[dict[str, Any]] = []
    for number, group in enumerate(_groups(_owned(model, optimizer), group_bytes)):
        name = f"tensors-{number:05d}.safetensors"
        files[name] = durable.write_file(folder / name, tensor_file.file_parts(group))
        described += [_description(name, key, tensor) for key, tensor in group.items()]
    files[STATE] = durable.write_file(folder / STATE, [json.dumps(state, indent=1).encode()])
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "fingerprint": fingerprint(model, optimizer),
        "files": {name: _file_entry(record) for name, record in files.items()},
        "tensors": described,
    }
    manifest["sha256"] = _digest(manifest)
    last = durable.write_file(folder / MANIFEST, [json.dumps(manifest, indent=1).encode()])
    durable.sync_folder(folder)
    return last.num_bytes + sum(record.num_bytes for record in files.values())


def _owned(model: torch.nn.Module, optimizer: OffloadedState) -> Iterator[tuple[str, Tensors]]:
    """Yield (owner, its tensors by kind): trained parameters first, then all other state."""
    for name, state in optimizer.named_state():
        yield name, dict(state)
    for name, tensor in _untrained(model, optimizer).items():
        yield name, {"untrained": tensor}


def _groups(owned: Iterator[tuple[str, Tensors]], group_bytes: int) -> Iterator[Tensors]:
    """Pack whole owners into files; keys are "kind/owner"."""
    group: Tensors = {}
    for owner, tensors in owned:
        group |= {f"{kind}/{owner}": tensor for kind, tensor in tensors.items()}
        if sum(tensor.nbytes for tensor in group.values()) >= group_bytes:
            yield group
            group = {}
    if group:
        yield group


def _untrained(model: torch.nn.Module, optimizer: OffloadedState) -> Tensors:
    """Return the parameters that the optimizer does not hold, and the persistent buffers."""
    trained = {name for name, _ in optimizer.named_state()}
    found: Tensors = {name: p for name, p in model.named_parameters() if name not in trained}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _description(file: str, key: str, tensor: torch.Tensor) -> dict[str, Any]:
    kind, owner = key.split("/", 1)
    dtype = tensor_file.dtype_name(key, tensor.dtype)
    return {"name": owner, "kind": kind, "dtype": dtype, "shape": [*tensor.shape], "file": file}


def _file_entry(record: durable.FileRecord) -> dict[str, Any]:
    return {"bytes": record.num_bytes, "sha256": record.sha256}


def _digest(manifest: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its own "sha256", whatever its layout as text."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _tensor_bytes(model: torch.nn.Module, optimizer: OffloadedState) -> int:
    return sum(t.nbytes for _, tensors in _owned(model, optimizer) for t in tensors.values())


def _check_space(folder: Path, num_bytes: int) -> None:
    disk = os.statvfs(folder)
    free, needed = disk.f_bavail * disk.f_frsize, int(num_bytes * 1.05) + (1 << 20)
    if free < needed:
        raise CheckpointError(
            f"a checkpoint needs {units.format_bytes(needed)} and {units.format_bytes(free)} is "
            f"free in {folder}. "
            "Older checkpoints are intact. Free some space, or set runs_dir to a larger disk."
        )


def _save_failure(final: Path, error: OSError) -> str:
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return f"{final} exists already; a checkpoint is never overwritten"
    reason = error.strerror or str(error)
    return f"{final.name} could not be saved in {final.parent}: {reason}. Older ones are intact."


def _remove_quietly(folder: Path) -> None:
    with suppress(OSError):  # then `clean` does it, before the next save
        durable.remove_folder(folder)


# ---- reading


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["sha256"] == _digest(manifest) and manifest["format"] == FORMAT:
            return dict(manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path / MANIFEST} cannot be read: {error!r}") from error
    raise DamagedCheckpointError(f"{path / MANIFEST} does not match its own hash")


def _verify_file(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        found = durable.hash_file(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if found.num_bytes != expected["bytes"]:
        raise DamagedCheckpointError(
            f"{path} has {found.num_bytes} bytes, the manifest says {expected['bytes']}"
        )
    if found.sha256 != expected["sha256"]:
        raise DamagedCheckpointError(f"{path} has changed since it was written (sha256 differs)")


def _by_file(manifest: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return file -> owner -> kinds."""
    files: dict[str, dict[str, list[str]]] = {}
    for entry in manifest["tensors"]:
        owners = files.setdefault(entry["file"], {})
        owners.setdefault(entry["name"], []).append(entry["kind"])
    return files


def _shapes(model: torch.nn.Module, optimizer: OffloadedState) -> dict[str, list[int]]:
    return {
        owner: list(next(iter(tensors.values())).shape)
        for owner, tensors in _owned(model, optimizer)
    }


def _fingerprint_of(shapes: Mapping[str, list[int]]) -> str:
    return sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()


def _check_same_model(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: OffloadedState
) -> None:
    mine = _shapes(model, optimizer)
    if _fingerprint_of(mine) == checkpoint.manifest["fingerprint"]:
        return
    saved = {entry["name"]: entry["shape"] for entry in checkpoint.manifest["tensors"]}
    names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
    lines = [f"  {n}: {_shape(saved, n)} in the checkpoint, {_shape(mine, n)} here" for n in names]
    more = [f"  and {len(names) - 5} more"] if len(names) > 5 else []
    raise CheckpointError(
        f"{checkpoint.path} is of another model: {len(names)} names or shapes differ.\n"
        + "\n".join(lines[:5] + more)
    )


def _shape(shapes: Mapping[str, list[int]], name: str) -> str:
    return "x".join(map(str, shapes[name])) or "scalar" if name in shapes else "absent"
