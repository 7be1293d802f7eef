"""Growing columns that know from when each of their values is valid."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import MutableSequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Times:
    """The times from which the entries of a column are valid. One thread adds, another reads."""

    def __init__(self) -> None:
        self.times: MutableSequence[float] = array("d")

    def stamp(self, time_s: float) -> None:
        """Add the time of an entry, after the entry: another thread counts the times. A clock set
        back must not make the newest entry unreachable."""
        self.times.append(max(time_s, self.times[-1]) if self.times else time_s)

    def count(self, time_s: float) -> int:
        """Return the number of entries valid at a time."""
        return bisect_right(self.times, time_s)


class Timed(Times, Generic[T]):
    """Values with the time from which each is valid."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.values: list[T] = []

    def add(self, time_s: float, value: T) -> None:
        self.values.append(value)
        self.stamp(time_s)

    def at(self, time_s: float) -> T | None:
        """Return the newest value at a time."""
        count = self.count(time_s)
        return self.values[count - 1] if count else None
