"""The common part of the CPU's lanes: intervals by the wall clock of this process."""

from __future__ import annotations

from collections.abc import Sequence

from offloadtrain.events.schema import WAIT
from offloadtrain.runtime.lanes.base import Lanes, Range, Span, now_ms
from offloadtrain.runtime.lanes.timeline import Interval
from offloadtrain.step.program.operations import Lane


class ClockedLanes(Lanes):
    """Lanes whose operations begin and end on threads of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._intervals: list[Interval] = []
        self._samples = dict.fromkeys(Lane, False)
        """Lane → True while its intervals are recorded. Each lane ends it on its own thread."""
        self._origin_ms = 0.0
        self._open_spans = 0
        self._computes_since = (0.0, 0.0)
        """The beginning of the outermost open span, and the exposed time up to then."""

    def _begin_sampling(self) -> None:
        self._intervals, self._origin_ms = [], now_ms()
        self._samples = dict.fromkeys(Lane, True)

    def _end_sampling(self, lane: Lane) -> None:
        self._samples[lane] = False

    def _sampled(self) -> list[Interval]:
        return self._intervals

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        began_ms = now_ms()
        if self._open_spans == 0:
            self._computes_since = (began_ms, self.totals.exposed_ms)
        self._open_spans += 1
        return Span(name, tuple(reads), tuple(writes), mark=began_ms)

    def close_span(self, span: Span) -> None:
        if not span.closed and isinstance(span.mark, float):
            ended_ms = now_ms()
            self._open_spans -= 1
            # Spans may be nested: only the outermost counts.
            if self._open_spans == 0:
                began_ms, waited_ms = self._computes_since
                waited_ms = self.totals.exposed_ms - waited_ms
                self.totals.busy_ms[Lane.COMPUTE] += ended_ms - began_ms - waited_ms
            self._note(Lane.COMPUTE, Lane.COMPUTE, span.name, span.mark, ended_ms)
        span.closed = True

    def _account(self, lane: Lane, name: str, start_ms: float) -> None:
        """Record the end of an operation."""
        end_ms = now_ms()
        # Compute's operations inside a span are in the span's time. No lock: the lane's own thread
        # is the only writer of its entry.
        if lane is not Lane.COMPUTE or self._open_spans == 0:
            self.totals.busy_ms[lane] += end_ms - start_ms
        self._note(lane, lane, name, start_ms, end_ms)

    def _expose(self, lane: Lane, start_ms: float) -> None:
        """Count the time since `start_ms`, in which compute waited for `lane`."""
        end_ms = now_ms()
        self.totals.exposed_ms += end_ms - start_ms
        self._note(Lane.COMPUTE, WAIT, lane.value, start_ms, end_ms)

    def _note(self, of: Lane, row: str, name: str, start_ms: float, end_ms: float) -> None:
        """Record an interval of a lane; `row`: the lane, or that of the waits."""
        if self._samples[of]:
            start, duration = start_ms - self._origin_ms, end_ms - start_ms
            self._intervals.append(Interval(row, name, start, duration))
