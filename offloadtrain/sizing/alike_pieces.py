"""Pieces of a loss that do the same: a few are traced.

[Note: Pieces that are alike]
Three pieces run: the first, the last of the same size, and the last. The work of the first piece is
counted again for each skipped piece. Each piece starts with the memory that the previous piece left
allocated. The second traced piece starts with the memory of the first, as a skipped piece would, so
no skipped piece has a higher peak than a traced one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from offloadtrain.sizing.meter import Meter
from offloadtrain.sizing.operation_work import Count

Piece = TypeVar("Piece")

_BOTH_ENDS = 3
"""Pieces that are traced."""


class AlikePieces:
    """A `model.loss.Few`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def each(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        left_out = len(pieces) - _BOTH_ENDS
        if left_out < 1:
            yield from pieces
            return
        before = self._next_segment()
        yield pieces[0]
        self._repeat(before, left_out)
        yield from pieces[1 + left_out :]

    def made(self, pieces: Sequence[Piece], make: Callable[[Piece], Tensor]) -> list[Tensor]:
        left_out = len(pieces) - _BOTH_ENDS
        if left_out < 1:
            return [make(piece) for piece in pieces]
        before = self._next_segment()
        first = make(pieces[0])
        self._repeat(before, left_out)
        # Each of them holds its memory, and is made without work.
        middle = [torch.empty_like(first) for _ in range(left_out)]
        return [first, *middle, *(make(piece) for piece in pieces[1 + left_out :])]

    def _next_segment(self) -> int:
        """Start a segment at the same place, and return its number."""
        self._meter.place = self._meter.place
        return len(self._meter.segments) - 1

    def _repeat(self, before: int, times: int) -> None:
        """Count the work since the start of that segment so many times more."""
        work = Count()
        for segment in self._meter.segments[before:]:
            work.add(segment.work)
        self._next_segment()
        for _ in range(times):
            self._meter.segments[-1].work.add(work)
