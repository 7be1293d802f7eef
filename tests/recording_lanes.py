"""Lanes that run on another backend and record the calls to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offloadtrain.runtime.lanes.base import (
    Buffer,
    HostProgress,
    LaneEvent,
    Lanes,
    LaneTotals,
    Operation,
    Range,
    Span,
)
from offloadtrain.runtime.lanes.timeline import Timeline
from offloadtrain.step.program.operations import Lane
from offloadtrain.step.proof.recording import (
    Bytes,
    Closed,
    Entry,
    Launched,
    Opened,
    Recorded,
    Undefined,
    Waited,
    allocated,
)


class _Numbered(LaneEvent):
    __slots__ = ("inner", "number")

    def __init__(self, number: int, inner: LaneEvent) -> None:
        self.number = number
        self.inner = inner


class RecordingLanes(Lanes):
    """Delegates to `inner`; `program` grows by an entry per call."""

    def __init__(self, inner: Lanes) -> None:
        self.inner = inner
        self.program: list[Entry] = []
        self._events = 0
        self._spans: dict[int, int] = {}
        """id of an open span → its number."""
        self._opened = 0
        super().__init__()
        self.totals = inner.totals

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self.program.append(Launched(lane, name, _bytes(reads), _bytes(writes)))
        self.inner.launch(lane, name, fn, reads, writes)

    def record(self, lane: Lane) -> LaneEvent:
        self._events += 1
        self.program.append(Recorded(lane, self._events))
        return _Numbered(self._events, self.inner.record(lane))

    def wait(self, lane: Lane, event: LaneEvent, why: object) -> None:
        numbered = _Numbered.own(event)
        self.program.append(Waited(lane, numbered.number, str(why)))
        self.inner.wait(lane, numbered.inner, why)

    def host_wait(self, event: LaneEvent, why: object) -> None:
        numbered = _Numbered.own(event)
        self.program.append(Waited(None, numbered.number, str(why)))
        self.inner.host_wait(numbered.inner, why)

    def synchronize(self) -> None:
        # The record needs a wait per lane: the prover knows no other order.
        for lane in Lane:
            self.host_wait(self.record(lane), "synchronize")
        self.inner.synchronize()

    def close(self) -> None:
        self.inner.close()

    def host_progress(self) -> HostProgress:
        return self.inner.host_progress()

    def abandon(self) -> None:
        self.inner.abandon()

    def read_totals(self) -> LaneTotals:
        return self.inner.read_totals()

    def start_timeline(self) -> None:
        self.inner.start_timeline()

    def end_timeline(self) -> Timeline:
        return self.inner.end_timeline()

    def _run_in_order(self, lane: Lane, task: Callable[[], object]) -> None:
        self.inner._run_in_order(lane, task)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        span = self.inner.open_span(name, reads, writes)
        self._opened += 1
        self._spans[id(span)] = self._opened
        self.program.append(Opened(self._opened, name, _bytes(reads), _bytes(writes)))
        return span

    def close_span(self, span: Span) -> None:
        number = self._spans.pop(id(span), None)
        if number is not None:
            self.program.append(Closed(number))
        self.inner.close_span(span)

    def undefine(self, range_: Range, lane: Lane) -> None:
        self.program.append(Undefined(extent(range_)))
        self.inner.undefine(range_, lane)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = self.inner.allocate(numel, dtype, device)
        self.program += allocated(extent(Buffer("block input", memory).whole))
        return memory


def _bytes(ranges: Sequence[Range]) -> tuple[Bytes, ...]:
    return tuple(map(extent, ranges))


def extent(range_: Range) -> Bytes:
    lo = range_.view.data_ptr()
    return Bytes(range_.buffer.name, lo, lo + range_.nbytes)
