"""What a file system has: its kind, its free space, and locks of files, where it keeps any."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds whose files are in host memory."""


def kind_of(folder: Path) -> str:
    """Return the kind, such as "ext4" or "tmpfs", by the longest mount point above the folder; ""
    where the kernel does not tell."""
    mounts, resolved = Path("/proc/self/mountinfo"), folder.resolve()
    best, kind = Path(), ""
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        before, _, after = line.partition(" - ")
        # The kernel writes blanks and backslashes in octal.
        octal = before.split()[4].encode("latin-1", "backslashreplace")
        point = Path(octal.decode("unicode_escape"))
        # Later lines are mounted over earlier ones.
        if resolved.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, after.split()[0]
    return kind


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may write there."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a network file system that is mounted without locks."""

_TRIES, _PAUSE_S = 5, 0.02


def lock(fd: int, how: int) -> bool:
    """Lock an open file as `fcntl.flock` does; return whether this file system keeps locks.

    Raises:
        BlockingIOError: with LOCK_NB, somebody else has it.
    """
    try:
        fcntl.flock(fd, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def take(fd: int) -> bool:
    """Take an open file's lock; retry a few times, because readers hold it for microseconds."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True  # also on a file system without locks, where `lock` returns False
        time.sleep(_PAUSE_S)
    return False


def is_at(fd: int, path: Path) -> bool:
    """Return whether the open file is the one that is at `path` now."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False
