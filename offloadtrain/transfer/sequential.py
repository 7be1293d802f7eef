"""All lanes in order on the calling thread: the CPU twin of the CUDA lanes."""

from __future__ import annotations

from collections.abc import Sequence

from offloadtrain.transfer.base import (
    Event,
    Interval,
    Lane,
    Lanes,
    Operation,
    Range,
    Span,
    now_ms,
    views,
)


class _Done(Event):
    """Happened before `record` returned, because everything runs at launch."""

    __slots__ = ()


_DONE = _Done()


class SequentialLanes(Lanes):
    """Launching is executing. Whatever is not compute is exposed, since compute waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._timeline: list[Interval] | None = None
        self._origin_ms = 0.0

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        start_ms = now_ms()
        fn(*views(reads, writes))
        self._count(lane, writes)
        self._account(lane, name, start_ms)

    def record(self, lane: Lane) -> Event:
        return _DONE

    def wait(self, lane: Lane, event: Event, why: str) -> None:
        self._check(event)

    def host_wait(self, event: Event, why: str) -> None:
        self._check(event)

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    def close(self) -> None:
        self._timeline = None

    def start_timeline(self) -> None:
        self._timeline, self._origin_ms = [], now_ms()

    def take_timeline(self) -> list[Interval]:
        taken, self._timeline = self._timeline or [], None
        return sorted(taken, key=lambda interval: interval.start_ms)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        return Span(name, tuple(reads), tuple(writes), mark=now_ms())

    def close_span(self, span: Span) -> None:
        if not span.closed and isinstance(span.mark, float):
            self._note(Lane.COMPUTE, span.name, span.mark, now_ms())
        span.closed = True

    def _account(self, lane: Lane, name: str, start_ms: float) -> None:
        end_ms = now_ms()
        if lane is Lane.HOST:
            self.totals.host_busy_ms += end_ms - start_ms
        if lane is not Lane.COMPUTE:
            self.totals.exposed_ms += end_ms - start_ms
        self._note(lane, name, start_ms, end_ms)

    def _note(self, lane: Lane, name: str, start_ms: float, end_ms: float) -> None:
        if self._timeline is not None:
            self._timeline.append(
                Interval(lane, name, start_ms - self._origin_ms, end_ms - start_ms)
            )

    @staticmethod
    def _check(event: Event) -> None:
        if not isinstance(event, _Done):
            raise TypeError(f"{event!r} was not recorded by these lanes")
