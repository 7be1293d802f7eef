"""Exposed time by lane, in a sampled step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offloadtrain.events.schema import WAIT
from offloadtrain.runtime.lanes.timeline import Interval
from offloadtrain.step.program.operations import Lane

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
        left = [(wait.start_ms, wait.start_ms + wait.duration_ms)]
        for lane in dict.fromkeys((wait.name, *_CAUSES)):
            rest = _without(left, busy.get(lane, ()))
            exposed[lane] = exposed.get(lane, 0.0) + _length(left) - _length(rest)
            left = rest
        exposed[wait.name] += _length(left)
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
