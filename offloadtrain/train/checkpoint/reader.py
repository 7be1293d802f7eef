"""Reads tensors from a checkpoint's files; each byte is read once and verified on reading.

[Note: Scattered reads]
One read fills several memory ranges in sequence. Tensors that lie in memory as they lie in the
file, with the same padding between them, are filled in place, padding included, and hashed
there: a copy would take twice as long as the hash. Everything else goes through scratch memory and
is copied: less than a block at the ends of each buffer, tensors on a device, and bytes that only
another rank needs. So a tensor holds bytes before they are verified; see `read`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from offloadtrain.hardware.direct_io import (
    BLOCK,
    MEMORY_ALIGN,
    WINDOW_BYTES,
    DirectFile,
    aligned_buffer,
    padded,
)
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.thread_pools import shared_pool
from offloadtrain.train.checkpoint.manifest import Chunk, DamagedCheckpointError, Entry

_LARGEST_GAP = 1024
"""Limit in bytes on padding between two parameters of a buffer: below `ALIGN` elements."""
_MOST_RUNS = 256
"""With more runs everything goes through scratch memory: a read takes 1024 memory ranges."""


class Target(NamedTuple):
    """Memory for the bytes [lo, hi) of a file: (hi - lo,) uint8, on any device."""

    lo: int
    hi: int
    memory: torch.Tensor

    @property
    def delta(self) -> int:
        """Address that byte 0 of the file would have if the whole file were mapped here."""
        return self.memory.data_ptr() - self.lo


class Piece(NamedTuple):
    """Memory for a part of a window, from byte `lo` of the file on.

    Attributes:
        in_place: the memory belongs to the targets; False: it is scratch memory.
    """

    lo: int
    memory: memoryview
    in_place: bool

    @property
    def hi(self) -> int:
        return self.lo + len(self.memory)

    def within(self, lo: int, hi: int) -> memoryview:
        """Return the part of the memory for bytes [lo, hi) of the file; it may be empty."""
        return self.memory[max(lo - self.lo, 0) : max(hi - self.lo, 0)]


def scatter(first: int, last: int, targets: Iterable[Target], scratch: memoryview) -> list[Piece]:
    """Divide the bytes [first, last) of a file into pieces of memory, in order.

    Args:
        targets: memory for parts of the file, in file order.
        scratch: aligned memory of at least last - first bytes, for parts not read in place.
    """
    pieces: list[Piece] = []
    at = first
    runs = list(_runs(targets))
    for run in runs if len(runs) <= _MOST_RUNS else []:
        lo, hi = padded(max(run[0].lo, at)), min(run[-1].hi, last) // BLOCK * BLOCK
        memory = _view(run[0], lo, hi) if lo < hi else None
        if memory is None:
            continue
        if at < lo:
            pieces.append(Piece(at, scratch[at - first : lo - first], in_place=False))
        pieces.append(Piece(lo, memory, in_place=True))
        at = hi
    if at < last:
        pieces.append(Piece(at, scratch[at - first : last - first], in_place=False))
    return pieces


def _runs(targets: Iterable[Target]) -> Iterator[Sequence[Target]]:
    """Yield groups of consecutive host targets that lie in memory as they lie in the file."""
    run: list[Target] = []
    for target in targets:
        if run:
            before, storage = run[-1], target.memory.untyped_storage()
            same = before.memory.untyped_storage().data_ptr() == storage.data_ptr()
            same = same and before.delta == target.delta
            if not same or not 0 <= target.lo - before.hi < _LARGEST_GAP:
                yield run
                run = []
        if target.memory.device.type == "cpu":
            run.append(target)
    if run:
        yield run


def _view(first: Target, lo: int, hi: int) -> memoryview | None:
    """View the memory of [lo, hi) of the file, in a run that begins with `first`; None if its
    alignment does not allow direct reads."""
    if (first.delta + lo) % MEMORY_ALIGN:
        return None
    offset = first.memory.storage_offset() + lo - first.lo
    return first.memory.as_strided((hi - lo,), (1,), offset).numpy().data


class Reading(NamedTuple):
    """A request to read bytes [lo, hi) of a tensor.

    Attributes:
        target: (hi - lo,) uint8 on any device; None: verify only.
    """

    entry: Entry
    lo: int
    hi: int
    target: torch.Tensor | None = None

    @classmethod
    def all_of(cls, entry: Entry, target: torch.Tensor | None = None) -> Reading:
        return cls(entry, 0, entry.nbytes, target)

    def chunks(self) -> list[tuple[Chunk, str]]:
        """Return the chunks that overlap these bytes, with their hashes; for a complete tensor all
        chunks, padding included."""
        entry = self.entry
        first = entry.span[0] if self.lo == 0 else entry.offset + self.lo
        last = entry.span[1] if self.hi == entry.nbytes else entry.offset + self.hi
        pairs = zip(entry.chunks(), entry.digests, strict=True)
        return [(Chunk(lo, hi, entry), d) for (lo, hi), d in pairs if lo < last and first < hi]


_Part = tuple[Reading, Chunk, str]


def read(folder: Path, readings: Iterable[Reading]) -> None:
    """Read from the files of a checkpoint into the targets: [Note: Scattered reads].

    Raises:
        DamagedCheckpointError: bytes of a tensor have changed, or a file cannot be read; the
            message names it. The targets are then undefined.
    """
    of_files: dict[str, list[Reading]] = {}
    for reading in readings:
        of_files.setdefault(reading.entry.file, []).append(reading)
    total_bytes = sum(r.hi - r.lo for wanted in of_files.values() for r in wanted)
    done_bytes = 0
    pool = shared_pool("checkpoint")
    for file, wanted in sorted(of_files.items()):
        for read_bytes in _read_file(folder / file, wanted, pool):
            done_bytes = min(done_bytes + read_bytes, total_bytes)
            # Show progress: a large checkpoint takes minutes.
            HEARTBEAT.advance("reading the checkpoint", done_bytes, total_bytes)


def _read_file(path: Path, readings: Sequence[Reading], pool: ThreadPoolExecutor) -> Iterator[int]:
    """Read from one file; yield the bytes of each window, padding included, once it is read."""
    windows: dict[int, list[_Part]] = {}
    for reading in readings:
        for chunk, digest in reading.chunks():
            windows.setdefault(chunk.lo // WINDOW_BYTES, []).append((reading, chunk, digest))
    try:
        file = DirectFile.open(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    reader = _WindowReader(path, file)
    # In file order, so that the first damage in the file is reported.
    ordered = [parts for _, parts in sorted(windows.items())]
    with closing(file):
        tasks = [pool.submit(reader.read, parts) for parts in ordered]
        try:
            for task, parts in zip(tasks, ordered, strict=True):
                task.result()
                yield sum(chunk.hi - chunk.lo for _, chunk, _ in parts)
        finally:
            for task in tasks:
                task.cancel()
            # Wait: running threads still write into the targets and read from the file.
            for task in tasks:
                task.cancelled() or task.exception()


class _WindowReader:
    """Reads windows of one file on several threads, each with its own scratch memory."""

    def __init__(self, path: Path, file: DirectFile) -> None:
        self._path = path
        self._file = file
        self._scratch = threading.local()

    def read(self, parts: Sequence[_Part]) -> None:
        """Read and verify the chunks of one window, and copy what was read into scratch memory."""
        pieces = self._filled(parts)
        for reading, chunk, digest in parts:
            computed = xxhash.xxh3_128()
            for piece in pieces:
                # xxhash releases the GIL.
                computed.update(piece.within(chunk.lo, chunk.hi))
            if computed.hexdigest() != digest:
                entry = chunk.entry
                raise DamagedCheckpointError(
                    f"{self._path} has changed since it was written: {entry.kind} of "
                    f"'{entry.name}', in bytes {chunk.lo} to {chunk.hi} of the file (xxh3-128)"
                )
            target = _target_of(reading, chunk)
            for piece in pieces if target else ():
                if target and not piece.in_place:
                    _copy(piece, target)

    def _filled(self, parts: Sequence[_Part]) -> list[Piece]:
        first = min(chunk.lo for _, chunk, _ in parts) // BLOCK * BLOCK
        last = max(chunk.hi for _, chunk, _ in parts)
        if not hasattr(self._scratch, "window"):
            # Allocated lazily: its pages become resident only as far as they are used.
            self._scratch.window = aligned_buffer()
        wanted = (_target_of(reading, chunk) for reading, chunk, _ in parts)
        targets = sorted(filter(None, wanted), key=lambda target: target.lo)
        pieces = scatter(first, padded(last), targets, self._scratch.window)
        try:
            num_read = self._file.read([piece.memory for piece in pieces], first)
        except OSError as error:
            raise DamagedCheckpointError(
                f"{self._path} cannot be read: {error.strerror}"
            ) from error
        if num_read < last - first:
            raise DamagedCheckpointError(f"{self._path} ends at byte {first + num_read}")
        return pieces


def _target_of(reading: Reading, chunk: Chunk) -> Target | None:
    """Return the target memory of the requested part of a chunk; None if nothing is requested."""
    begin, target = reading.entry.offset + reading.lo, reading.target
    lo, hi = max(chunk.lo, begin), min(chunk.hi, reading.entry.offset + reading.hi)
    if target is None or lo >= hi:
        return None
    return Target(lo, hi, target[lo - begin : hi - begin])


def _copy(piece: Piece, target: Target) -> None:
    """Copy the overlap of a piece with the target."""
    lo, hi = max(piece.lo, target.lo), min(piece.hi, target.hi)
    if lo >= hi:
        return
    source = np.frombuffer(piece.within(lo, hi), np.uint8)
    memory = target.memory[lo - target.lo : hi - target.lo]
    # NumPy releases the GIL and copies on this thread only.
    if memory.device.type == "cpu":
        np.copyto(memory.numpy(), source)
    else:
        memory.copy_(torch.from_numpy(source))
