"""The activity of the lanes in a sampled step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of work on a lane; times are relative to the start of the sampled step.

    Attributes:
        num_bytes: bytes that a copy or a collective wrote, 0 for other work. For a collective,
            this over its time is the "algorithm bandwidth" of NCCL's tests.
    """

    lane: str
    name: str
    start_ms: float
    duration_ms: float
    num_bytes: int = 0


class Timeline:
    """The intervals of a sampled step, some of which may still run."""

    def __init__(self, read: Callable[[], Sequence[Interval]]) -> None:
        """`read`: returns the intervals after all of them have ended; called at most once."""
        self._read: Callable[[], Sequence[Interval]] | None = read
        self._intervals: tuple[Interval, ...] = ()

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """All intervals by start; waits for intervals that have not ended."""
        if self._read is not None:
            read, self._read = self._read, None
            self._intervals = tuple(read())
        return self._intervals


def with_bytes(
    intervals: Iterable[Interval], sizes: dict[tuple[str, str], deque[int]]
) -> list[Interval]:
    """Sort intervals by start, cut them at the start of the sampling, and add their bytes."""
    # Operations of one lane and name end in the order of their launch. The first may have been
    # launched before the sampling: their bytes are unknown.
    ordered = sorted(intervals, key=lambda interval: interval.start_ms)
    earlier = Counter((interval.lane, interval.name) for interval in ordered)
    earlier.subtract({key: len(launched) for key, launched in sizes.items()})
    sized = []
    for interval in ordered:
        key = (interval.lane, interval.name)
        if interval.start_ms < 0:
            left_ms = max(interval.duration_ms + interval.start_ms, 0.0)
            interval = replace(interval, start_ms=0.0, duration_ms=left_ms)
        if earlier[key] > 0 or key not in sizes:
            earlier[key] -= 1
            sized.append(interval)
        else:
            sized.append(replace(interval, num_bytes=sizes[key].popleft()))
    return sized
