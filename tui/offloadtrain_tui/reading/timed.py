"""A list that knows from when each of its values is valid."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(slots=True)
class Timed:
    """Values with the time from which each is valid."""

    times: list[float] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, time_s: float, value: Any) -> None:
        self.values.append(value)  # first: another thread counts the times
        # A clock set back must not make the newest value unreachable.
        self.times.append(max(time_s, self.times[-1]) if self.times else time_s)

    def count(self, time_s: float) -> int:
        """Return the number of values valid at a time."""
        return bisect_right(self.times, time_s)

    def at(self, time_s: float, default: _T) -> _T | Any:
        count = self.count(time_s)
        return self.values[count - 1] if count else default
