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

[Note: Shards in a checkpoint]
Each rank writes what it holds into files of its own, all of them into one folder, which their hosts
share; rank 0 writes the rest, and commits once every rank has said that its files are there. A
tensor is known by the name of its parameter and, where it is not all of it, by its range of
elements in the order of the parameter's memory: any number of ranks reads what any number wrote.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from offloadtrain.hardware import atomic_io
from offloadtrain.runtime.process_group import ALONE, UNTRAINED, Extent, Ranks
from offloadtrain.train.checkpoint import disk_space, tensor_file
from offloadtrain.train.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    STATE,
    VERSION,
    CheckpointError,
    DamagedCheckpointError,
    NotFiniteError,
    digest_of,
    file_entry,
    read_manifest,
    verify_file,
)

GROUP_BYTES = 1 << 30

_COMPLETE = re.compile(r"step-(\d{8})")
_UNFINISHED = re.compile(r"step-\d{8}\.tmp-\w+|\.trash-.*")

Tensors = dict[str, torch.Tensor]


class OffloadedState(Protocol):
    """What a checkpoint needs of an optimizer: state of trained parameters, and `UNTRAINED` of what
    it holds shards of beside them. Tensors are views of host memory, not copies.

    Where an extent is not the whole parameter, its tensors are 1-D.
    """

    param_groups: list[dict[str, Any]]

    def extents(self) -> Mapping[str, Extent]: ...
    def named_state(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]: ...
    def load_named_state(
        self, name: str, state: Mapping[str, torch.Tensor], *, lo: int | None = None
    ) -> None: ...


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
    ranks: Ranks = ALONE,
) -> Saved:
    """Write `folder/step-<step>`; see [Note: Commit protocol] and [Note: Shards in a checkpoint].

    The optimizer must be synchronized, and nothing may change it before this returns. Every rank
    calls this, and every rank fails if one does.

    Args:
        state: what is not a tensor; must survive JSON; rank 0's is kept.
        group_bytes: a file holds whole parameters, and ends when it has reached this size.

    Raises:
        NotFiniteError: there are weights that are not finite.
        CheckpointError: the disk is full or failing, or the step was saved before. In all cases
            what was written is removed again, and older checkpoints are untouched.
    """
    started = time.perf_counter()
    final = folder / f"step-{step:08d}"
    unfinished = ranks.broadcast_object(folder / f"{final.name}.tmp-{secrets.token_hex(4)}")
    try:
        with _together(ranks, final):
            if ranks.rank == 0:
                _make(unfinished)
        with _together(ranks, final):
            disk_space.require(folder, tensor_bytes(model, optimizer, ranks), ranks)
            files, described = _write(unfinished, model, optimizer, ranks, group_bytes)
        of_ranks = ranks.gather((files, described))
        with _together(ranks, final):
            if ranks.rank == 0:
                manifest = _manifest(step, model, optimizer, of_ranks)
                _commit(unfinished, final, manifest, state)
    except BaseException:
        if ranks.rank == 0:
            _remove_quietly(unfinished)
        raise
    num_bytes = sum(record.num_bytes for files, _ in of_ranks for record in files.values())
    return Saved(final, num_bytes, time.perf_counter() - started)


@contextmanager
def _together(ranks: Ranks, final: Path) -> Iterator[None]:
    """What fails here on one rank fails on all of them."""
    failed: Exception | None = None
    message = None
    try:
        yield
    except CheckpointError as error:
        failed, message = error, str(error)
    except OSError as error:
        failed, message = error, _save_failure(final, error)
    kind = NotFiniteError if isinstance(failed, NotFiniteError) else CheckpointError
    for rank, (other, kind_there) in enumerate(ranks.gather((message, kind))):
        if other is not None:
            where = "" if ranks.is_single else f"rank {rank}: "
            raise kind_there(where + other) from failed


