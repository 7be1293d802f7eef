"""The samples of a rank's memory: one record per 2 s from the log.

[Note: Thinning]
A week has 300,000 records. Beyond MOST rows every two neighbors become one (the least, the newest,
the most), in a new list that replaces the old one: a reader of the old one is not disturbed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from offloadtrain.events.schema import MEMORY_QUANTITIES

MOST = 8192
_SILENT = 5.0
"""Times the mean interval of the records, after which nothing is known."""
_LARGEST_KIB = 1 << 53

Sizes = tuple[int, int, int]
"""(least, newest, most) in bytes."""


@dataclass(frozen=True, slots=True)
class Live:
    """The extremes of each known quantity in a stretch of time.

    Attributes:
        time_s: of the newest sample.
    """

    time_s: float
    sizes: dict[str, Sizes]

    def now(self, name: str) -> int | None:
        return self.sizes[name][1] if name in self.sizes else None

    def most(self, name: str) -> int | None:
        return self.sizes[name][2] if name in self.sizes else None

    def at_peak(self, *names: str) -> Live:
        """Return the same with the most of these as their newest."""
        peaks = {name: (sizes[2],) * 3 for name, sizes in self.sizes.items() if name in names}
        return Live(self.time_s, {**self.sizes, **peaks})

    def joined(self, later: Live) -> Live:
        """Return both stretches as one."""
        both = {
            name: (min(sizes[0], least), now, max(sizes[2], most))
            for name, (least, now, most) in later.sizes.items()
            if (sizes := self.sizes.get(name))
        }
        return Live(later.time_s, self.sizes | later.sizes | both)


class LiveMemory:
    """The samples of one rank; added by one thread, read by another."""

    def __init__(self) -> None:
        self.rows: list[Live] = []

    def add(self, values: dict[str, Any]) -> bool:
        """Add a parsed record; False if it is not valid."""
        time_s = values.get("t")
        if not isinstance(time_s, float | int) or not math.isfinite(time_s):
            return False
        known = ((name, _sizes(values.get(f"{name}_kib"))) for name in MEMORY_QUANTITIES)
        if self.rows:  # a clock set back does not hide the newest record
            time_s = max(time_s, self.rows[-1].time_s)
        self.rows.append(Live(float(time_s), {name: sizes for name, sizes in known if sizes}))
        if len(self.rows) > MOST:
            pairs = (self.rows[lo : lo + 2] for lo in range(0, len(self.rows), 2))
            self.rows = [reduce(Live.joined, pair) for pair in pairs]
        return True

    def at(self, time_s: float) -> Live | None:
        """Return the newest record at a time."""
        rows = self._until(time_s)
        return rows[-1] if rows else None

    def stretches(self, time_s: float, count: int) -> Iterator[Live | None]:
        """Split the time from the first record to `time_s` into `count` parts of the same length.

        A part without records is as the one before; None: for too long, as while a run is stopped.
        """
        rows = self._until(time_s)
        if not rows:
            return
        first_s, last_s = rows[0].time_s, rows[-1].time_s
        done, usual_s = 0, (last_s - first_s) / len(rows)
        for number in range(1, count + 1):
            until_s = last_s if number == count else first_s + (last_s - first_s) * number / count
            end = bisect_right(rows, until_s, key=lambda row: row.time_s)
            begin = done if end > done else max(end - 1, 0)
            is_known = until_s - rows[max(end - 1, 0)].time_s <= _SILENT * usual_s
            yield reduce(Live.joined, rows[begin:end]) if is_known else None
            done = end

    def extent_s(self, time_s: float) -> tuple[float, float] | None:
        """Return the times of the first record and of the newest until a time."""
        rows = self._until(time_s)
        return (rows[0].time_s, rows[-1].time_s) if rows else None

    def _until(self, time_s: float) -> Sequence[Live]:
        rows = self.rows
        return rows[: bisect_right(rows, time_s, key=lambda row: row.time_s)]


def _sizes(values: Any) -> Sizes | None:
    """Convert (least, newest, most) or one number of KiB; None for anything else."""
    if not isinstance(values, list) or len(values) not in (1, 3):
        return None
    if not all(type(value) is int and 0 <= value < _LARGEST_KIB for value in values):
        return None
    least, now, most = values if len(values) == 3 else values * 3
    return 1024 * least, 1024 * now, 1024 * most
