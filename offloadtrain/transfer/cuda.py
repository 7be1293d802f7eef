"""Lanes over CUDA streams and threads.

[Note: Who launches what]
* compute and d2h operations are launched by the thread that runs the user's code (in backward: the
  autograd thread of the device, while the training thread waits inside backward), straight onto
  their streams.
* host, h2d, load and comm operations go to a thread of their lane each; among ranks d2h too, since
  it waits for comm. The host thread computes, without
  the interpreter's lock where the kernels are native; the others launch copies and collectives
  onto their streams. A stream cannot wait for CPU work that has not happened,
  and waiting on a CUDA event that was never recorded is a silent no-op: so whoever waits for an
  event first blocks its thread until the event is *issued* (for the host lane: has happened), then
  makes its stream wait for the rest.
* Where that thread is the training thread, the time until the event is issued counts as exposed.
* Where the state is on the device, the host lane is a stream as d2h is: there is no CPU work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from offloadtrain import cuda_driver
from offloadtrain.transfer.base import (
    Event,
    Interval,
    Lane,
    Lanes,
    LaneTotals,
    Operation,
    Range,
    Span,
    now_ms,
    views,
)
from offloadtrain.transfer.host_lane import Endable, Flag, make_host_lane
from offloadtrain.transfer.worker import Failure, Worker


class _CudaEvent(Event):
    """`cuda` is None for the host lane; `issued` is set once there is something to wait for."""

    __slots__ = ("cuda", "handle", "issued")

    def __init__(self, cuda: torch.cuda.Event | None, issued: Flag) -> None:
        self.cuda = cuda
        self.issued = issued
        self.handle = torch.zeros(1, dtype=torch.int64) if cuda is not None else None
        """The event's address, once it is issued, for threads without Python."""

    def issue(self, stream: torch.cuda.Stream) -> None:
        assert self.cuda is not None and self.handle is not None
        self.cuda.record(stream)
        self.handle[0] = self.cuda.cuda_event


