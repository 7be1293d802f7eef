"""The memory that a window of a file is read into: the tensors themselves where the disk can write
there.

[Note: Scattered reads]
One read fills several memories one after the other. Tensors that lie in memory as they lie in the
file, with the same padding between them, are filled where they are, padding included, and hashed
there: a copy would take twice as long as the hash. The rest goes through scratch memory and is
copied: less than a block at the ends of each buffer, tensors on a device, bytes that only another
rank needs. So a tensor holds bytes before they are verified; see `read`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from offloadtrain.hardware.direct_io import BLOCK, MEMORY_ALIGN, padded

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
        if run and not _goes_on(run[-1], target):
            yield run
            run = []
        if target.memory.device.type == "cpu":
            run.append(target)
    if run:
        yield run


def _goes_on(before: Target, target: Target) -> bool:
    same = before.memory.untyped_storage().data_ptr() == target.memory.untyped_storage().data_ptr()
    return same and before.delta == target.delta and 0 <= target.lo - before.hi < _LARGEST_GAP


def _view(first: Target, lo: int, hi: int) -> memoryview | None:
    """View the memory of [lo, hi) of the file, from a run that begins with `first`; None: the disk
    cannot write there."""
    if (first.delta + lo) % MEMORY_ALIGN:
        return None
    offset = first.memory.storage_offset() + lo - first.lo
    return first.memory.as_strided((hi - lo,), (1,), offset).numpy().data
