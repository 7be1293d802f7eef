"""Columns that only grow: numbers by step, with minimum and maximum of any range, and values with
the time from which each is valid.

[Note: Stretches]
A chart needs the minimum and the maximum of each of its pixel columns at any zoom. A column stores
these for every 64 values, computed on first use, so that a chart of 100,000 steps reads a few
thousand numbers. Because columns only grow, a length is an immutable view while a thread appends.

[Note: Thinning]
A week has 300,000 samples of a rank's memory, one per 2 s. If there are more than MOST rows, every
two neighbors are merged (minimum, newest, maximum), in a new list that replaces the old one, so
that a reader of the old list is not disturbed.
"""

from __future__ import annotations

import itertools
import math
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any, Generic, TypeVar

from offloadtrain.events import log_lines, schema
from offloadtrain.events.schema import MEMORY_QUANTITIES
from offloadtrain.events.waits import Wait, exposed_by_lane, waits_of

STRETCH = 64
_GRAINS = 32

Extent = tuple[float, float]
"""(least, greatest) finite value; (inf, -inf) if there is none."""

NOTHING: Extent = (math.inf, -math.inf)


class Series:
    """A column of one number per step; NaN if missing."""

    __slots__ = ("_highs", "_lows", "values")

    def __init__(self) -> None:
        self.values = array("d")
        self._lows, self._highs = array("d"), array("d")

    def __len__(self) -> int:
        return len(self.values)

    def append(self, value: float | None) -> None:
        self.values.append(math.nan if value is None else float(value))

    def extend(self, values: Iterable[float]) -> None:
        self.values.extend(values)

    def last(self, length: int) -> float | None:
        """Return the newest number in the 64 values before `length`; None if all are missing."""
        for index in range(length - 1, max(length - 64, 0) - 1, -1):
            if not math.isnan(self.values[index]):
                return self.values[index]
        return None

    def shown(self, length: int) -> int:
        """Return the number of values to draw after `length` steps."""
        return length

    def known(self, length: int) -> Iterable[tuple[int, float]]:
        """Return (position, value) of the first `length` steps, without missing values."""
        return enumerate(self.values[:length])

    def extent(self, lo: int, hi: int) -> Extent:
        """Return minimum and maximum of values [lo, hi)."""
        first, last = -(-lo // STRETCH), hi // STRETCH
        if first >= last:
            return _least_greatest(self.values[lo:hi])
        lows, highs = self._lows, self._highs
        for begin in range(len(lows) * STRETCH, last * STRETCH, STRETCH):
            low, high = _least_greatest(self.values[begin : begin + STRETCH])
            lows.append(low)
            highs.append(high)
        before = _least_greatest(self.values[lo : first * STRETCH])
        after = _least_greatest(self.values[last * STRETCH : hi])
        least = min(before[0], min(lows[first:last]), after[0])
        return least, max(before[1], max(highs[first:last]), after[1])


def _least_greatest(values: Sequence[float]) -> Extent:
    if not math.isfinite(sum(values)):  # a value is not finite, or the sum overflows
        values = [value for value in values if math.isfinite(value)]
    return (min(values), max(values)) if values else NOTHING


class Measured(Series):
    """A column that is measured only at some positions. `values` between two measurements are
    interpolated linearly; there are none after the last measurement."""

    __slots__ = ("_measured", "_positions")

    def __init__(self) -> None:
        super().__init__()
        self._positions = array("q")
        self._measured = array("d")

    def measure(self, position: int, value: float) -> None:
        """Add a value measured at a position, which must not be less than the last one."""
        begin = len(self.values)
        rise = (value - self.values[-1]) / (position - begin + 1) if position >= begin > 0 else 0.0
        self.values.extend(
            value - rise * (position - index) if begin else math.nan
            for index in range(begin, position)
        )
        if position >= begin:
            self.values.append(value)
        self._measured.append(value)
        self._positions.append(position)  # last, because another thread counts positions

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

    Without bias at the start, like Adam's moments: the first average is the first value.
    """

    __slots__ = ("_decay", "_mean", "_of", "_weight")

    def __init__(self, of: Series, span: float) -> None:
        """`span`: number of steps after which a value has lost 63 % of its weight."""
        super().__init__()
        self._of = of
        self._decay = math.exp(-1.0 / span)
        self._mean = self._weight = 0.0

    def catch_up(self, length: int) -> None:
        """Compute the averages of the first `length` values of the source."""
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
        """Number of values, rounded up, so that a chart that grows by one value redraws only its
        newest columns."""
        count = self.hi - self.lo
        grain = 1 << max((count // _GRAINS).bit_length() - 1, 0)
        return -(-count // grain) * grain

    def columns(self, count: int) -> list[tuple[int, int]]:
        """Split the window into `count` ranges, which repeat values if the window is shorter."""
        size = self.size
        if size <= 0:
            return []
        cuts = [self.lo + size * i // count for i in range(count + 1)]
        return [(begin, max(end, begin + 1)) for begin, end in itertools.pairwise(cuts)]


class Outline:
    """Cache of a series' extents in the columns of a window. While the window is unchanged, only
    columns with new values are computed."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._columns: list[tuple[int, int]] = []
        self._extents: list[Extent] = []
        self._length = 0

    def of(self, series: Series, length: int, window: Window, count: int) -> list[Extent]:
        """Return the extents of the first `length` values in `count` columns."""
        of = (series, window.lo, window.size, count)
        if of != self._of or length < self._length:
            self._of, self._extents, self._length = of, [], 0
            self._columns = window.columns(count)
        if length > self._length or not self._extents:
            complete = bisect_right(self._columns, self._length, key=lambda column: column[1])
            fresh = (series.extent(lo, min(hi, length)) for lo, hi in self._columns[complete:])
            self._extents[complete:] = fresh
            self._length = length
        return self._extents


# ---- values over time

T = TypeVar("T")
BLOCK = 256
"""Lines per block; JSON lines of one kind compress to a tenth or less."""


class Times:
    """Times from which the entries of a column are valid. One thread appends, another reads."""

    def __init__(self) -> None:
        self.times: MutableSequence[float] = array("d")

    def stamp(self, time_s: float) -> None:
        """Append the time of an entry, after the entry, because another thread counts times. Times
        never decrease: otherwise a clock that is set back would make the newest entry
        unreachable."""
        self.times.append(max(time_s, self.times[-1]) if self.times else time_s)

    def count(self, time_s: float) -> int:
        """Return the number of entries that are valid at a time."""
        return bisect_right(self.times, time_s)

    def newest_s(self, time_s: float) -> float | None:
        """Return the time of the newest entry that is valid at a time."""
        count = self.count(time_s)
        return self.times[count - 1] if count else None


class Timed(Times, Generic[T]):
    """Values with the times from which they are valid."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.values: list[T] = []

    def add(self, time_s: float, value: T) -> None:
        self.values.append(value)
        self.stamp(time_s)

    def at(self, time_s: float) -> T | None:
        """Return the newest value that is valid at a time."""
        count = self.count(time_s)
        return self.values[count - 1] if count else None


class TimedLines(Times):
    """Lines with the times from which they are valid, compressed except for the newest block.

    One thread appends; other threads read only entries that they have counted.
    """

    def __init__(self, block: int = BLOCK) -> None:
        super().__init__()
        self._block = block
        self._packed: list[bytes] = []
        self._open: list[bytes] = []

    def add(self, time_s: float, line: bytes) -> None:
        self._open.append(line)
        if len(self._open) == self._block:
            # In this order, so that a reader always finds each line in one of the two.
            self._packed.append(pack(self._open))
            self._open = []
        self.stamp(time_s)

    def __getitem__(self, index: int) -> bytes:
        number, place = divmod(index, self._block)
        open_lines = self._open
        if number >= len(self._packed):
            return open_lines[place]
        return unpack(self._packed[number])[place]


def pack(lines: list[bytes]) -> bytes:
    return zlib.compress(b"\n".join(lines), 1)


@lru_cache(maxsize=4)  # a screen reads the lines of one block many times
def unpack(packed: bytes) -> list[bytes]:
    return zlib.decompress(packed).split(b"\n")


# ---- timelines of sampled steps

SAMPLED_STEPS = 256
"""Number of timelines that are retained, the newest."""


class Spans(tuple[schema.LaneSpan, ...]):
    """The spans of a step. Values derived from all of them are computed once."""

    @cached_property
    def end_ms(self) -> float:
        """End of the last span, in milliseconds."""
        return max((span.start_ms + span.duration_ms for span in self), default=0.0)

    @cached_property
    def waits(self) -> list[Wait]:
        """The waits of compute; if none are logged, the gaps between its spans."""
        return waits_of(self)

    @cached_property
    def exposed_by_lane(self) -> dict[str, float]:
        """Lane → milliseconds that compute waited for the lane's work."""
        return exposed_by_lane(self)


class Timelines(Timed[int]):
    """The sampled steps and their spans. One thread appends, another reads. Lines of the newest
    step are stored uncompressed, those of older steps compressed."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: OrderedDict[int, list[bytes] | bytes] = OrderedDict()
        self._open: list[bytes] = []
        self._shown: list[bytes] | bytes = []
        self._count = 0
        self._spans = Spans()

    def add_line(self, time_s: float, step: int, line: bytes) -> None:
        """Add a span's line, with the time of the record."""
        newest = next(reversed(self._lines), None)
        if step == newest:
            self._open.append(line)
            return
        if newest is not None:
            self._lines[newest] = pack(self._open)
        self._open = self._lines[step] = [line]  # a resumed run may sample the same step again
        self._lines.move_to_end(step)
        while len(self._lines) > SAMPLED_STEPS:
            self._lines.popitem(last=False)
        self.add(time_s, step)

    def of(self, step: int) -> Spans | None:
        """Return the timeline of a sampled step; None if it was not sampled or is too old."""
        stored = self._lines.get(step)
        if stored is None:
            return None
        if stored is not self._shown or len(stored) != self._count:
            self._shown, self._count = stored, len(stored)
            # Only the lines counted above: another thread may append to the list.
            lines = unpack(stored) if isinstance(stored, bytes) else stored[: self._count]
            events = (record.event for record in map(log_lines.from_line, lines) if record)
            self._spans = Spans(event for event in events if isinstance(event, schema.LaneSpan))
        return self._spans


MOST = 8192
_SILENT = 5.0
"""Gap, in mean intervals between records, after which the values are unknown."""
_LARGEST_KIB = 1 << 53

Sizes = tuple[int, int, int]
"""(least, newest, greatest) in bytes."""


@dataclass(frozen=True, slots=True)
class Live:
    """Extremes of each known quantity in an interval of time.

    Attributes:
        time_s: time of its newest sample.
    """

    time_s: float
    sizes: dict[str, Sizes]

    def now(self, name: str) -> int | None:
        return self.sizes[name][1] if name in self.sizes else None

    def most(self, name: str) -> int | None:
        return self.sizes[name][2] if name in self.sizes else None

    def at_peak(self, *names: str) -> Live:
        """Return a copy in which the newest values of these quantities are their peaks."""
        peaks = {name: (sizes[2],) * 3 for name, sizes in self.sizes.items() if name in names}
        return Live(self.time_s, {**self.sizes, **peaks})

    def joined(self, later: Live) -> Live:
        """Merge two consecutive intervals."""
        both = {
            name: (min(sizes[0], least), now, max(sizes[2], most))
            for name, (least, now, most) in later.sizes.items()
            if (sizes := self.sizes.get(name))
        }
        return Live(later.time_s, self.sizes | later.sizes | both)


class LiveMemory:
    """Samples of one rank's memory; one thread appends, another reads."""

    def __init__(self) -> None:
        self.rows: list[Live] = []

    def add(self, values: dict[str, Any]) -> bool:
        """Add a parsed record; return False if it is invalid."""
        time_s = values.get("t")
        if not isinstance(time_s, float | int) or not math.isfinite(time_s):
            return False
        known = ((name, _sizes(values.get(f"{name}_kib"))) for name in MEMORY_QUANTITIES)
        if self.rows:  # times never decrease, so that a clock set back hides nothing
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
        """Split the time from the first record to `time_s` into `count` intervals of equal length.

        An interval without records repeats the previous one, or is None after a long gap in the
        log.
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
        """Return the times of the first and the newest record up to a time."""
        rows = self._until(time_s)
        return (rows[0].time_s, rows[-1].time_s) if rows else None

    def _until(self, time_s: float) -> Sequence[Live]:
        rows = self.rows
        return rows[: bisect_right(rows, time_s, key=lambda row: row.time_s)]


def _sizes(values: Any) -> Sizes | None:
    """Convert [least, newest, greatest] or [value] in KiB to bytes; None for anything else."""
    if not isinstance(values, list) or len(values) not in (1, 3):
        return None
    if not all(type(value) is int and 0 <= value < _LARGEST_KIB for value in values):
        return None
    least, now, most = values if len(values) == 3 else values * 3
    return 1024 * least, 1024 * now, 1024 * most
