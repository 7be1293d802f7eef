"""Lanes over CUDA streams and one host thread.

[Note: Who launches what]
* compute and d2h operations are launched by the thread that runs the user's code (in backward: the
  autograd thread of the device, while the training thread waits inside backward), straight onto
  their streams.
* host and h2d operations go through one queue to the *host thread*, in order: it executes Adam of a
  block, then launches that block's upload, then starts on the next block while the upload runs. A
  stream cannot wait for CPU work that has not happened, and waiting on a CUDA event that was never
  recorded is a silent no-op; in one queue the order is there by construction.
* A lane of the training thread that waits for an event of the queue first waits until the host
  thread has *issued* it, then makes its stream wait for the rest. That first part is counted as
  exposed time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offloadtrain.transfer.base import (
    Event,
    Interval,
    Lane,
    LaneError,
    Lanes,
    Operation,
    Range,
    Span,
    now_ms,
    views,
)


class _CudaEvent(Event):
    """`cuda` is None for the host lane; `issued` is set once there is something to wait for."""

    __slots__ = ("cuda", "issued")

    def __init__(self, cuda: torch.cuda.Event | None) -> None:
        self.cuda = cuda
        self.issued = threading.Event()


@dataclass(frozen=True, slots=True)
class _StreamInterval:
    """An interval of a stream, known once both events have happened."""

    lane: Lane
    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event


class _HostThread:
    """The queue of the host and h2d lanes. After a failure it only drains, so that nobody hangs."""

    def __init__(self, device: torch.device) -> None:
        self.failure: BaseException | None = None
        self._device = device
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="offloadtrain-host", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None], *, always: bool = False) -> None:
        """`always`: also run after a failure (the tasks that set events)."""
        self._tasks.put((task, always))

    def end(self) -> None:
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:  # the collector may run us anywhere
            self._thread.join()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while (entry := self._tasks.get()) is not None:
            task, always = entry
            if self.failure is not None and not always:
                continue
            try:
                task()
            except BaseException as error:  # raised by the next call of the training thread
                self.failure = error


class CudaLanes(Lanes):
    """Four lanes of one device. Streams live as long as the lanes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # d2h runs beside backward; h2d runs beside Adam of the next block and the next forward.
        self._streams = {Lane.D2H: torch.cuda.Stream(device), Lane.H2D: torch.cuda.Stream(device)}
        self._host = _HostThread(device)
        self._closed = False
        self._timeline: list[Interval | _StreamInterval] | None = None
        self._origin: tuple[float, torch.cuda.Event] | None = None

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self._raise_failure()
        self._count(lane, writes)
        operands = views(reads, writes)
        if lane is Lane.HOST:
            self._host.put(lambda: self._run_on_host(name, fn, operands))
        elif lane is Lane.H2D:
            self._host.put(lambda: self._run_on_stream(lane, name, fn, operands))
        else:
            self._run_on_stream(lane, name, fn, operands)

    def record(self, lane: Lane) -> Event:
        self._raise_failure()
        if lane is Lane.HOST:
            event = _CudaEvent(None)
            self._host.put(event.issued.set, always=True)
            return event
        # blocking: the host thread sleeps in synchronize() and leaves its core to Adam.
        event = _CudaEvent(torch.cuda.Event(blocking=True))
        if lane is Lane.H2D:
            self._host.put(lambda: self._issue(event, lane), always=True)
        else:
            self._issue(event, lane)
        return event

    def wait(self, lane: Lane, event: Event, why: str) -> None:
        self._raise_failure()
        event = _own(event)
        if lane is Lane.HOST:
            self._host.put(lambda: self._block_on(event))
        elif lane is Lane.H2D:
            self._host.put(lambda: self._stream_wait(lane, event))
        else:
            self._block_until_issued(event)
            self._stream_wait(lane, event)

    def host_wait(self, event: Event, why: str) -> None:
        start_ms = now_ms()
        self._block_on(_own(event))
        self.totals.exposed_ms += now_ms() - start_ms
        self._raise_failure()

    def synchronize(self) -> None:
        for lane in (Lane.D2H, Lane.HOST, Lane.H2D):
            self.host_wait(self.record(lane), "synchronize")
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._host.end()
            for stream in self._streams.values():
                stream.synchronize()

    def start_timeline(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._timeline, self._origin = [], (now_ms(), event)

    def take_timeline(self) -> list[Interval]:
        self.synchronize()
        taken, self._timeline = self._timeline or [], None
        resolved = [self._resolve(entry) for entry in taken]
        return sorted(resolved, key=lambda interval: interval.start_ms)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        return Span(name, tuple(reads), tuple(writes), mark=self._timing_event(Lane.COMPUTE))

    def close_span(self, span: Span) -> None:
        if not span.closed and isinstance(span.mark, torch.cuda.Event):
            self._note_stream(Lane.COMPUTE, span.name, span.mark)
        span.closed = True

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._streams.get(lane) or torch.cuda.current_stream(self._device)

    def _run_on_stream(
        self, lane: Lane, name: str, fn: Operation, operands: list[torch.Tensor]
    ) -> None:
        with torch.cuda.stream(self._stream(lane)), torch.profiler.record_function(name):
            start = self._timing_event(lane)
            fn(*operands)
            if start is not None:
                self._note_stream(lane, name, start)

    def _run_on_host(self, name: str, fn: Operation, operands: list[torch.Tensor]) -> None:
        start_ms = now_ms()
        fn(*operands)
        end_ms = now_ms()
        self.totals.host_busy_ms += end_ms - start_ms
        if self._timeline is not None and self._origin is not None:
            origin_ms = self._origin[0]
            self._timeline.append(
                Interval(Lane.HOST, name, start_ms - origin_ms, end_ms - start_ms)
            )

    def _issue(self, event: _CudaEvent, lane: Lane) -> None:
        try:
            if event.cuda is not None and self._host.failure is None:
                event.cuda.record(self._stream(lane))
        finally:
            event.issued.set()

    def _stream_wait(self, lane: Lane, event: _CudaEvent) -> None:
        event.issued.wait()
        if event.cuda is not None:
            self._stream(lane).wait_event(event.cuda)

    def _block_on(self, event: _CudaEvent) -> None:
        event.issued.wait()
        if event.cuda is not None:
            event.cuda.synchronize()

    def _block_until_issued(self, event: _CudaEvent) -> None:
        if not event.issued.is_set():
            start_ms = now_ms()
            event.issued.wait()
            self.totals.exposed_ms += now_ms() - start_ms
        self._raise_failure()

    def _timing_event(self, lane: Lane) -> torch.cuda.Event | None:
        if self._timeline is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(lane))
        return event

    def _note_stream(self, lane: Lane, name: str, start: torch.cuda.Event) -> None:
        end = self._timing_event(lane)
        if end is not None and self._timeline is not None:
            self._timeline.append(_StreamInterval(lane, name, start, end))

    def _resolve(self, entry: Interval | _StreamInterval) -> Interval:
        if isinstance(entry, Interval) or self._origin is None:
            assert isinstance(entry, Interval)
            return entry
        start_ms = self._origin[1].elapsed_time(entry.start)
        return Interval(entry.lane, entry.name, start_ms, entry.start.elapsed_time(entry.end))

    def _raise_failure(self) -> None:
        failure = self._host.failure
        if failure is not None:
            raise LaneError(f"the host lane failed: {failure}") from failure


def _own(event: Event) -> _CudaEvent:
    if not isinstance(event, _CudaEvent):
        raise TypeError(f"{event!r} was not recorded by these lanes")
    return event
