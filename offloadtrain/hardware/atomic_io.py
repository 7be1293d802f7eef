"""File operations that leave either the old or the new state after a crash, never a mixture.

Every operation here is one `os` call per effect, so that a test can kill the process, or make the
disk fail, at each of them in turn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a new file durably.

    Args:
        mode: permissions, less those of the umask.

    Raises:
        FileExistsError: `path` exists; a crash-safe writer never overwrites.
        OSError: the disk is full or failing; a part of the file may remain.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _opened(path, flags, mode) as fd:
        rest = memoryview(content)
        while len(rest):
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder (creations, renames, removals) durable."""
    with _opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        os.fsync(fd)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, durably and for their owner only.

    Raises:
        OSError: it cannot be made.
    """
    if os.path.isdir(folder):
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):  # another process made it meanwhile
        os.mkdir(folder, 0o700)
    sync_folder(folder.parent)


def rename_folder(source: Path, target: Path) -> None:
    """Rename a folder atomically and durably within its parent.

    Raises:
        OSError: `target` exists and is not empty, or the disk fails.
    """
    os.rename(source, target)
    sync_folder(target.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder and what it contains, or a file of that name; do nothing if it is missing. A
    link is removed, too, and not followed: it may lead to files of somebody else."""
    with suppress(FileNotFoundError):
        if os.path.islink(folder) or not os.path.isdir(folder):
            os.unlink(folder)
            return
        for name in sorted(os.listdir(folder)):
            remove_folder(folder / name)
        os.rmdir(folder)


@contextmanager
def _opened(path: Path, flags: int, mode: int = 0) -> Iterator[int]:
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)
