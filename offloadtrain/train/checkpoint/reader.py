"""Tensors out of a checkpoint's files, each byte read once and verified where it is read.

[Note: Scattered reads]
One read fills several memories one after the other. Tensors that lie in memory as they lie in the
file, with the same padding between them, are filled where they are, padding included, and hashed
there: a copy would take twice as long as the hash. The rest goes through scratch memory and is
copied: less than a block at the ends of each buffer, tensors on a device, bytes that only another
rank needs. So a tensor holds bytes before they are verified; see `read`.
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
"""Bytes of padding between two parameters of a buffer: less than `spec.ALIGN` elements."""
_MOST_RUNS = 256
"""One read takes 1024 memories."""


class Target(NamedTuple):
    """Memory for the bytes [lo, hi) of a file: (hi - lo,) uint8, on any device."""

    lo: int
    hi: int
    memory: torch.Tensor

    @property
    def delta(self) -> int:
        """The address of byte 0 of the file, if all of it lay there."""
        return self.memory.data_ptr() - self.lo


class Piece(NamedTuple):
    """Memory of a part of a window, from the byte `lo` of the file on.

    Attributes:
        in_place: it is that of the targets; otherwise scratch.
    """

    lo: int
    memory: memoryview
    in_place: bool

    @property
    def hi(self) -> int:
        return self.lo + len(self.memory)

    def within(self, lo: int, hi: int) -> memoryview:
        """Return its part of [lo, hi) of the file, which may be empty."""
        return self.memory[max(lo - self.lo, 0) : max(hi - self.lo, 0)]


def scatter(first: int, last: int, targets: Iterable[Target], scratch: memoryview) -> list[Piece]:
    """Cut the blocks [first, last) of a file into pieces, in order.

    Args:
        targets: in the order of the file.
        scratch: at least last - first bytes, aligned.
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
    """Yield targets on the host that lie in memory as in the file, together."""
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
    """View the memory of [lo, hi) of the file, from a run that begins with `first`; None: the disk
    cannot write there."""
    if (first.delta + lo) % MEMORY_ALIGN:
        return None
    offset = first.memory.storage_offset() + lo - first.lo
    return first.memory.as_strided((hi - lo,), (1,), offset).numpy().data


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
    def all_of(cls, entry: Entry, target: torch.Tensor | None = None) -> Reading:
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
    """Read from the files of a checkpoint into the targets; see [Note: Scattered reads].

    Raises:
        DamagedCheckpointError: naming the tensor whose bytes have changed, or the file that cannot
            be read. Targets are undefined then.
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
            # A large checkpoint takes minutes.
            HEARTBEAT.advance("reading the checkpoint", done_bytes, total_bytes)


def _read_file(path: Path, readings: Sequence[Reading], pool: ThreadPoolExecutor) -> Iterator[int]:
    """Read from one file; yield the bytes of each window, padding included, when it is read."""
    windows: dict[int, list[_Part]] = {}
    for reading in readings:
        for chunk, digest in reading.chunks():
            windows.setdefault(chunk.lo // WINDOW_BYTES, []).append((reading, chunk, digest))
    try:
        file = DirectFile.open(path)
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    reader = _WindowReader(path, file)
    # In the order of the file, so that its first damage is reported.
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
            # Threads still write into the targets and read from the file.
            for task in tasks:
                task.cancelled() or task.exception()


class _WindowReader:
    """Reads windows of one file on several threads, each through memory of its own."""

    def __init__(self, path: Path, file: DirectFile) -> None:
        self._path = path
        self._file = file
        self._scratch = threading.local()

    def read(self, parts: Sequence[_Part]) -> None:
        """Read and verify the chunks of one window, and hand out what was not read in place."""
        pieces = self._filled(parts)
        for reading, chunk, digest in parts:
            computed = xxhash.xxh3_128()
            for piece in pieces:
                # Hashes without the interpreter's lock.
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
            # Mapped, and touched only as far as it is needed.
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
    """Return the memory for what is wanted of a chunk; None: nothing."""
    begin, target = reading.entry.offset + reading.lo, reading.target
    lo, hi = max(chunk.lo, begin), min(chunk.hi, reading.entry.offset + reading.hi)
    if target is None or lo >= hi:
        return None
    return Target(lo, hi, target[lo - begin : hi - begin])


def _copy(piece: Piece, target: Target) -> None:
    """Copy what the piece has of the target."""
    lo, hi = max(piece.lo, target.lo), min(piece.hi, target.hi)
    if lo >= hi:
        return
    source = np.frombuffer(piece.within(lo, hi), np.uint8)
    memory = target.memory[lo - target.lo : hi - target.lo]
    # NumPy copies without the interpreter's lock, and on this thread only.
    if memory.device.type == "cpu":
        np.copyto(memory.numpy(), source)
    else:
        memory.copy_(torch.from_numpy(source))
