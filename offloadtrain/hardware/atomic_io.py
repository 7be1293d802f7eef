"""File operations that leave either the old or the new state after a crash, never a mixture.

Every operation makes one `os` call per effect, so that a test can kill the process, or let the disk
fail, at each call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a new file durably.

    Args:
        mode: permissions, before the umask.

    Raises:
        FileExistsError: if `path` exists; a crash-safe writer never overwrites.
        OSError: if the disk is full or fails; a part of the file may remain.
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
    """Make a folder and its missing parents, durably and with access only for the owner.

    Raises:
        OSError: if the folder cannot be made.
    """
    if os.path.isdir(folder):
        return
    make_folder(folder.parent)
    with suppress(FileExistsError):  # another process has made it
        os.mkdir(folder, 0o700)
    sync_folder(folder.parent)


def rename_folder(source: Path, target: Path) -> None:
    """Rename a folder atomically and durably within its parent.

    Raises:
        OSError: if `target` exists and is not empty, or the disk fails.
    """
    os.rename(source, target)
    sync_folder(target.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder and its contents, or a file; do nothing if the path is missing. A link is
    removed but not followed, because it may lead to files of another user."""
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
