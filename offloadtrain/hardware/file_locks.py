"""Locks of files, where the file system keeps any."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

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
