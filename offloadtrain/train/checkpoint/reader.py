"""Tensors out of a checkpoint's files, each byte read once and verified where it is read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from offloadtrain.hardware.direct_io import (
    BLOCK,
    THREADS,
    WINDOW_BYTES,
    DirectFile,
    aligned_buffer,
    padded,
)
from offloadtrain.train.checkpoint.layout import Chunk, Entry
from offloadtrain.train.checkpoint.manifest import DamagedCheckpointError


class Reading(NamedTuple):
    """Bytes [lo, hi) of a tensor.

    Attributes:
        target: (hi - lo,) uint8 on any device; None: verify only.
    """

    entry: Entry
    lo: int
    hi: int
    target: torch.Tensor | None = None

    @classmethod
    def whole(cls, entry: Entry, target: torch.Tensor | None = None) -> Reading:
        return cls(entry, 0, entry.nbytes, target)

    def chunks(self) -> list[tuple[Chunk, str]]:
        """Return the chunks that hold these bytes, with their hashes; of a whole tensor all, with
        its padding."""
        entry = self.entry
        first = entry.span[0] if self.lo == 0 else entry.offset + self.lo
        last = entry.span[1] if self.hi == entry.nbytes else entry.offset + self.hi
        pairs = zip(entry.chunks(), entry.digests, strict=True)
        return [(Chunk(lo, hi, entry), d) for (lo, hi), d in pairs if lo < last and first < hi]


_Part = tuple[Reading, Chunk, str]


def read(folder: Path, readings: Iterable[Reading]) -> None:
    """Read from the files of a checkpoint into the targets.

    Raises:
        DamagedCheckpointError: naming the tensor whose bytes have changed, or the file that cannot
            be read. Targets are undefined then.
    """
    of_files: dict[str, list[Reading]] = {}
    for reading in readings:
        of_files.setdefault(reading.entry.file, []).append(reading)
    with ThreadPoolExecutor(THREADS, "offloadtrain-checkpoint") as pool:
        for file, wanted in sorted(of_files.items()):
            _read_file(folder / file, wanted, pool)


def _read_file(path: Path, readings: Sequence[Reading], pool: ThreadPoolExecutor) -> None:
    windows: dict[int, list[_Part]] = {}
    for reading in readings:
        for chunk, digest in reading.chunks():
            windows.setdefault(chunk.lo // WINDOW_BYTES, []).append((reading, chunk, digest))
    try:
        file = DirectFile.open(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    reader = _WindowReader(path, file)
    try:
        # In the order of the file, whose first damage is the one that is told.
        tasks = [pool.submit(reader.read, parts) for _, parts in sorted(windows.items())]
        try:
            for task in tasks:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            # Threads still write into the targets and read from the file.
            for task in tasks:
                task.cancelled() or task.exception()
    finally:
        file.close()


class _WindowReader:
    """Reads windows of one file on several threads, each through memory of its own."""

    def __init__(self, path: Path, file: DirectFile) -> None:
        self._path = path
        self._file = file
        self._scratch = threading.local()

    def read(self, parts: Sequence[_Part]) -> None:
        """Read and verify the chunks of one window, and hand their bytes out."""
        first = min(chunk.lo for _, chunk, _ in parts) // BLOCK * BLOCK
        last = max(chunk.hi for _, chunk, _ in parts)
        memory = self._filled(first, last)
        for reading, chunk, digest in parts:
            data = memory[chunk.lo - first : chunk.hi - first]
            if xxhash.xxh3_128_hexdigest(data) != digest:
                entry = chunk.entry
                raise DamagedCheckpointError(
                    f"{self._path} has changed since it was written: {entry.kind} of "
                    f"'{entry.name}', in bytes {chunk.lo} to {chunk.hi} of the file (xxh3-128)"
                )
            _hand_out(reading, chunk, data)

    def _filled(self, lo: int, hi: int) -> memoryview:
        if not hasattr(self._scratch, "window"):
            self._scratch.window = aligned_buffer()
        memory: memoryview = self._scratch.window[: padded(hi - lo)]
        try:
            found = self._file.read(memory, lo)
        except OSError as error:
            raise DamagedCheckpointError(
                f"{self._path} cannot be read: {error.strerror}"
            ) from error
        if found < hi - lo:
            raise DamagedCheckpointError(f"{self._path} ends at byte {lo + found}")
        return memory


def _hand_out(reading: Reading, chunk: Chunk, data: memoryview) -> None:
    start = reading.entry.offset
    lo, hi = max(chunk.lo, start + reading.lo), min(chunk.hi, start + reading.hi)
    target, at = reading.target, start + reading.lo
    if target is None or lo >= hi:
        return
    source = np.frombuffer(data[lo - chunk.lo : hi - chunk.lo], np.uint8)
    # NumPy copies without the interpreter's lock, and on this thread only.
    if target.device.type == "cpu":
        np.copyto(target[lo - at : hi - at].numpy(), source)
    else:
        target[lo - at : hi - at].copy_(torch.from_numpy(source))
