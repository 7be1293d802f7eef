"""The opener of files that others may have written: only regular files, of a bounded size.

A symbolic link could lead anywhere, a FIFO blocks whoever opens it, a device never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class UnsafeFileError(OSError):
    """The path is no regular file, or the file is larger than it may be."""


def open_regular(path: Path, *, max_bytes: int | None = None) -> int:
    """Open a regular file for reading, and return its descriptor. Never blocks.

    Args:
        max_bytes: the largest size that is accepted; None: any.

    Raises:
        UnsafeFileError: a symbolic link, folder, FIFO, socket or device; or too large.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeFileError(errno.ELOOP, "it is a symbolic link") from error
        if error.errno == errno.ENXIO:
            raise UnsafeFileError(errno.ENXIO, "it is not a regular file") from error
        raise
    try:
        _check(os.fstat(fd), max_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a regular file; raises what `open_regular` raises."""
    fd = open_regular(path, max_bytes=max_bytes)
    try:
        found = bytearray()
        # It may grow meanwhile: never more than one byte beyond the limit is read.
        while len(found) <= max_bytes and (piece := os.read(fd, max_bytes + 1 - len(found))):
            found += piece
    finally:
        os.close(fd)
    if len(found) > max_bytes:
        raise UnsafeFileError(errno.EFBIG, f"it has more than {max_bytes} bytes")
    return bytes(found)


def _check(found: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeFileError(errno.EINVAL, "it is not a regular file")
    if max_bytes is not None and found.st_size > max_bytes:
        raise UnsafeFileError(errno.EFBIG, f"it has {found.st_size} bytes, more than {max_bytes}")
