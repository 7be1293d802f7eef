"""The state of one bucket in each format, and the layout of its parameters.

[Note: State formats]
`fp32`, 12 bytes per parameter: master weights and both moments.
`split16`, 6 + 2 bytes: the fp32 master's bits in two halves. The upper half, rounded, is the bf16
working weight and is uploaded from there; the lower half is the signed remainder, so that the
master is exact. Moments are bf16, rounded stochastically. fp16 weights cannot do this: the
remainder of a weight below 2^-14 does not fit in 16 bits.
`int8`, 3 + 2 bytes and 8 per block of 128: the working weight (bf16 or fp16) and an 8-bit
correction in units of 1/256 of its last place, rounded stochastically; moments of 8 bits relative
to the largest of their block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offloadtrain.step.formats import SCALE_BLOCK

BLOCK = SCALE_BLOCK
"""Elements that share one scale per 8-bit moment, counted from a parameter's start."""

_PIECE = 1 << 20
"""Elements that plain torch widens at once."""

_HALVES = (torch.bfloat16, torch.float16)


class Fp32State(NamedTuple):
    """All fields are (n,) fp32."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Split16State(NamedTuple):
    """weight, exp_avg, exp_avg_sq (n,) bf16; low (n,) int16: the low half of the master's bits."""

    weight: Tensor
    low: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Int8State(NamedTuple):
    """weight (n,) bf16 or fp16; correction (n,) int8; moments (n,) uint8, and their (ceil(n /
    128),) fp32 scales."""

    weight: Tensor
    correction: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq_scale: Tensor


State = Fp32State | Split16State | Int8State

FIELD_DTYPES: dict[type, tuple[tuple[torch.dtype, ...], ...]] = {
    Fp32State: ((torch.float32,),) * 3,
    Split16State: ((torch.bfloat16,), (torch.int16,), (torch.bfloat16,), (torch.bfloat16,)),
    Int8State: (
        _HALVES,
        (torch.int8,),
        (torch.uint8,),
        (torch.uint8,),
        (torch.float32,),
        (torch.float32,),
    ),
}
"""The allowed dtypes of each field, in field order."""


class Layout:
    """The elements of each parameter in a bucket's flat buffers.

    Attributes:
        table: (parameters, 4) int64 rows of offset, numel, id, first, in the order of the offsets.
        extent: elements up to the end of the last parameter.
        last_id: the largest id; -1 if there is no parameter.
    """

    __slots__ = ("address", "count", "extent", "last_id", "table")

    def __init__(
        self,
        offsets: Sequence[int],
        numels: Sequence[int],
        ids: Sequence[int],
        firsts: Sequence[int] | None = None,
    ) -> None:
        """Describe a bucket, or a shard of one.

        Args:
            offsets: elements, multiples of BLOCK, ascending.
            numels: elements of each parameter.
            ids: identifiers of the parameters for stochastic rounding and sums of squares.
            firsts: for a shard, the index of its first element within each parameter, a multiple of
                BLOCK, so that stochastic rounding draws the same bits in any shard. Default: 0.

        Raises:
            ValueError: if parameters overlap, or one starts within a block.
        """
        rows = list(zip(offsets, numels, ids, firsts or [0] * len(ids), strict=True))
        self.extent = 0
        for offset, numel, _, first in rows:
            if offset % BLOCK or first % BLOCK or numel < 0 or offset < self.extent:
                raise ValueError(
                    f"a parameter of {numel} elements at offset {offset}: offsets must be "
                    f"multiples of {BLOCK}, ascending, and at least {self.extent} here"
                )
            self.extent = offset + numel
        self.table = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 4)
        self.count = len(rows)
        self.last_id = max(ids, default=-1)
        self.address = self.table.data_ptr()

    @classmethod
    def of_one(cls, numel: int, id: int = 0) -> Layout:
        """Return the layout of a bucket that is one parameter."""
        return cls([0], [numel], [id])

    def rows(self) -> list[tuple[int, int, int, int]]:
        """(offset, numel, id, first) of each parameter."""
        return [(offset, numel, id, first) for offset, numel, id, first in self.table.tolist()]


def blocks(numel: int) -> int:
    """Return the number of scales for `numel` elements."""
    return -(-numel // BLOCK)


def pieces(numel: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Cut where the element's number, counted from `first`, is a multiple of the piece's size."""
    lo = 0
    while lo < numel:
        hi = min(lo + _PIECE - (first + lo) % _PIECE, numel)
        yield lo, hi
        lo = hi
