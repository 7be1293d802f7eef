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
* What compute waits, it waits on its stream: the time between two events there, one before the
  wait and one behind it. Where the training thread itself is blocked, so is what it would launch:
  the same two events tell for how long the stream had nothing to do.
* Where the state is on the device, the host lane is a stream as d2h is: there is no CPU work.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from offloadtrain.events.schema import WAIT
from offloadtrain.runtime import cuda_driver
from offloadtrain.runtime.lanes.base import (
    Interval,
    LaneError,
    LaneEvent,
    Lanes,
    LaneTotals,
    Operation,
    Range,
    Span,
    now_ms,
    views,
)
from offloadtrain.runtime.lanes.host_lane import Endable, Flag, make_host_lane
from offloadtrain.runtime.lanes.worker import Failure, Worker
from offloadtrain.step.operations import Lane

_KEPT = 32
"""Intervals of compute, from which on those that have ended are counted and let go."""


class _CudaEvent(LaneEvent):
    """`cuda` is None for the host lane; `issued` is set once there is something to wait for."""

    __slots__ = ("cuda", "handle", "issued", "lane")

    def __init__(self, lane: Lane, cuda: torch.cuda.Event | None, issued: Flag) -> None:
        self.lane = lane
        self.cuda = cuda
        self.issued = issued
        self.handle = ctypes.c_uint64()
        """The event's address, once it is issued, for threads without Python."""

    def issue(self, stream: torch.cuda.Stream) -> None:
        assert self.cuda is not None
        self.cuda.record(stream)
        self.handle.value = self.cuda.cuda_event

    def has_happened(self) -> bool:
        if self.cuda is None or not self.issued.is_set():
            return self.issued.is_set()
        return self.handle.value != 0 and bool(self.cuda.query())  # 0: its lane has failed before


@dataclass(frozen=True, slots=True)
class _StreamInterval:
    """An interval of a stream, known once both events have happened.

    Attributes:
        waits: stretches of it in which the stream had nothing to do.
    """

    lane: str
    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event
    waits: tuple[_StreamInterval, ...] = ()

    def is_over(self) -> bool:
        return bool(self.end.query() and self.start.query())

    def busy_ms(self) -> float:
        return self.elapsed_ms() - sum(wait.elapsed_ms() for wait in self.waits)

    def elapsed_ms(self) -> float:
        return float(self.start.elapsed_time(self.end))