@dataclass(frozen=True, slots=True)
class _StreamInterval:
    """An interval of a stream, known once both events have happened."""

    lane: Lane
    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaLanes(Lanes):
    """The lanes of one device. Streams live as long as the lanes."""

    def __init__(
        self, device: torch.device, *, among_ranks: bool = False, state_on_device: bool = False
    ) -> None:
        super().__init__()
        self._device = device
        # d2h runs beside backward; h2d beside Adam of the next block and the next forward; load
        # beside compute of the block before; comm beside all of them.
        on_threads = [Lane.H2D, Lane.LOAD, Lane.COMM, *([Lane.D2H] if among_ranks else [])]
        self._streams = {
            lane: torch.cuda.Stream(device) for lane in (Lane.D2H, Lane.H2D, Lane.LOAD, Lane.COMM)
        }
        self._host_computes = not state_on_device
        if state_on_device:
            self._streams[Lane.HOST] = torch.cuda.Stream(device)
            if among_ranks:  # it waits for d2h, which waits for comm
                on_threads.append(Lane.HOST)
        self._failure = Failure()
        begin = partial(torch.cuda.set_device, device)
        self._host = make_host_lane(self._failure, begin, cuda_driver.event_synchronize())
        self._workers = {lane: Worker(lane, self._failure, begin) for lane in on_threads}
        self._closed = False
        self._running: dict[Lane, deque[_StreamInterval]] = {lane: deque() for lane in Lane}
        """Not known to have ended; each lane's by their order."""
        self._open_spans = 0
        self._computes_since: torch.cuda.Event | None = None
        self._timeline: list[_StreamInterval] | None = None
        self._origin: tuple[float, torch.cuda.Event] | None = None

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self._failure.check()
        self._count(lane, name, writes)
        operands = views(reads, writes)
        worker = self._workers.get(lane)
        if self._is_queue(lane):
            self._host.compute(name, fn, operands)
        elif worker is None:
            self._run_on_stream(lane, name, fn, operands)
        else:
            worker.put(lambda: self._run_on_stream(lane, name, fn, operands))

    def record(self, lane: Lane) -> Event:
        self._failure.check()
        if self._is_queue(lane):
            event = _CudaEvent(None, self._host.make_flag())
            self._host.set(event.issued)
            return event
        # blocking: the host thread sleeps in synchronize() and leaves its core to Adam.
        event = _CudaEvent(torch.cuda.Event(blocking=True), self._host.make_flag())
        worker = self._workers.get(lane)
        if worker is None:
            self._issue(event, lane)
        else:
            worker.put(lambda: self._issue(event, lane), always=True)
        return event

    def wait(self, lane: Lane, event: Event, why: str) -> None:
        self._failure.check()
        event = _own(event)
        worker = self._workers.get(lane)
        if self._is_queue(lane):
            self._host_waits(event)
        elif worker is not None:
            worker.put(lambda: self._stream_wait(lane, event))
        else:
            self._block_until_issued(event)
            self._stream_wait(lane, event)

    def _host_waits(self, event: _CudaEvent) -> None:
        if event.handle is None:
            self._host.wait(event.issued)
        else:
            self._host.wait_event(event.issued, event.handle, lambda: self._block_on(event))

    def host_wait(self, event: Event, why: str) -> None:
        start_ms = now_ms()
        self._block_on(_own(event))
        self.totals.exposed_ms += now_ms() - start_ms
        self._failure.check()

    def synchronize(self) -> None:
        for lane in (Lane.D2H, Lane.HOST, Lane.H2D, Lane.LOAD, Lane.COMM):
            self.host_wait(self.record(lane), "synchronize")
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            workers: list[Endable] = [self._host, *self._workers.values()]
            for worker in workers:
                worker.end()
            for stream in self._streams.values():
                stream.synchronize()

    def start_timeline(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()  # its time is then that of the clock below, to a few microseconds
        self._timeline, self._origin = [], (now_ms(), event)
        self._host.keep_intervals(True)
        self._keep_sizes()

    def take_timeline(self) -> list[Interval]:
        self.synchronize()
        taken, self._timeline = self._timeline or [], None
        assert self._origin is not None
        resolved = [self._resolve(entry) for entry in taken]
        resolved += self._host.take_intervals(self._origin[0])
        self._host.keep_intervals(False)
        return self._sized(resolved)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        began = self._timing_event(Lane.COMPUTE)
        if self._open_spans == 0:
            self._computes_since = began
        self._open_spans += 1
        return Span(name, tuple(reads), tuple(writes), mark=began)

    def close_span(self, span: Span) -> None:
        if not span.closed and isinstance(span.mark, torch.cuda.Event):
            ended = self._timing_event(Lane.COMPUTE)
            self._open_spans -= 1
            if self._open_spans == 0 and self._computes_since is not None:
                whole = _StreamInterval(Lane.COMPUTE, "compute", self._computes_since, ended)
                self._running[Lane.COMPUTE].append(whole)
            self._sample(_StreamInterval(Lane.COMPUTE, span.name, span.mark, ended))
        span.closed = True

    def read_totals(self) -> LaneTotals:
        for lane, running in self._running.items():
            while running and running[0].end.query():
                interval = running.popleft()
                self.totals.busy_ms[lane] += interval.start.elapsed_time(interval.end)
        if self._host_computes:
            self.totals.busy_ms[Lane.HOST] = self._host.busy_ms()
        return super().read_totals()

    def _poison(self, lane: Lane, memory: torch.Tensor) -> None:
        def fill(memory: torch.Tensor) -> None:
            memory.fill_(float("nan"))

        if self._is_queue(lane):
            self._host.compute("poison", fill, [memory])
            return
        run = partial(self._run_on_stream, lane, "poison", fill, [memory])
        worker = self._workers.get(lane)
        if worker is None:
            run()
        else:
            worker.put(run)

    def _is_queue(self, lane: Lane) -> bool:
        """Whether the lane's work is the CPU's."""
        return lane is Lane.HOST and self._host_computes

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._streams.get(lane) or torch.cuda.current_stream(self._device)

    def _run_on_stream(
        self, lane: Lane, name: str, fn: Operation, operands: list[torch.Tensor]
    ) -> None:
        with torch.cuda.stream(self._stream(lane)), torch.profiler.record_function(name):
            start = self._timing_event(lane)
            fn(*operands)
            interval = _StreamInterval(lane, name, start, self._timing_event(lane))
        if lane is not Lane.COMPUTE or self._open_spans == 0:  # else it is in its span's time
            self._running[lane].append(interval)
        self._sample(interval)

    def _issue(self, event: _CudaEvent, lane: Lane) -> None:
        try:
            if self._failure.error is None:
                event.issue(self._stream(lane))
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
        self._failure.check()

    def _timing_event(self, lane: Lane) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(lane))
        return event

    def _sample(self, interval: _StreamInterval) -> None:
        if (timeline := self._timeline) is not None:
            timeline.append(interval)

    def _resolve(self, entry: _StreamInterval) -> Interval:
        assert self._origin is not None
        start_ms = self._origin[1].elapsed_time(entry.start)
        return Interval(entry.lane, entry.name, start_ms, entry.start.elapsed_time(entry.end))


def _own(event: Event) -> _CudaEvent:
    if not isinstance(event, _CudaEvent):
        raise TypeError(f"{event!r} was not recorded by these lanes")
    return event