def _make(unfinished: Path) -> None:
    os.makedirs(unfinished.parent, 0o700, exist_ok=True)
    clean(unfinished.parent)
    os.mkdir(unfinished, 0o700)


def prune(folder: Path, keep_last: int) -> list[Path]:
    """Remove all but the newest `keep_last` checkpoints and return what was removed.

    Call it after a save. At least 2 stay: the newest may turn out to be damaged.
    """
    if keep_last < 2:
        raise ValueError(f"keep_last = {keep_last} must be at least 2: one may be damaged")
    superseded = find(folder)[keep_last:]
    for path in superseded:
        trash = folder / f".trash-{path.name}"
        atomic_io.rename_folder(path, trash)
        atomic_io.remove_folder(trash)
    return superseded


def clean(folder: Path) -> None:
    """Remove what an interrupted save or prune left. Only for the one who may write `folder`."""
    for path in unfinished(folder):
        atomic_io.remove_folder(path)


def unfinished(folder: Path) -> list[Path]:
    """What an interrupted save or prune left: the next save begins with `clean`."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [folder / name for name in sorted(names) if _UNFINISHED.fullmatch(name)]


def find(folder: Path) -> list[Path]:
    """Return the completely written checkpoints, newest first; not verified."""
    if not os.path.isdir(folder):  # Path.is_dir raises for some names
        return []
    names = (name for name in os.listdir(folder) if _COMPLETE.fullmatch(name))
    return [folder / name for name in sorted(names, reverse=True)]


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def newest_good(
    folder: Path,
    on_damaged: Callable[[Path, DamagedCheckpointError], None],
    ranks: Ranks = ALONE,
) -> Checkpoint | None:
    """Return the newest checkpoint that verifies, or None; reports each damaged one it passes.

    Every rank calls this and gets the same answer.

    Raises:
        CheckpointError: the newest was written by a newer version of the format. It is good, so
            it is not passed over for an older one.
    """
    for path in ranks.broadcast_object(find(folder)):
        try:
            return verify(path, ranks)
        except DamagedCheckpointError as damage:
            on_damaged(path, damage)
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it neither counts nor is in the way of a new one."""
    target = path.with_name(f"damaged-{path.name}-{secrets.token_hex(4)}")
    atomic_io.rename_folder(path, target)
    return target


