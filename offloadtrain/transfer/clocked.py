"""What lanes of the CPU share: intervals by the wall clock of this process."""

from __future__ import annotations

from collections.abc import Sequence

from offloadtrain.transfer.base import Interval, Lane, Lanes, Range, Span, now_ms


class ClockedLanes(Lanes):
    """Lanes whose operations begin and end on threads of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._timeline: list[Interval] | None = None
        self._origin_ms = 0.0

    def start_timeline(self) -> None:
        self._timeline, self._origin_ms = [], now_ms()

    def take_timeline(self) -> list[Interval]:
        self.synchronize()
        taken, self._timeline = self._timeline or [], None
        return sorted(taken, key=lambda interval: interval.start_ms)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        return Span(name, tuple(reads), tuple(writes), mark=now_ms())

    def close_span(self, span: Span) -> None:
        if not span.closed and isinstance(span.mark, float):
            self._note(Lane.COMPUTE, span.name, span.mark, now_ms())
        span.closed = True

    def _account(self, lane: Lane, name: str, start_ms: float) -> None:
        """An operation has ended."""
        end_ms = now_ms()
        if lane is Lane.HOST:  # one thread runs these: the only writer of this total
            self.totals.host_busy_ms += end_ms - start_ms
        self._note(lane, name, start_ms, end_ms)

    def _note(self, lane: Lane, name: str, start_ms: float, end_ms: float) -> None:
        timeline = self._timeline
        if timeline is not None:
            start, duration = start_ms - self._origin_ms, end_ms - start_ms
            timeline.append(Interval(lane, name, start, duration))
