"""Numbers over steps: append-only columns, and the least and greatest of any stretch of them.

[Note: Pyramids]
A chart asks for the least and the greatest value of each of its columns of pixels, whatever the
zoom. Level k of a pyramid keeps these for every 16^k values, made when they are asked for first, so
that a chart of 100,000 steps reads some hundred numbers. Columns only grow: who holds a length has
an immutable view, while a reader thread appends.
"""

from __future__ import annotations

import itertools
import math
from array import array
from dataclasses import dataclass

FACTOR = 16

Extent = tuple[float, float]
"""Least and greatest finite value; (inf, -inf) if there is none."""

NOTHING: Extent = (math.inf, -math.inf)


class Series:
    """One number per step; NaN where there is none."""

    __slots__ = ("_levels", "values")

    def __init__(self) -> None:
        self.values = array("d")
        self._levels: list[tuple[array[float], array[float]]] = []

    def __len__(self) -> int:
        return len(self.values)

    def append(self, value: float | None) -> None:
        self.values.append(math.nan if value is None else value)

    def last(self, length: int) -> float | None:
        """The newest number of the first `length`; None if there is none."""
        for index in range(length - 1, max(length - 64, 0) - 1, -1):
            if not math.isnan(self.values[index]):
                return self.values[index]
        return None

    def extent(self, lo: int, hi: int) -> Extent:
        """Of values [lo, hi)."""
        least, greatest = NOTHING
        level, width = 0, 1
        while lo < hi:
            # The coarsest level whose next entry begins at `lo` and ends before `hi`.
            while lo % (width * FACTOR) == 0 and lo + width * FACTOR <= hi:
                level, width = level + 1, width * FACTOR
            while level > 0 and (lo % width or lo + width > hi):
                level, width = level - 1, width // FACTOR
            low, high = self._entry(level, lo // width)
            least, greatest = min(least, low), max(greatest, high)
            lo += width
        return least, greatest

    def _entry(self, level: int, index: int) -> Extent:
        if level == 0:
            value = self.values[index]
            return (value, value) if math.isfinite(value) else NOTHING
        self._grow(level, index)
        lows, highs = self._levels[level - 1]
        return lows[index], highs[index]

    def _grow(self, level: int, index: int) -> None:
        while len(self._levels) < level:
            self._levels.append((array("d"), array("d")))
        lows, highs = self._levels[level - 1]
        while len(lows) <= index:
            low, high = self._below(level - 1, len(lows))
            lows.append(low)
            highs.append(high)

    def _below(self, level: int, index: int) -> Extent:
        begin, end = index * FACTOR, (index + 1) * FACTOR
        if level == 0:
            finite = [value for value in self.values[begin:end] if math.isfinite(value)]
            return (min(finite), max(finite)) if finite else NOTHING
        self._grow(level, end - 1)
        lows, highs = self._levels[level - 1]
        return min(lows[begin:end]), max(highs[begin:end])


class Smoothed(Series):
    """Exponential moving average of another series, extended when it is looked at.

    Started without bias (as Adam's moments): the first value is the first average.
    """

    __slots__ = ("_decay", "_mean", "_of", "_weight")

    def __init__(self, of: Series, span: float) -> None:
        """`span`: steps after which a value has lost 63 % of its weight."""
        super().__init__()
        self._of = of
        self._decay = math.exp(-1.0 / span)
        self._mean = self._weight = 0.0

    def catch_up(self, length: int) -> None:
        """Up to `length` values of the source."""
        for value in self._of.values[len(self.values) : length]:
            if math.isfinite(value):
                self._mean = self._decay * self._mean + (1.0 - self._decay) * value
                self._weight = self._decay * self._weight + (1.0 - self._decay)
            self.values.append(self._mean / self._weight if self._weight else math.nan)


@dataclass(frozen=True, slots=True)
class Window:
    """Values [lo, hi) of every series, as a chart shows them."""

    lo: int
    hi: int

    def columns(self, count: int) -> list[tuple[int, int]]:
        """The window cut into `count` stretches; several are one value where it is shorter."""
        size = self.hi - self.lo
        if size <= 0:
            return []
        cuts = [self.lo + size * i // count for i in range(count + 1)]
        return [(begin, max(end, begin + 1)) for begin, end in itertools.pairwise(cuts)]
