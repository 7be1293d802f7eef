"""Check of the disk space for the checkpoints of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from offloadtrain.config.units import format_bytes
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.train.checkpoint.manifest import CheckpointError


def require(
    folder: Path, num_bytes: int, ranks: Ranks, unfinished: Iterable[Path] = ()
) -> tuple[int, int]:
    """Compare the free space in `folder`, which need not exist yet, with the size of a checkpoint.
    Every rank calls this, since all write to one disk.

    Args:
        num_bytes: bytes of this rank's tensors.
        unfinished: folders that the save removes first: their space counts as free.

    Returns:
        (bytes that a checkpoint of all ranks needs, bytes that are free).

    Raises:
        CheckpointError: it does not fit.
    """
    needed = int(int(ranks.all_gather_host([num_bytes]).sum()) * 1.05) + (1 << 20)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk = os.statvfs(there)
    free = disk.f_bavail * disk.f_frsize + sum(map(_held_bytes, unfinished))
    if free < needed:
        raise CheckpointError(
            f"a checkpoint needs {format_bytes(needed)} and {format_bytes(free)} is free in "
            f"{folder}. Older checkpoints are intact. Free some space, or set runs_dir to a larger "
            "disk."
        )
    return needed, free


def _held_bytes(folder: Path) -> int:
    """Return the allocated bytes, which may be less than the size of a truncated file; 0 for what
    is no folder of files."""
    if folder.is_symlink() or not folder.is_dir():
        return 0
    return sum(path.lstat().st_blocks * 512 for path in folder.iterdir())


def shortage(
    folder: Path,
    num_bytes: int,
    ranks: Ranks,
    *,
    there: int,
    saves: int,
    keep_last: int,
    kept: int = 0,
    unfinished: Iterable[Path] = (),
) -> str:
    """Return a sentence on the missing space, "" if there is enough.

    Args:
        there: number of existing checkpoints.
        saves: number of future checkpoints.
        kept: those of them that stay for good.
        unfinished: see `require`.

    Raises:
        CheckpointError: not even one fits.
    """
    needed, free = require(folder, num_bytes, ranks, unfinished)
    at_once = min(saves, keep_last + 1 - min(there, keep_last) + kept)
    if free >= at_once * needed:
        return ""
    return (
        f"{format_bytes(free)} is free in {folder}, which is {free // needed} times the "
        f"{format_bytes(needed)} of a checkpoint, and train.keep_last = {keep_last} takes "
        f"{at_once} times that (a new one is written before the oldest goes): later ones will "
        "fail. Free some space, or set runs_dir to a larger disk"
    )
