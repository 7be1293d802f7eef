"""Samples of memory several times a second, in a file of fixed size next to the log.

[Note: The ring file]
`events/rank000.ring` holds the newest CAPACITY samples of a rank. All numbers are little-endian.

    header, 64 bytes      magic b"OTMEMRNG", u32 version, u32 bytes of a slot, u32 slots, u64 Unix
                          nanoseconds of the beginning, zeros
    slot i, 112 bytes     u64 number, f64 Unix seconds, i64 step, 9 x i64 bytes (`QUANTITIES`, -1:
                          not known), 12 zeros, u32 CRC-32 of the 108 bytes before

Sample n, from 1, is in slot (n - 1) % slots. The writer overwrites a slot by one call and never
waits; a reader that meets a slot half written sees it by its checksum, and reads it again next
time. A new start of the run begins a new file of the same name; a reader sees it by its beginning,
since its inode may be that of the old file.
"""

from __future__ import annotations

import math
import os
import struct
import time
import zlib
from dataclasses import astuple, dataclass
from pathlib import Path

from offloadtrain.boundary.safe_open import UnsafeFileError, open_descriptor

QUANTITIES = (
    "allocated", "reserved", "inactive", "free", "pinned", "rss", "available", "swap",
    "page_cache",
)  # fmt: skip
MAGIC, VERSION, CAPACITY = b"OTMEMRNG", 1, 1024
_HEADER = struct.Struct("<8sIIIQ36x")
_BODY = struct.Struct("<Qdq9q12x")
_SLOT_BYTES = _BODY.size + 4
FILE_BYTES = _HEADER.size + CAPACITY * _SLOT_BYTES
_FORM = (MAGIC, VERSION, _SLOT_BYTES, CAPACITY)
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """One sample, in bytes; None: not known.

    Attributes:
        step: the step in progress.
        allocated: tensors of torch's allocator on the device.
        reserved: device memory of torch's allocator, including its cache.
        inactive: free parts of reserved segments that other tensors keep in place: fragmentation.
        free: free device memory as the driver reports it, all processes considered.
        pinned: page-locked host memory of this process.
        rss: resident memory of this process.
        available: of the host, under every limit.
        swap, page_cache: of the host, used.
    """

    time_s: float
    step: int
    allocated: int | None = None
    reserved: int | None = None
    inactive: int | None = None
    free: int | None = None
    pinned: int | None = None
    rss: int | None = None
    available: int | None = None
    swap: int | None = None
    page_cache: int | None = None


class RingWriter:
    """Writes a new ring file; the calls are those of one thread."""

    def __init__(self, path: Path) -> None:
        """Replace the file. Readers of the file of an earlier start keep reading that file.

        Raises:
            UnsafeFileError, OSError: it cannot be written.
        """
        path.unlink(missing_ok=True)
        self._fd = open_descriptor(path, flags=os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.posix_fallocate(self._fd, 0, FILE_BYTES)  # a disk that fills later does not matter
        os.pwrite(self._fd, _HEADER.pack(*_FORM, time.time_ns()), 0)
        self._number = 0

    def write(self, point: MemoryPoint) -> None:
        """Write the next sample.

        Raises:
            OSError: the disk refuses.
        """
        self._number += 1
        slot = (self._number - 1) % CAPACITY
        time_s, step, *sizes = astuple(point)
        known = (_UNKNOWN if size is None else size for size in sizes)
        body = _BODY.pack(self._number, time_s, step, *known)
        data = body + struct.pack("<I", zlib.crc32(body))
        os.pwrite(self._fd, data, _HEADER.size + slot * _SLOT_BYTES)

    def close(self) -> None:
        os.close(self._fd)


class RingReader:
    """Reads the samples that are new since the last call."""

    def __init__(self, path: Path) -> None:
        """The file is opened by `poll`, which may find none."""
        self._path = path
        self._beginning = -1
        self._next = 1

    def poll(self) -> list[MemoryPoint]:
        """Return new samples, the oldest first; at most CAPACITY.

        Raises:
            UnsafeFileError: it is not a ring file of this version.
            OSError: it cannot be read; FileNotFoundError: there is none.
        """
        fd = open_descriptor(self._path, max_bytes=FILE_BYTES)
        try:
            header = os.pread(fd, _HEADER.size, 0)
            if os.fstat(fd).st_size != FILE_BYTES or _HEADER.unpack(header)[:4] != _FORM:
                raise UnsafeFileError(self._path, f"it is not a ring file of version {VERSION}")
            beginning = _HEADER.unpack(header)[4]
            if beginning != self._beginning:  # the file of another start
                self._beginning, self._next = beginning, 1
            return self._read(fd)
        finally:
            os.close(fd)

    def _read(self, fd: int) -> list[MemoryPoint]:
        """Read on from the next number; read all slots if the writer has lapped the reader."""
        points: list[MemoryPoint] = []
        while (sample := self._at(fd, self._next)) and sample[0] == self._next:
            points.append(sample[1])
            self._next += 1
            if len(points) == CAPACITY:
                return points
        if sample and sample[0] > self._next:
            slots = [self._at(fd, number) for number in range(1, CAPACITY + 1)]
            ordered = sorted((entry for entry in slots if entry), key=lambda entry: entry[0])
            fresh = [entry for entry in ordered if entry[0] >= self._next]
            self._next = fresh[-1][0] + 1 if fresh else self._next
            return [point for _, point in fresh]
        return points

    def _at(self, fd: int, number: int) -> tuple[int, MemoryPoint] | None:
        """Return the sample in the slot of `number`; None: empty, or half written."""
        slot = (number - 1) % CAPACITY
        data = os.pread(fd, _SLOT_BYTES, _HEADER.size + slot * _SLOT_BYTES)
        body = data[: _BODY.size]
        if len(data) != _SLOT_BYTES or data[_BODY.size :] != struct.pack("<I", zlib.crc32(body)):
            return None
        stored, time_s, step, *sizes = _BODY.unpack(body)
        if not stored or not math.isfinite(time_s):
            return None
        return stored, MemoryPoint(time_s, step, *(None if s < 0 else s for s in sizes))
