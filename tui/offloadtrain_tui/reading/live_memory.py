"""The samples of a rank's memory: one record per 2 s from the log.

[Note: Thinning]
A week has 300,000 records. Beyond MOST rows every two neighbours become one (the least, the newest,
the most), in new columns that replace the old ones: a reader of the old ones is not disturbed.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offloadtrain.events.schema import MEMORY_QUANTITIES
from offloadtrain_tui.reading.timed import Times

MOST = 8192
_SILENT = 5.0
"""Times the mean interval of the records, after which nothing is known."""
_LARGEST_KIB = float(1 << 53)
_MISSING = (math.nan, math.nan, math.nan)

Sizes = tuple[float, float, float]
"""(least, newest, most) in bytes, NaN if not known."""


@dataclass(frozen=True, slots=True)
class Live:
    """The extremes of each quantity in a stretch of time.

    Attributes:
        time_s: of the newest sample.
    """

    time_s: float
    sizes: dict[str, Sizes]

    def now(self, name: str) -> int | None:
        return _known(self.sizes.get(name, _MISSING)[1])

    def most(self, name: str) -> int | None:
        return _known(self.sizes.get(name, _MISSING)[2])

    def at_peak(self, *names: str) -> Live:
        """Return the same with the most of these as their newest."""
        peaks = {name: (sizes[2],) * 3 for name, sizes in self.sizes.items() if name in names}
        return Live(self.time_s, {**self.sizes, **peaks})


class _Columns(Times):
    """Columns of the records; rows are only added."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, tuple[array[float], ...]] = {
            name: (array("d"), array("d"), array("d")) for name in MEMORY_QUANTITIES
        }

    def add(self, time_s: float, sizes: dict[str, Sizes]) -> None:
        for name in MEMORY_QUANTITIES:
            for column, size in zip(self.of[name], sizes.get(name, _MISSING), strict=True):
                column.append(size)
        self.stamp(time_s)

    def over(self, lo: int, hi: int) -> Live:
        """Return rows [lo, hi) as one; there is at least one."""
        sizes = {
            name: (_least(least[lo:hi]), now[hi - 1], _most(most[lo:hi]))
            for name, (least, now, most) in self.of.items()
        }
        return Live(self.times[hi - 1], sizes)


class LiveMemory:
    """The samples of one rank; added by one thread, read by another."""

    def __init__(self) -> None:
        self._columns = _Columns()

    def add(self, values: dict[str, Any]) -> bool:
        """Add a parsed record; False if it is not valid."""
        time_s = values.get("t")
        if not isinstance(time_s, float | int) or not math.isfinite(time_s):
            return False
        sizes = {name: _sizes(values.get(f"{name}_kib")) for name in MEMORY_QUANTITIES}
        self._columns.add(float(time_s), sizes)
        if len(self._columns.times) > MOST:
            # Each pair of records becomes one.
            merged = _Columns()
            for lo in range(0, len(self._columns.times), 2):
                pair = self._columns.over(lo, min(lo + 2, len(self._columns.times)))
                merged.add(pair.time_s, pair.sizes)
            self._columns = merged
        return True

    def at(self, time_s: float) -> Live | None:
        """Return the newest record at a time."""
        columns = self._columns
        count = columns.count(time_s)
        return columns.over(count - 1, count) if count else None

    def stretches(self, time_s: float, count: int) -> Iterator[Live | None]:
        """Split the time from the first record to `time_s` into `count` parts of the same length.

        A part without records is as the one before; None: for too long, as while a run is stopped.
        """
        columns = self._columns
        rows = columns.count(time_s)
        if not rows:
            return
        first_s, last_s = columns.times[0], columns.times[rows - 1]
        done, usual_s = 0, (last_s - first_s) / rows
        for number in range(1, count + 1):
            until_s = last_s if number == count else first_s + (last_s - first_s) * number / count
            end = bisect_right(columns.times, until_s, hi=rows)
            silent_s = until_s - columns.times[max(end - 1, 0)]
            begin = done if end > done else max(end - 1, 0)
            yield columns.over(begin, end) if silent_s <= _SILENT * usual_s else None
            done = end

    def extent_s(self, time_s: float) -> tuple[float, float] | None:
        """Return the times of the first record and of the newest until a time."""
        times, rows = self._columns.times, self._columns.count(time_s)
        return (times[0], times[rows - 1]) if rows else None


def _sizes(values: Any) -> Sizes:
    """Convert (least, newest, most) or one number of KiB; NaN for anything else."""
    if not isinstance(values, list) or len(values) not in (1, 3):
        return _MISSING
    if not all(type(value) is int and 0 <= value < _LARGEST_KIB for value in values):
        return _MISSING
    least, now, most = values if len(values) == 3 else values * 3
    return 1024.0 * least, 1024.0 * now, 1024.0 * most


def _known(size: float) -> int | None:
    return None if math.isnan(size) else round(size)


def _least(sizes: array[float]) -> float:
    return min((size for size in sizes if size == size), default=math.nan)


def _most(sizes: array[float]) -> float:
    return max((size for size in sizes if size == size), default=math.nan)
