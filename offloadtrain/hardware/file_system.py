"""Properties of a file system: kind, free space, and locks of files if it supports them."""

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
    if the kernel does not report it."""
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
    """Return the number of bytes that this user may write in the folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a network file system mounted without locks."""

_TRIES, _PAUSE_S = 5, 0.02


def lock(fd: int, how: int) -> bool:
    """Lock an open file as `fcntl.flock` does; return True if this file system supports locks.

    Raises:
        BlockingIOError: with LOCK_NB, if another process has the lock.
    """
    try:
        fcntl.flock(fd, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def take(fd: int) -> bool:
    """Take an open file's lock; retry a few times, because readers have it for microseconds."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True  # also on a file system without locks, where `lock` returns False
        time.sleep(_PAUSE_S)
    return False


def is_at(fd: int, path: Path) -> bool:
    """Return True if the open file is currently at `path`."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(fd))
    return False
