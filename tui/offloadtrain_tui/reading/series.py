"""Numbers over steps: append-only columns with minimum and maximum of any range.

[Note: Pyramids]
A chart needs the minimum and the maximum of each of its pixel columns at any zoom. Level k of a
pyramid stores these for every 16^k values, computed on first use, so that a chart of 100,000 steps
reads some hundred numbers. Columns only grow: a length is an immutable view while a reader thread
appends.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FACTOR = 16
_GRAINS = 32

Extent = tuple[float, float]
"""Return the least and the greatest finite value; (inf, -inf) if there is none."""

NOTHING: Extent = (math.inf, -math.inf)


class Series:
    """A column of one number per step; NaN if missing."""

    __slots__ = ("_levels", "values")

    def __init__(self) -> None:
        self.values = array("d")
        self._levels: list[tuple[array[float], array[float]]] = []

    def __len__(self) -> int:
        return len(self.values)

    def append(self, value: float | None) -> None:
        self.values.append(math.nan if value is None else float(value))

    def extend(self, values: Iterable[float]) -> None:
        self.values.extend(values)

    def last(self, length: int) -> float | None:
        """Return the newest number of the first `length`; None if there is none."""
        for index in range(length - 1, max(length - 64, 0) - 1, -1):
            if not math.isnan(self.values[index]):
                return self.values[index]
        return None

    def shown(self, length: int) -> int:
        """Return how many values there are once `length` steps have happened."""
        return length

    def known(self, length: int) -> Iterable[tuple[int, float]]:
        """Return (position, value) of the first `length` steps, without those that are missing."""
        return enumerate(self.values[:length])

    def extent(self, lo: int, hi: int) -> Extent:
        """Return minimum and maximum of values [lo, hi)."""
        return self._extent(0, lo, hi)

    def _extent(self, level: int, lo: int, hi: int) -> Extent:
        """Return minimum and maximum of entries [lo, hi) of a level, using the next level for the
        middle."""
        if hi - lo <= 2 * FACTOR:
            return self._least_greatest(level, lo, hi)
        first, last = -(-lo // FACTOR), hi // FACTOR
        parts = [self._extent(level + 1, first, last)]
        if lo < first * FACTOR:
            parts.append(self._least_greatest(level, lo, first * FACTOR))
        if last * FACTOR < hi:
            parts.append(self._least_greatest(level, last * FACTOR, hi))
        return min(low for low, _ in parts), max(high for _, high in parts)

    def _least_greatest(self, level: int, lo: int, hi: int) -> Extent:
        if lo >= hi:
            return NOTHING
        if level:
            self._grow(level, hi - 1)
            lows, highs = self._levels[level - 1]
            return min(lows[lo:hi]), max(highs[lo:hi])
        values: Sequence[float] = self.values[lo:hi]
        if not math.isfinite(sum(values)):  # one of them is not, or they are very large
            values = [value for value in values if math.isfinite(value)]
        return (min(values), max(values)) if values else NOTHING

    def _grow(self, level: int, index: int) -> None:
        while len(self._levels) < level:
            self._levels.append((array("d"), array("d")))
        lows, highs = self._levels[level - 1]
        while len(lows) <= index:
            begin = len(lows) * FACTOR
            low, high = self._least_greatest(level - 1, begin, begin + FACTOR)
            lows.append(low)
            highs.append(high)


class Measured(Series):
    """A column that was measured at some positions only: between two of them, `values` lie on the
    line that joins them, and none lie after the last."""

    __slots__ = ("_measured", "_positions")

    def __init__(self) -> None:
        super().__init__()
        self._positions = array("q")
        self._measured = array("d")

    def measure(self, position: int, value: float) -> None:
        """Add a value measured at a position, which must not be before the last one."""
        begin = len(self.values)
        rise = (value - self.values[-1]) / (position - begin + 1) if position >= begin > 0 else 0.0
        self.values.extend(
            value - rise * (position - index) if begin else math.nan
            for index in range(begin, position)
        )
        if position >= begin:
            self.values.append(value)
        self._measured.append(value)
        self._positions.append(position)  # last: another thread counts them

    def shown(self, length: int) -> int:
        count = bisect_left(self._positions, length)
        return self._positions[count - 1] + 1 if count else 0

    def last(self, length: int) -> float | None:
        count = bisect_left(self._positions, length)
        return self._measured[count - 1] if count else None

    def known(self, length: int) -> Iterable[tuple[int, float]]:
        count = bisect_left(self._positions, length)
        return zip(self._positions[:count], self._measured[:count], strict=True)


class Smoothed(Series):
    """Exponential moving average of another series, extended on access.

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
        """Extend to `length` values of the source."""
        for value in self._of.values[len(self.values) : length]:
            if math.isfinite(value):
                self._mean = self._decay * self._mean + (1.0 - self._decay) * value
                self._weight = self._decay * self._weight + (1.0 - self._decay)
            self.append(self._mean / self._weight if self._weight else None)


@dataclass(frozen=True, slots=True)
class Window:
    """The displayed values [lo, hi) of every series."""

    lo: int
    hi: int

    @property
    def size(self) -> int:
        """The size with a margin, so that a chart that grows by one value only redraws its newest
        columns."""
        count = self.hi - self.lo
        grain = 1 << max((count // _GRAINS).bit_length() - 1, 0)
        return -(-count // grain) * grain

    def columns(self, count: int) -> list[tuple[int, int]]:
        """Split the window into `count` ranges; they repeat values if it is shorter."""
        size = self.size
        if size <= 0:
            return []
        cuts = [self.lo + size * i // count for i in range(count + 1)]
        return [(begin, max(end, begin + 1)) for begin, end in itertools.pairwise(cuts)]


class Outline:
    """The extents of a series in the columns of a window, kept while the window stays: only columns
    with new values are computed."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._columns: list[tuple[int, int]] = []
        self._ends: list[int] = []
        self._extents: list[Extent] = []
        self._length = 0

    def of(self, series: Series, length: int, window: Window, count: int) -> list[Extent]:
        """Return the extents of the first `length` values in so many columns."""
        of = (series, window.lo, window.size, count)
        if of != self._of or length < self._length:
            self._of, self._extents, self._length = of, [], 0
            self._columns = window.columns(count)
            self._ends = [end for _, end in self._columns]
        if length > self._length or not self._extents:
            complete = bisect_right(self._ends, self._length) if self._extents else 0
            fresh = (series.extent(lo, min(hi, length)) for lo, hi in self._columns[complete:])
            self._extents[complete:] = fresh
            self._length = length
        return self._extents
