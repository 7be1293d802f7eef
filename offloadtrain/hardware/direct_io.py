"""Files of raw bytes, written and read without the page cache (O_DIRECT) if the disk allows it.

In a container the page cache counts against the memory that training needs, and one thread that
copies into it is slower than the disk. Offsets and lengths are multiples of `BLOCK`; memory is
aligned to `MEMORY_ALIGN`, which is enough for most devices.
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
"""Alignment of offsets and lengths, in bytes."""
MEMORY_ALIGN = 512
"""Alignment of memory, in bytes."""
WINDOW_BYTES = 8 << 20
"""Bytes of one read or write: `THREADS` concurrent operations of this size reach the disk's full
speed."""
THREADS = 4

_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """An open file. Several threads may read and write it at the same time.

    Attributes:
        direct: True if the file bypasses the page cache; False if the file system refuses this.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & _DIRECT)

    @classmethod
    def create(cls, path: Path, num_bytes: int) -> DirectFile:
        """Make a new file, and reserve its space if the file system can.

        Raises:
            FileExistsError: if `path` exists; a crash-safe writer never overwrites.
            OSError: if the disk is full or fails; the file may remain.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        return cls(fd)._reserved(num_bytes if num_bytes and _reserves(fd) else 0)

    @classmethod
    def scratch(cls, folder: Path, num_bytes: int) -> DirectFile:
        """Make a nameless file for reading and writing. It is deleted with its last descriptor and
        mapping. Its space is reserved.

        Raises:
            OSError: if the disk is full or fails.
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
        """Map all of a scratch file for reading and writing; the mapping is shared with the
        file."""
        return memoryview(mmap.mmap(self._fd, self.num_bytes))

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._fd).st_size

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data`: (n,) bytes.

        Raises:
            OSError: if the disk is full or fails.
        """
        while len(data):
            written = self._retried(partial(os.pwrite, self._fd, data, offset))
            data, offset = data[written:], offset + written

    def read(self, into: Sequence[memoryview], offset: int) -> int:
        """Fill memories of whole blocks one after another, up to the end of the file; returns the
        number of bytes read."""
        done, left = 0, list(into)
        while left:
            num_read = self._retried(partial(os.preadv, self._fd, left, offset + done))
            done += num_read
            # The end of the file; another read would not be aligned.
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
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _reserved(self, num_bytes: int) -> DirectFile:
        try:
            if num_bytes:
                # One extent if possible, and a full disk fails before the first byte. Before
                # O_DIRECT, which refuses the single bytes that the C library may write.
                os.posix_fallocate(self._fd, 0, num_bytes)
            # After the open: a file system that refuses O_DIRECT in `open` still makes the file.
            self._set_direct(True)
        except BaseException:
            self.close()
            raise
        return self

    def _retried(self, call: Callable[[], int]) -> int:
        """Run `call`; if a device refuses this memory or length, run it again without O_DIRECT."""
        # Read before the call: a refusal in another thread may turn O_DIRECT off in the meantime.
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
    """Return True if the file system itself can reserve space. If it cannot (ext3, some network
    file systems), the C library would write into every block, and everything would be written
    twice."""
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
    """Return memory aligned to pages; the default size is a window."""
    return memoryview(mmap.mmap(-1, num_bytes))


def windows(lo: int, hi: int) -> Iterator[tuple[int, int]]:
    """Divide [lo, hi) of a file at the bounds of its windows."""
    while lo < hi:
        end = min(hi, (lo // WINDOW_BYTES + 1) * WINDOW_BYTES)
        yield lo, end
        lo = end


def padded(num_bytes: int) -> int:
    """Round up to whole blocks."""
    return -(-num_bytes // BLOCK) * BLOCK
