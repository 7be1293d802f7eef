"""What the lanes did in a sampled step, and for which of them compute waited."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from offloadtrain.events.schema import WAIT
from offloadtrain.step.program.operations import Lane


@dataclass(frozen=True, slots=True)
class Interval:
    """One interval of work on a lane; times are relative to the start of the sampled step.

    Attributes:
        num_bytes: bytes that a copy or a collective wrote, 0 for other work. A collective's
            "algorithm bandwidth" in NCCL's tests is this over its time.
    """

    lane: str
    name: str
    start_ms: float
    duration_ms: float
    num_bytes: int = 0


class Timeline:
    """The intervals of a sampled step, some of which may still run."""

    def __init__(self, read: Callable[[], Sequence[Interval]]) -> None:
        """`read` returns the intervals when all of them have ended; it is called at most once."""
        self._read: Callable[[], Sequence[Interval]] | None = read
        self._intervals: tuple[Interval, ...] = ()

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """All intervals by start; waits for those that still run."""
        if self._read is not None:
            read, self._read = self._read, None
            self._intervals = tuple(read())
        return self._intervals


def with_bytes(
    intervals: Iterable[Interval], sizes: dict[tuple[str, str], deque[int]]
) -> list[Interval]:
    """Sort intervals by start, cut what lies before the sampling, and add their bytes."""
    # Operations of one lane and name end in the order of their launch. The first ones may have been
    # launched before the sampling: their bytes are not known.
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


_CAUSES = (
    *(Lane.H2D, Lane.HOST, Lane.UPDATE, Lane.DISK_LOAD, Lane.DISK_READ, Lane.DISK_WRITE),
    *(Lane.ORTHO, Lane.D2H, Lane.COMM, Lane.WRITE),
)
"""Lanes that an idle awaited lane can itself have waited for, the nearest first."""

_Stretch = tuple[float, float]


def exposed_by_lane(timeline: Iterable[Interval]) -> dict[str, float]:
    """Return lane → milliseconds that compute waited for work of this lane.

    If compute waits for an upload, and for a part of that time the upload waits for Adam, that part
    is the host's. Time in which no lane worked is the awaited lane's.
    """
    busy: dict[str, list[_Stretch]] = {}
    for interval in timeline:
        busy.setdefault(interval.lane, []).append(
            (interval.start_ms, interval.start_ms + interval.duration_ms)
        )
    waits = [entry for entry in timeline if entry.lane == WAIT]
    exposed: dict[str, float] = {}
    for wait in waits:
        unexplained = [(wait.start_ms, wait.start_ms + wait.duration_ms)]
        for lane in dict.fromkeys((wait.name, *_CAUSES)):
            rest = _without(unexplained, busy.get(lane, ()))
            exposed[lane] = exposed.get(lane, 0.0) + _length(unexplained) - _length(rest)
            unexplained = rest
        exposed[wait.name] += _length(unexplained)
    return {lane: spent for lane, spent in exposed.items() if spent > 0}


def _without(stretches: Sequence[_Stretch], busy: Iterable[_Stretch]) -> list[_Stretch]:
    left = list(stretches)
    for lo, hi in busy:
        left = [
            piece
            for start, end in left
            for piece in ((start, min(end, lo)), (max(start, hi), end))
            if piece[0] < piece[1]
        ]
    return left


def _length(stretches: Iterable[_Stretch]) -> float:
    return sum(end - start for start, end in stretches)
