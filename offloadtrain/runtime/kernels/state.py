"""The state of one bucket in each format, and the layout of its parameters.

[Note: State formats]
`fp32`, 12 bytes per parameter of Adam: master weights and both moments.
`split16`, 6 + 2 bytes: the fp32 master's bits in two halves. The upper half, rounded, is the bf16
working weight and is uploaded from there; the lower half is the signed remainder, so that the
master is exact. Moments are bf16, rounded stochastically. This is impossible for fp16 weights: the
remainder of a weight below 2^-14 does not fit in 16 bits.
`int8`, 3 + 2 bytes and 8 per block of 128: the working weight (bf16 or fp16) and an 8-bit
correction in units of 1/256 of its last place, rounded stochastically; 8-bit moments relative
to the largest of their block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from offloadtrain.step.layout.formats import (
    ADAM_MOMENTS,
    FP32,
    INT8,
    SCALE_BLOCK,
    SPLIT16,
    StateFormat,
)

BLOCK = SCALE_BLOCK
"""Number of elements that share a scale per 8-bit moment, counted from a parameter's start."""

_PIECE = 1 << 20
"""Number of elements that plain torch widens per call."""


class State(tuple[Tensor, ...]):
    """The fields of a bucket's state, in the order of its format: fields of the master weight, then
    values of each moment, then scales of each moment. A rule may have zero, one or two moments.
    """

    __slots__ = ()
    format: ClassVar[StateFormat]

    def names(self, moments: Sequence[str] = ADAM_MOMENTS) -> list[str]:
        """Return the fields' names, for a rule with these moments."""
        return [field.name for field in self.format.fields(moments)]

    @property
    def exp_avg(self) -> Tensor:
        return self[len(self.format.master)]

    @property
    def exp_avg_sq(self) -> Tensor:
        return self[len(self.format.master) + 1]


class Fp32State(State):
    """master and moments, (n,) fp32."""

    __slots__ = ()
    format = FP32

    @property
    def master(self) -> Tensor:
        return self[0]


class Split16State(State):
    """weight (n,) bf16; low (n,) int16: the low half of the master's bits; moments (n,) bf16."""

    __slots__ = ()
    format = SPLIT16

    @property
    def weight(self) -> Tensor:
        return self[0]

    @property
    def low(self) -> Tensor:
        return self[1]


class Int8State(State):
    """weight (n,) bf16 or fp16; correction (n,) int8; moments (n,) uint8; their scales (ceil(n /
    128),) fp32. The first moment is signed, the second is not."""

    __slots__ = ()
    format = INT8

    @property
    def weight(self) -> Tensor:
        return self[0]

    @property
    def correction(self) -> Tensor:
        return self[1]

    @property
    def codes(self) -> tuple[Tensor, ...]:
        """Codes of each moment, (n,) uint8."""
        return self[2 : 1 + len(self) // 2]

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Scales of each moment, (ceil(n / 128),) fp32."""
        return self[1 + len(self) // 2 :]


STATES: dict[str, type[State]] = {
    state.format.name: state for state in (Fp32State, Split16State, Int8State)
}
"""The formats that have kernels."""


class Layout:
    """The elements of each parameter in a bucket's flat buffers.

    Attributes:
        table: (parameters, 4) int64 rows of offset, numel, id, first, in the order of the offsets.
        extent: number of elements up to the end of the last parameter.
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
        """Return the layout of a bucket with a single parameter."""
        return cls([0], [numel], [id])

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Return (offset, numel, id, first) of each parameter."""
        return [(offset, numel, id, first) for offset, numel, id, first in self.table.tolist()]


def blocks(numel: int) -> int:
    """Return the number of scales for `numel` elements."""
    return -(-numel // BLOCK)


def pieces(numel: int, first: int = 0, size: int = _PIECE) -> Iterator[tuple[int, int]]:
    """Yield ranges, cut where the element's index, counted from `first`, is a multiple of
    `size`."""
    lo = 0
    while lo < numel:
        hi = min(lo + size - (first + lo) % size, numel)
        yield lo, hi
        lo = hi
