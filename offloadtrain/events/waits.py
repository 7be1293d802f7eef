"""Attributes the waits of compute in a sampled step to lanes, for `last_step.exposed_by_lane`
and for the monitor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from offloadtrain.events.schema import WAIT

_CAUSES = (
    *("h2d", "host", "update", "disk_load", "disk_read", "disk_write"),
    *("ortho", "d2h", "comm", "write"),
)
"""Lanes for which an idle awaited lane may itself have waited, nearest first."""


class Span(Protocol):
    """Work of a lane; on lane `WAIT`, a wait of compute, named after the awaited lane."""

    @property
    def lane(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def start_ms(self) -> float: ...
    @property
    def duration_ms(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait of compute.

    Attributes:
        start_ms: time since the start of the sampled step.
        by_lane: lane → its part of the wait, in milliseconds.
        lane: lane with the largest part; "" if nothing ran, and the awaited lane is unknown.
        name: operation of that lane that took most of the wait; "" if there is none.
    """

    start_ms: float
    duration_ms: float
    by_lane: Mapping[str, float]
    lane: str
    name: str


def exposed_by_lane(spans: Iterable[Span]) -> dict[str, float]:
    """Return lane → milliseconds in which compute waited for work of this lane.

    If compute waits for an upload, which itself waits for Adam for part of that time, that part
    counts for the host. The lane that an awaited lane waits for is not recorded: a lane that works
    while the awaited lane is idle counts as the cause, in the order of `_CAUSES`. Time in which no
    lane worked counts for the awaited lane.
    """
    exposed: dict[str, float] = {}
    for wait in waits_of([span for span in spans if span.lane != "compute"]):
        for lane, part_ms in wait.by_lane.items():
            exposed[lane] = exposed.get(lane, 0.0) + part_ms
    return exposed


def waits_of(spans: Iterable[Span]) -> list[Wait]:
    """Return the waits of compute by start; if none are logged, the gaps between its spans."""
    ordered = sorted(spans, key=lambda span: span.start_ms)
    by_lane: dict[str, list[Span]] = {}
    for span in ordered:
        by_lane.setdefault(span.lane, []).append(span)
    logged = [(s.start_ms, _end_ms(s), s.name) for s in by_lane.pop(WAIT, ())]
    gaps = _gaps(by_lane.pop("compute", ()))
    busy = {lane: _Busy(work) for lane, work in by_lane.items()}
    return [_explained(*wait, busy) for wait in logged or gaps]


class _Busy:
    """The work of a lane, sorted by start."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._starts_ms = [span.start_ms for span in spans]
        self._latest_ends_ms = list(accumulate(map(_end_ms, spans), max))

    def within(self, start_ms: float, end_ms: float) -> Sequence[Span]:
        """Return the spans that may overlap an interval."""
        first = bisect_right(self._latest_ends_ms, start_ms)
        return self._spans[first : bisect_left(self._starts_ms, end_ms)]


def _explained(start_ms: float, end_ms: float, awaited: str, busy: Mapping[str, _Busy]) -> Wait:
    by_lane: dict[str, float] = {}
    unexplained = [(start_ms, end_ms)]
    for lane in dict.fromkeys((awaited, *_CAUSES)):
        if lane in busy:
            rest = unexplained
            for span in busy[lane].within(start_ms, end_ms):
                rest = _without(rest, span)
            if part_ms := _length_ms(unexplained) - _length_ms(rest):
                by_lane[lane] = part_ms
            unexplained = rest
    if rest_ms := _length_ms(unexplained):
        by_lane[awaited] = by_lane.get(awaited, 0.0) + rest_ms
    cause = max(by_lane, key=lambda lane: by_lane[lane], default=awaited)
    operations = busy[cause].within(start_ms, end_ms) if cause in busy else ()
    longest = max(
        operations,
        key=lambda span: min(_end_ms(span), end_ms) - max(span.start_ms, start_ms),
        default=None,
    )
    name = "" if longest is None else longest.name
    return Wait(start_ms, end_ms - start_ms, by_lane, cause, name)


def _gaps(ordered: Sequence[Span]) -> list[tuple[float, float, str]]:
    """Return the gaps between spans, which may nest."""
    ends_ms = accumulate(map(_end_ms, ordered), max)
    gaps = ((end_ms, span.start_ms, "") for end_ms, span in zip(ends_ms, ordered[1:], strict=False))
    return [gap for gap in gaps if gap[0] < gap[1]]


def _end_ms(span: Span) -> float:
    return span.start_ms + span.duration_ms


def _without(stretches: Iterable[tuple[float, float]], span: Span) -> list[tuple[float, float]]:
    return [
        piece
        for start, end in stretches
        for piece in ((start, min(end, span.start_ms)), (max(start, _end_ms(span)), end))
        if piece[0] < piece[1]
    ]


def _length_ms(stretches: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in stretches)
