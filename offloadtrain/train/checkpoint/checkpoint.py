"""Finds, verifies and prunes the checkpoints in a folder.

A checkpoint is a folder `step-00001200` of one tensor file per rank (`manifest.py`), `state.json`
(all other state of the run) and `manifest.json` (every file, every tensor with its hashes, and its
own hash). It contains no pickle.

[Note: Commit protocol]
Files are written and fsynced in `step-….tmp-<id>`, the manifest last; then the folder is fsynced,
renamed and its parent fsynced. Only after that may older checkpoints be pruned. At any instant the
newest folder with a complete name is therefore complete, and a crash costs at most the checkpoint
being written. Disks can lie, so a checkpoint is trusted only if its hashes match.

[Note: Reading once]
Manifest, sizes and kinds of the files are checked first; a tensor's bytes are checked while they
are loaded. If some of them have changed, the complete previous checkpoint is loaded instead: every
checkpoint holds every tensor, so no value of the damaged one remains.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from offloadtrain.hardware import atomic_io
from offloadtrain.runtime.process_group import ALONE, Ranks
from offloadtrain.train.checkpoint.manifest import (
    CheckpointError,
    DamagedCheckpointError,
    Manifest,
    NotFiniteError,
    read_manifest,
    read_state,
)
from offloadtrain.train.checkpoint.reader import Reading, read

OnDamaged: TypeAlias = Callable[[Path, DamagedCheckpointError], None]
"""Called with each skipped damaged checkpoint and its error."""
_STEP = r"step-(?:\d{8}|[1-9]\d{8,})"
"""From step 100,000,000 on names have more digits, so their alphabetical order is not numeric."""
_COMPLETE = re.compile(_STEP)
_UNFINISHED = re.compile(rf"{_STEP}\.tmp-\w+|\.trash-.*")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint with a verified manifest and state."""

    path: Path
    manifest: Manifest
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.manifest.step


def prune(folder: Path, keep_last: int, keep_every: int = 0) -> list[Path]:
    """Remove all but the newest `keep_last` checkpoints and those of steps that are multiples of
    `keep_every` (0: none); return the removed paths.

    Call it after a save. At least 2 stay: the newest may turn out to be damaged.

    Raises:
        OSError: a checkpoint could not be removed; the remaining ones were still tried.
    """
    if keep_last < 2:
        raise ValueError(f"keep_last = {keep_last} must be at least 2: one may be damaged")
    older = find(folder)[keep_last:]
    superseded = [path for path in older if not keep_every or step_of(path) % keep_every]
    failed: list[OSError] = []
    for path in superseded:
        trash = folder / f".trash-{path.name}-{secrets.token_hex(4)}"
        try:
            atomic_io.rename_folder(path, trash)
            atomic_io.remove_folder(trash)
        except OSError as error:  # remove the remaining ones, or the disk would fill up
            failed.append(error)
    if failed:
        raise failed[0]
    return superseded


def clean(folder: Path) -> None:
    """Remove the remains of an interrupted save or prune. Only the owner of `folder` may call it.

    Remains that cannot be removed stay until the next call and do not prevent a save: a network
    file system keeps files that another process still reads.
    """
    for path in unfinished(folder):
        with suppress(OSError):
            atomic_io.remove_folder(path)


def unfinished(folder: Path) -> list[Path]:
    """Return the remains of an interrupted save or prune; the next save removes them."""
    return sorted(_named(folder, _UNFINISHED))


def find(folder: Path) -> list[Path]:
    """Return the completely written checkpoints, newest first; not verified."""
    return sorted(_named(folder, _COMPLETE), key=step_of, reverse=True)


def _named(folder: Path, form: re.Pattern[str]) -> list[Path]:
    # os.path.isdir, since Path.is_dir raises for some names.
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [folder / name for name in names if form.fullmatch(name)]


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def newest_good(
    folder: Path,
    on_damaged: OnDamaged,
    ranks: Ranks = ALONE,
    *,
    verified: bool = True,
    before: int | None = None,
    accept: Callable[[Checkpoint], None] = lambda _: None,
) -> Checkpoint | None:
    """Return the newest valid checkpoint, or None; report each damaged one that is skipped.

    Every rank calls this and gets the same answer.

    Args:
        verified: read and verify every tensor; False if tensors are verified while loading.
        before: consider only checkpoints of earlier steps.
        accept: raises DamagedCheckpointError if the caller cannot use it; may load it.

    Raises:
        CheckpointError: the newest was written by a newer version of the format. It may be valid,
            so it is not skipped for an older one.
    """
    for name in ranks.broadcast_object([path.name for path in find(folder)]):
        path = folder / name
        if before is not None and step_of(path) >= before:
            continue
        try:
            opened = (verify if verified else open_checkpoint)(path, ranks)
            accept(opened)  # the state is equal on every rank, and so is the decision
            return opened
        except DamagedCheckpointError as damage:
            on_damaged(path, damage)
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is no longer found and does not block a new one."""
    target = path.with_name(f"damaged-{path.name}-{secrets.token_hex(4)}")
    atomic_io.rename_folder(path, target)
    return target


def open_checkpoint(path: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """Read manifest and state, and check names, kinds and sizes of the files; reads no tensor.

    Raises:
        DamagedCheckpointError: a file is missing, unreadable, cut short or not listed, or the
            manifest is of another step.
        CheckpointError: a newer version of the format.
    """

    with together(ranks):
        manifest = read_manifest(path)
        if _COMPLETE.fullmatch(path.name) and manifest.step != step_of(path):
            raise DamagedCheckpointError(f"{path} holds the checkpoint of step {manifest.step}")
        state = read_state(path, manifest)
    return Checkpoint(path, manifest, state)


def verify(path: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """Open a checkpoint and read every tensor once; the ranks divide the tensors.

    Raises:
        DamagedCheckpointError: as `open_checkpoint`, or bytes of a tensor have changed.
        CheckpointError: a newer version of the format.
    """
    opened = open_checkpoint(path, ranks)
    entries = opened.manifest.entries[ranks.rank :: ranks.size]
    with together(ranks):
        read(path, map(Reading.all_of, entries))
    return opened


_KINDS = {kind.__name__: kind for kind in (CheckpointError, NotFiniteError, DamagedCheckpointError)}


@contextmanager
def together(ranks: Ranks, described: Callable[[OSError], str] | None = None) -> Iterator[None]:
    """Make an error of one rank an error of all ranks. Every rank calls this.

    Args:
        described: returns the message of a CheckpointError for an OSError; the message then
            names the rank. None: an OSError is unexpected and stays an error of this rank.
    """
    failed: Exception | None = None
    report: tuple[str, str] | None = None
    try:
        yield
    except CheckpointError as error:
        failed, report = error, (type(error).__name__, str(error))
    except OSError as error:
        if described is None:
            raise
        failed, report = error, (CheckpointError.__name__, described(error))
    for rank, of_rank in enumerate(ranks.gather(report)):
        if of_rank is not None:
            kind, message = of_rank
            where = f"rank {rank}: " if described and not ranks.is_single else ""
            raise _KINDS[kind](where + message) from failed
