"""One rank's tensor file, written by several threads from the memory of the tensors themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from offloadtrain.hardware.direct_io import (
    MEMORY_ALIGN,
    THREADS,
    DirectFile,
    aligned_buffer,
    windows,
)
from offloadtrain.train.checkpoint.layout import Chunk, Entry, Region
from offloadtrain.train.checkpoint.manifest import NotFiniteError

_WEIGHTS = ("master", "weight")
"""Kinds of tensors that contain a trained weight, or its upper half."""

_EXPONENTS = {
    "float32": (np.uint32, 0x7F800000),
    "bfloat16": (np.uint16, 0x7F80),
    "float16": (np.uint16, 0x7C00),
}
"""dtype → the bits that are all set in values that are not finite."""

_CHECKED = 1 << 17
"""Bytes that are checked at a time: they stay in the cache."""


class Part(NamedTuple):
    """Values [lo, hi) of a region: the windows of the file that begin with one of them.

    Attributes:
        tensor: of any shape and device. It begins with value `lo`, and holds the last window whole.
    """

    region: Region
    tensor: torch.Tensor
    lo: int
    hi: int

    def windows(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield [lo, hi) of each in the file; `size`: bytes of a value."""
        start = self.region.offset
        for lo, hi in windows(start, self.region.end):
            if self.lo * size <= lo - start < self.hi * size:
                yield lo, hi


class TensorWriter:
    """Writes and hashes regions; holds a window of memory per thread, and no copy of the state.

    Attributes:
        num_bytes: of the file.
        failure: the first error; nothing more is written then.
    """

    def __init__(self, path: Path, regions: Sequence[Region]) -> None:
        """
        Raises:
            OSError: the file cannot be made, or its disk is full.
        """
        self._regions = regions
        self.num_bytes = regions[-1].end if regions else 0
        self.failure: Exception | None = None
        self._digests: dict[int, str] = {}
        """First byte of a chunk → its hash."""
        self._scratch = threading.local()
        self._file = DirectFile.create(path, self.num_bytes)
        self._pool = ThreadPoolExecutor(THREADS, "offloadtrain-checkpoint")

    @property
    def direct(self) -> bool:
        """The file is written past the page cache."""
        return self._file.direct

    def write(self, parts: Iterable[Part]) -> None:
        """Write parts of regions; returns when the memory of their tensors is read.

        An error is kept in `failure`.
        """
        writes = [
            self._pool.submit(self._write, part.region, flat[lo - start : hi - start], lo, hi)
            for part in parts
            for flat, size in [(_bytes_of(part.tensor), part.tensor.itemsize)]
            for start in [part.region.offset + part.lo * size]
            for lo, hi in part.windows(size)
        ]
        for future in writes:
            future.result()

    def finish(self) -> None:
        """All regions were written: make them durable."""
        try:
            if self.failure is None:
                self._file.sync()
            # Some file systems say only here that the disk is full.
            self.close()
        except OSError as error:
            self.failure = self.failure or error

    def close(self) -> None:
        """Release file and threads. Idempotent."""
        self._pool.shutdown()
        self._file.close()

    def entries(self) -> list[Entry]:
        """Return the entries of the finished file, with their hashes.

        Raises:
            OSError, NotFiniteError: what went wrong.
        """
        if self.failure is not None:
            raise self.failure
        digests_of: dict[Entry, list[str]] = {}
        for region in self._regions:
            for chunk in region.chunks:
                digests = digests_of.setdefault(chunk.entry, [])
                if chunk.lo < chunk.hi:
                    digests.append(self._digests[chunk.lo])
        return [replace(entry, digests=tuple(digests)) for entry, digests in digests_of.items()]

    def _write(self, region: Region, values: torch.Tensor, lo: int, hi: int) -> None:
        if self.failure is not None:
            return
        try:
            memory = self._aligned(values, hi - lo)
            for chunk in region.within(lo, hi):
                data = memory[chunk.lo - lo : chunk.hi - lo]
                self._digests[chunk.lo] = xxhash.xxh3_128_hexdigest(data)
                if region.kind in _WEIGHTS:
                    _require_finite(chunk, data)
            self._file.write(memory, lo)
        except (OSError, NotFiniteError) as error:
            self.failure = self.failure or error

    def _aligned(self, part: torch.Tensor, num_bytes: int) -> memoryview:
        """Return memory that the disk can read: the tensor's own, or a copy with its padding."""
        on_host = part.device.type == "cpu"
        if on_host and part.numel() == num_bytes and part.data_ptr() % MEMORY_ALIGN == 0:
            return part.numpy().data
        if not hasattr(self._scratch, "window"):
            self._scratch.window = aligned_buffer()
        window: memoryview = self._scratch.window[:num_bytes]
        target = torch.frombuffer(window, dtype=torch.uint8)
        # Waits for the copy: from a device, too, it is not asynchronous into pageable memory.
        target[: part.numel()].copy_(part)
        target[part.numel() :].zero_()
        return window


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the values as (n,) uint8; of a tensor that is not contiguous, a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _require_finite(chunk: Chunk, data: memoryview) -> None:
    """Raises NotFiniteError if a weight in the chunk is not finite."""
    entry = chunk.entry
    if entry.dtype not in _EXPONENTS:
        return
    dtype, mask = _EXPONENTS[entry.dtype]
    values = np.frombuffer(data[: max(0, entry.end - chunk.lo)], dtype)
    step = _CHECKED // values.itemsize
    for at in range(0, len(values), step):
        if ((values[at : at + step] & dtype(mask)) == mask).any():
            raise NotFiniteError(f"the weights of {entry.name} are not finite")