class CudaLanes(Lanes):
    """The lanes of one device. Streams live as long as the lanes."""

    def __init__(
        self, device: torch.device, *, among_ranks: bool = False, state_on_device: bool = False
    ) -> None:
        super().__init__()
        self._device = device = _indexed(device)
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
        begin = partial(_bind, device)
        self._host = make_host_lane(self._failure, begin, cuda_driver.event_synchronize())
        self._workers = {lane: Worker(lane, self._failure, begin) for lane in on_threads}
        self._closed = False
        self._running: dict[Lane, deque[_StreamInterval]] = {lane: deque() for lane in Lane}
        """Not known to have ended; each lane's by their order."""
        self._waits: deque[_StreamInterval] = deque()
        """Of compute, not known to have ended."""
        self._waits_in_span: list[_StreamInterval] = []
        self._draining = False
        """Waiting for the lanes at the end of a sampled step: nobody computes, nobody waits."""
        self._computed_on: torch.cuda.Stream | None = None
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

    def record(self, lane: Lane) -> LaneEvent:
        if not self._closed:
            self._failure.check()
        elif lane is not Lane.COMPUTE:  # of which weights are still taken off the device
            raise LaneError(f"nothing will happen on {lane}: the lanes are closed")
        if self._is_queue(lane):
            event = _CudaEvent(lane, None, self._host.make_flag())
            self._host.set(event.issued)
            return event
        # blocking: the host thread sleeps in synchronize() and leaves its core to Adam.
        event = _CudaEvent(lane, torch.cuda.Event(blocking=True), self._host.make_flag())
        worker = self._workers.get(lane)
        if worker is None:
            self._issue(event, lane)
        else:
            worker.put(lambda: self._issue(event, lane), always=True)
        return event

    def wait(self, lane: Lane, event: LaneEvent, why: str) -> None:
        self._failure.check()
        event = _own(event)
        worker = self._workers.get(lane)
        if self._is_queue(lane):
            self._host_waits(event)
        elif worker is not None:
            worker.put(lambda: self._stream_wait(lane, event))
        elif lane is Lane.COMPUTE and not event.has_happened():
            began = self._timing_event(Lane.COMPUTE)
            event.issued.wait()
            self._failure.check()
            self._stream_wait(lane, event)
            self._expose(event.lane, began)
        else:
            self._block_until_issued(event)
            self._stream_wait(lane, event)

    def _host_waits(self, event: _CudaEvent) -> None:
        if event.cuda is None:
            self._host.wait(event.issued)
        else:
            self._host.wait_event(event.issued, event.handle, lambda: self._block_on(event))

    def host_wait(self, event: LaneEvent, why: str) -> None:
        own = _own(event)
        if not own.has_happened():
            began = self._timing_event(Lane.COMPUTE)
            self._block_on(own)
            self._expose(own.lane, began)
        self._failure.check()

    def synchronize(self) -> None:
        for lane in (Lane.D2H, Lane.HOST, Lane.H2D, Lane.LOAD, Lane.COMM):
            self.host_wait(self.record(lane), "synchronize")
        self._stream(Lane.COMPUTE).synchronize()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            workers: list[Endable] = [self._host, *self._workers.values()]
            for worker in workers:
                worker.end()
            for stream in self._streams.values():
                try:
                    stream.synchronize()
                except RuntimeError as error:  # the GPU has failed: what comes next says so
                    self._failure.fail(error)

    def start_timeline(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(Lane.COMPUTE))
        event.synchronize()  # its time is then that of the clock below, to a few microseconds
        self._timeline, self._origin = [], (now_ms(), event)
        self._host.keep_intervals(True)
        self._keep_sizes()

    def take_timeline(self) -> list[Interval]:
        self._draining = True
        self.synchronize()
        self._draining = False
        taken, self._timeline = self._timeline or [], None
        assert self._origin is not None
        resolved = [self._resolve(entry) for entry in taken]
        resolved += self._host.take_intervals(self._origin[0])
        self._host.keep_intervals(False)
        return self._sized(resolved)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        if len(self._running[Lane.COMPUTE]) >= _KEPT:  # an evaluation has no step() to do it
            self._settle()
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
                waits, self._waits_in_span = tuple(self._waits_in_span), []
                whole = _StreamInterval(Lane.COMPUTE, "compute", self._computes_since, ended, waits)
                self._running[Lane.COMPUTE].append(whole)
            self._sample(_StreamInterval(Lane.COMPUTE, span.name, span.mark, ended))
        span.closed = True

    def read_totals(self) -> LaneTotals:
        self._settle()
        if self._host_computes:
            self.totals.busy_ms[Lane.HOST] = self._host.busy_ms()
        return super().read_totals()

    def _settle(self) -> None:
        """Count what is known to have ended. By the thread that trains, or autograd's."""
        for lane, running in self._running.items():
            while running and running[0].is_over():
                self.totals.busy_ms[lane] += running.popleft().busy_ms()
        while self._waits and self._waits[0].is_over():
            self.totals.exposed_ms += self._waits.popleft().elapsed_ms()

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
        return self._compute_stream() if lane not in self._streams else self._streams[lane]

    def _compute_stream(self) -> torch.cuda.Stream:
        """The caller's. One that is another than before waits for it first: a step() outside of the
        `with torch.cuda.stream(...)` of its forward is behind that forward."""
        current = torch.cuda.current_stream(self._device)
        if self._computed_on is not None and current != self._computed_on:
            current.wait_stream(self._computed_on)
        self._computed_on = current
        return current

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
            began = self._timing_event(Lane.COMPUTE)
            event.issued.wait()
            self._expose(event.lane, began)
        self._failure.check()

    def _expose(self, lane: Lane, began: torch.cuda.Event) -> None:
        """Compute had nothing to do since then, or as soon as its work was done, for `lane`."""
        wait = _StreamInterval(WAIT, lane.value, began, self._timing_event(Lane.COMPUTE))
        self._waits.append(wait)
        if self._open_spans:
            self._waits_in_span.append(wait)
        if not self._draining:
            self._sample(wait)

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
        return Interval(entry.lane, entry.name, start_ms, entry.elapsed_ms())


def _indexed(device: torch.device) -> torch.device:
    """Threads cannot be put on a device without an index."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _bind(device: torch.device) -> None:
    """Make a thread's calls, the driver's own too, go to the device. Choosing it may do nothing
    until the runtime is asked for something there, and a query is the least that one can ask."""
    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).query()


def _own(event: LaneEvent) -> _CudaEvent:
    if not isinstance(event, _CudaEvent):
        raise TypeError(f"{event!r} was not recorded by these lanes")
    return event
