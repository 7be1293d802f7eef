"""Locks of files, where the file system keeps any."""

from __future__ import annotations

import errno
import fcntl

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What a network file system says that is mounted without locks."""


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