def verify(path: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """Read every file of a checkpoint once, on one of the ranks, and compare it with the manifest.

    Raises:
        DamagedCheckpointError: a file is missing, unreadable, cut short or changed.
        CheckpointError: a newer version of the format.
    """
    damaged: DamagedCheckpointError | None = None
    try:
        manifest = read_manifest(path)
        if manifest["version"] > VERSION:
            raise CheckpointError(
                f"{path} has checkpoint format version {manifest['version']}; this offloadtrain "
                f"reads up to version {VERSION}. Use the version of offloadtrain that wrote it, or "
                "newer."
            )
        for name, expected in sorted(manifest["files"].items())[ranks.rank :: ranks.size]:
            verify_file(path / name, expected)
    except DamagedCheckpointError as error:
        damaged = error
    of_ranks = ranks.gather(None if damaged is None else str(damaged))
    if message := next(filter(None, of_ranks), None):
        raise DamagedCheckpointError(message) from damaged
    state = json.loads((path / STATE).read_bytes())
    return Checkpoint(path, manifest["step"], manifest, state)


def restore(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: OffloadedState) -> None:
    """Load the tensors of a verified checkpoint, one parameter at a time.

    The caller ends it with the optimizer's `finish_load`.

    Raises:
        CheckpointError: the checkpoint is of another model; nothing was loaded.
    """
    _check_same_model(checkpoint, model, optimizer)
    untrained, extents = _untrained(model, optimizer), optimizer.extents()
    for name, pieces in _by_file(checkpoint.manifest).items():
        wanted = {piece: kinds for piece, kinds in pieces.items() if _touches(piece, extents)}
        if not wanted:
            continue
        with safe_open(checkpoint.path / name, framework="pt") as file, torch.no_grad():
            for (owner, lo, _), kinds in wanted.items():
                loaded = {kind: file.get_tensor(f"{kind}/{owner}") for kind in kinds}
                if owner in extents:
                    optimizer.load_named_state(owner, loaded, lo=lo)
                else:
                    _part(untrained[owner], lo, loaded[UNTRAINED]).copy_(loaded[UNTRAINED])


def _part(whole: torch.Tensor, lo: int | None, piece: torch.Tensor) -> torch.Tensor:
    """Where in a dense tensor a piece that begins at element `lo` belongs; None: all of it."""
    if lo is None:
        return whole
    return whole.as_strided((whole.numel(),), (1,))[lo : lo + piece.numel()]


_Piece = tuple[str, int | None, int | None]
"""Owner, first element, and the one behind the last; None: all of it."""


def _touches(piece: _Piece, extents: Mapping[str, Extent]) -> bool:
    owner, lo, hi = piece
    own = extents.get(owner)
    return own is None or lo is None or hi is None or (lo < own.hi and own.lo < hi)


def fingerprint(model: torch.nn.Module, optimizer: OffloadedState) -> str:
    """Return a hash of the sorted names and shapes of everything a checkpoint of it holds."""
    return _fingerprint_of(_shapes(model, optimizer))


# ---- writing


_Files = dict[str, atomic_io.FileRecord]
_Described = list[dict[str, Any]]


def _write(
    folder: Path,
    model: torch.nn.Module,
    optimizer: OffloadedState,
    ranks: Ranks,
    group_bytes: int,
) -> tuple[_Files, _Described]:
    """Write this rank's tensors; return its files and what they hold."""
    files: _Files = {}
    described: _Described = []
    extents, of_rank = optimizer.extents(), "" if ranks.is_single else f"r{ranks.rank:03d}-"
    owned = _finite(_owned(model, optimizer, ranks))
    for number, group in enumerate(_groups(owned, group_bytes)):
        name = f"tensors-{of_rank}{number:05d}.safetensors"
        files[name] = atomic_io.write_file(folder / name, tensor_file.file_parts(group))
        described += [_description(name, key, tensor, extents) for key, tensor in group.items()]
    atomic_io.sync_folder(folder)
    return files, described


def _manifest(
    step: int,
    model: torch.nn.Module,
    optimizer: OffloadedState,
    of_ranks: Sequence[tuple[_Files, _Described]],
) -> dict[str, Any]:
    """Without its hash, and without the file of the state."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "fingerprint": fingerprint(model, optimizer),
        "files": {name: file_entry(one) for files, _ in of_ranks for name, one in files.items()},
        "tensors": [entry for _, described in of_ranks for entry in described],
    }


def _commit(
    unfinished: Path, final: Path, manifest: dict[str, Any], state: Mapping[str, Any]
) -> None:
    """Write state and manifest, and give the folder its name."""
    text = json.dumps(state, indent=1).encode()
    manifest["files"][STATE] = file_entry(atomic_io.write_file(unfinished / STATE, [text]))
    manifest["sha256"] = digest_of(manifest)
    atomic_io.write_file(unfinished / MANIFEST, [json.dumps(manifest, indent=1).encode()])
    atomic_io.sync_folder(unfinished)
    atomic_io.rename_folder(unfinished, final)


def _description(
    file: str, key: str, tensor: torch.Tensor, extents: Mapping[str, Extent]
) -> dict[str, Any]:
    kind, owner = key.split("/", 1)
    dtype = tensor_file.dtype_name(key, tensor.dtype)
    entry = {"name": owner, "kind": kind, "dtype": dtype, "shape": [*tensor.shape], "file": file}
    extent = extents.get(owner)
    if extent is not None and not extent.whole:
        entry |= {"range": [extent.lo, extent.hi], "of": [*extent.shape]}
    return entry


def _owned(
    model: torch.nn.Module, optimizer: OffloadedState, ranks: Ranks
) -> Iterator[tuple[str, Tensors]]:
    """Yield (owner, its tensors by kind): what this rank holds of trained parameters, then, on rank
    0, all other state."""
    extents = optimizer.extents()
    for name, state in optimizer.named_state():
        if extents[name].whole or extents[name].lo < extents[name].hi:
            yield name, dict(state)
    if ranks.rank:
        return
    for name, tensor in _untrained(model, optimizer).items():
        yield name, {UNTRAINED: tensor}


_WEIGHTS = ("master", "weight")
"""The kinds of tensors that hold a trained weight, or its upper half."""


def _finite(owned: Iterator[tuple[str, Tensors]]) -> Iterator[tuple[str, Tensors]]:
    """Let through what a run can go on from; no copy is made.

    Raises:
        NotFiniteError: naming the first parameter with a weight that is not finite.
    """
    for owner, tensors in owned:
        for weight in (tensors[kind] for kind in _WEIGHTS if kind in tensors):
            if weight.numel() and not torch.stack(torch.aminmax(weight)).isfinite().all():
                raise NotFiniteError(f"the weights of {owner} are not finite")
        yield owner, tensors


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
    trained = optimizer.extents()
    found: Tensors = {name: p for name, p in model.named_parameters() if name not in trained}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def tensor_bytes(model: torch.nn.Module, optimizer: OffloadedState, ranks: Ranks) -> int:
    """What this rank writes into a checkpoint."""
    owned = _owned(model, optimizer, ranks)
    return sum(tensor.nbytes for _, tensors in owned for tensor in tensors.values())


def _save_failure(final: Path, error: OSError) -> str:
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return f"{final} exists already; a checkpoint is never overwritten"
    reason = error.strerror or str(error)
    return f"{final.name} could not be saved in {final.parent}: {reason}. Older ones are intact."


def _remove_quietly(folder: Path) -> None:
    with suppress(OSError):  # then `clean` does it, before the next save
        atomic_io.remove_folder(folder)


# ---- reading


def _by_file(manifest: Mapping[str, Any]) -> dict[str, dict[_Piece, list[str]]]:
    """Return file -> piece -> kinds."""
    files: dict[str, dict[_Piece, list[str]]] = {}
    for entry in manifest["tensors"]:
        pieces = files.setdefault(entry["file"], {})
        piece = (entry["name"], *entry.get("range", (None, None)))
        pieces.setdefault(piece, []).append(entry["kind"])
    return files


def _shapes(model: torch.nn.Module, optimizer: OffloadedState) -> dict[str, list[int]]:
    trained = {name: [*extent.shape] for name, extent in optimizer.extents().items()}
    return trained | {name: [*x.shape] for name, x in _untrained(model, optimizer).items()}


def _fingerprint_of(shapes: Mapping[str, list[int]]) -> str:
    return sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest()


def _check_same_model(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: OffloadedState
) -> None:
    mine = _shapes(model, optimizer)
    if _fingerprint_of(mine) == checkpoint.manifest["fingerprint"]:
        return
    tensors = checkpoint.manifest["tensors"]
    saved = {entry["name"]: entry.get("of", entry["shape"]) for entry in reversed(tensors)}
    names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
    lines = [f"  {n}: {_shape(saved, n)} in the checkpoint, {_shape(mine, n)} here" for n in names]
    more = [f"  and {len(names) - 5} more"] if len(names) > 5 else []
    raise CheckpointError(
        f"{checkpoint.path} is of another model: {len(names)} names or shapes differ.\n"
        + "\n".join(lines[:5] + more)
    )


def _shape(shapes: Mapping[str, list[int]], name: str) -> str:
    return "x".join(map(str, shapes[name])) or "scalar" if name in shapes else "absent"
