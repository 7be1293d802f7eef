"""Files of raw bytes, written and read past the page cache (O_DIRECT) where the disk allows it.

In a container the page cache counts against the memory that training needs, and one thread that
copies into it is slower than the disk. Offsets and lengths are multiples of `BLOCK`; memory starts
on `MEMORY_ALIGN`, which most devices are content with.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from offloadtrain.boundary.safe_open import open_descriptor

BLOCK = 4096
"""Bytes."""
MEMORY_ALIGN = 512
"""Bytes."""
WINDOW_BYTES = 8 << 20
"""Bytes of one read or write: enough for the disk's full speed with `THREADS` of them at once."""
THREADS = 4

_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """An open file. Several threads may read and write it at once.

    Attributes:
        direct: the page cache is passed over; false where the file system refuses it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & _DIRECT)

    @classmethod
    def create(cls, path: Path, num_bytes: int) -> DirectFile:
        """Make a new file, and reserve its space where the file system can.

        Raises:
            FileExistsError: `path` exists; a crash-safe writer never overwrites.
            OSError: the disk is full or failing; the file may remain.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        return cls(fd)._reserved(num_bytes if num_bytes and _reserves(fd) else 0)

    @classmethod
    def scratch(cls, folder: Path, num_bytes: int) -> DirectFile:
        """Make a file to read and write that has no name: it ends with its last descriptor and
        mapping. Its space is reserved.

        Raises:
            OSError: the disk is full or failing.
        """
        fd, name = tempfile.mkstemp(prefix=".offloadtrain-", dir=folder)
        os.unlink(name)
        return cls(fd)._reserved(num_bytes)

    @classmethod
    def open(cls, path: Path) -> DirectFile:
        """Open a regular file for reading; raises the errors of `open_descriptor`."""
        file = cls(open_descriptor(path))
        file._set_direct(True)
        return file

    def mapped(self) -> memoryview:
        """Map all of a scratch file, to read and write, shared with it."""
        return memoryview(mmap.mmap(self._fd, self.num_bytes))

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data`: (n,) bytes.

        Raises:
            OSError: the disk is full or failing.
        """
        while len(data):
            written = self._retried(partial(os.pwrite, self._fd, data, offset))
            data, offset = data[written:], offset + written

    def read(self, into: Sequence[memoryview], offset: int) -> int:
        """Fill memories of whole blocks, one after the other, as far as the file goes; returns the
        bytes read."""
        done, left = 0, list(into)
        while left:
            num_read = self._retried(partial(os.preadv, self._fd, left, offset + done))
            done += num_read
            # The end of the file; a read past it would not be aligned.
            if not num_read or done % BLOCK:
                break
            left = _unfilled(left, num_read)
        return done

    def sync(self) -> None:
        """Make the content durable."""
        os.fsync(self._fd)
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # leaves the page cache

    def close(self) -> None:
        """Close it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _reserved(self, num_bytes: int) -> DirectFile:
        try:
            if num_bytes:
                # One extent where possible, and a full disk is noticed before the first byte.
                # Before O_DIRECT, which refuses the single bytes that the C library may write.
                os.posix_fallocate(self._fd, 0, num_bytes)
            # After the open: a file system that refuses O_DIRECT in `open` still makes the file.
            self._set_direct(True)
        except BaseException:
            self.close()
            raise
        return self

    def _retried(self, call: Callable[[], int]) -> int:
        """Call; without O_DIRECT again where a device refuses this memory or length."""
        # Read before the call: another thread's may be refused, too, and end O_DIRECT meanwhile.
        direct = self.direct
        try:
            return call()
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
        self._set_direct(False)
        return call()

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
            self.direct = on and bool(_DIRECT)
        except OSError as error:  # tmpfs of older kernels, some network file systems
            if error.errno != errno.EINVAL:
                raise
            self.direct = False


def _reserves(fd: int) -> bool:
    """Tell whether the file system itself can reserve space. Where it cannot (ext3, some network
    file systems), the C library would write into every block: everything would be written twice."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:  # not Linux
        return True
    failed = call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(BLOCK)) != 0
    return not (failed and ctypes.get_errno() in (errno.EOPNOTSUPP, errno.ENOSYS))


def _unfilled(memories: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the rest of the memories after their first `count` bytes are filled."""
    left = []
    for memory in memories:
        if count < len(memory):
            left.append(memory[count:])
        count = max(count - len(memory), 0)
    return left


def aligned_buffer(num_bytes: int = WINDOW_BYTES) -> memoryview:
    """Return memory, a window by default, aligned to pages."""
    return memoryview(mmap.mmap(-1, num_bytes))


def windows(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Cut [lo, hi) of a file where its windows begin."""
    while lo < hi:
        end = min(hi, (lo // WINDOW_BYTES + 1) * WINDOW_BYTES)
        yield lo, end
        lo = end


def padded(num_bytes: int) -> int:
    """Round up to whole blocks."""
    return -(-num_bytes // BLOCK) * BLOCK
