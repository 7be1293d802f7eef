"""The tensors of a rank in its file: where each begins, and the chunks that are hashed.

[Note: The tensor files]
A rank's file holds the flat buffers of its state as they lie in memory, one *region* each, and on
rank 0 the other tensors of the model. Regions start on blocks of 4096 bytes, so that they are
written and read past the page cache, straight from the arena. An *entry* is one tensor, or the part
of it that the rank owns. The *spans* of entries tile the file: padding belongs to the entry before
it. A *chunk* is the part of a span in one window of 8 MiB. Each has a hash, so that a changed byte
anywhere names the tensor. xxh3-128 is against accidents, not against malice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from offloadtrain.engine.saved_state import FlatState, Piece
from offloadtrain.hardware.direct_io import padded, windows
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.process_group import UNTRAINED

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
"""The dtypes that a checkpoint can hold, by torch's names."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file.

    Attributes:
        name: the parameter's, or the buffer's.
        kind: the field of the state, or `UNTRAINED`.
        shape, stride: of the whole parameter.
        lo, hi: the elements of it, in the order of its memory.
        count: the values that stand for them; fewer for scales and packed codes.
        offset: its first byte in the file.
        span: the bytes of the file that its hashes cover.
        digests: one per chunk; empty while they are not known.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    lo: int
    hi: int
    count: int
    file: str
    offset: int
    span: tuple[int, int]
    digests: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.count * DTYPES[self.dtype].itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def chunks(self) -> list[tuple[int, int]]:
        """Return [lo, hi) of each chunk in the file."""
        return list(windows(*self.span))


class Chunk(NamedTuple):
    lo: int
    hi: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class Region:
    """One flat buffer in the file.

    Attributes:
        owner: the bucket that writes it; of other tensors, their name.
        nbytes: without the padding at its end.
    """

    owner: str
    kind: str
    offset: int
    nbytes: int
    chunks: tuple[Chunk, ...]

    @property
    def end(self) -> int:
        """Behind its padding."""
        return self.offset + padded(self.nbytes)

    def within(self, lo: int, hi: int) -> Sequence[Chunk]:
        """Return the chunks in a window, or the region's part of one."""
        first = bisect_left(self.chunks, lo, key=lambda chunk: chunk.lo)
        return self.chunks[first : bisect_left(self.chunks, hi, key=lambda chunk: chunk.lo)]


def lay_out(
    file: str, states: Iterable[FlatState], others: Mapping[str, torch.Tensor]
) -> list[Region]:
    """Lay out a rank's file.

    Raises:
        TypeError: a dtype that a checkpoint cannot hold.
    """
    regions: list[Region] = []
    for flat in (*states, *(_alone(name, tensor) for name, tensor in others.items())):
        if flat.pieces:
            start = regions[-1].end if regions else 0
            regions.append(_region(file, flat, start))
    return regions


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _alone(name: str, tensor: torch.Tensor) -> FlatState:
    """Describe a tensor that is in no bucket: it is saved as a contiguous one."""
    shape, numel = tuple(tensor.shape), tensor.numel()
    piece = Piece(name, shape, dense(shape), 0, numel, 0, numel)
    return FlatState(name, UNTRAINED, name_of(tensor.dtype), numel, (piece,))


def _region(file: str, flat: FlatState, start: int) -> Region:
    if flat.dtype not in DTYPES:
        first = f"{flat.kind}/{flat.pieces[0].name}"
        raise TypeError(f"{first} is torch.{flat.dtype}; a checkpoint can hold {', '.join(DTYPES)}")
    size = DTYPES[flat.dtype].itemsize
    nbytes = flat.numel * size
    begins = [start + piece.start * size for piece in flat.pieces]
    # The first span begins with the region: a shard may begin with padding.
    cuts = [start, *begins[1:], start + padded(nbytes)]
    chunks: list[Chunk] = []
    for at, piece in enumerate(flat.pieces):
        entry = Entry(
            *(piece.name, flat.kind, flat.dtype, piece.shape, piece.stride, piece.lo, piece.hi),
            *(piece.count, file, begins[at], (cuts[at], cuts[at + 1])),
        )
        # An empty span keeps its entry in the list.
        pieces = entry.chunks() or [(cuts[at], cuts[at])]
        chunks += [Chunk(lo, hi, entry) for lo, hi in pieces]
    return Region(flat.bucket, flat.kind, start, nbytes, tuple(chunks))
