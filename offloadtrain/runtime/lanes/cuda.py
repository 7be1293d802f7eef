"""Lanes over CUDA streams and threads.

[Note: Who launches what]
* The thread that runs the user's code launches compute and d2h operations directly onto their
  streams (in backward: the device's autograd thread, while the training thread waits inside
  backward).
* host, h2d, load, comm, ortho, update and the lanes of the disk have a thread each; with several
  ranks d2h too, since it waits for comm. The host thread computes, without the GIL if the
  kernels are native; the threads of the disk move memory to and from the disk, and copy
  from the device on a separate stream. The others launch copies, collectives and the device's
  part of updates onto their streams.
* A load whose lane's thread is idle, and whose awaited events are issued, is launched by the
  launching thread itself: this does not block, and the other thread would get the GIL only when
  this thread releases it.
* A stream cannot wait for CPU work that has not happened, and a wait for a CUDA event that was
  never recorded is a silent no-op. So a waiting thread first blocks until the event is *issued*
  (for lanes without a stream: has happened), then makes its stream wait for the rest.
* Compute stalls are timed with an event on its stream before and after each wait. If the
  training thread itself is blocked, these two events time how long the stream was idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from offloadtrain.runtime import cuda_driver
from offloadtrain.runtime.lanes.base import (
    LaneError,
    LaneEvent,
    LaneTotals,
    Operation,
    Range,
    Span,
    views,
)
from offloadtrain.runtime.lanes.queues import (
    LaneQueue,
    PythonQueue,
    QueuedLanes,
    Worker,
    make_host_queue,
)
from offloadtrain.runtime.lanes.stream_times import StreamEvent, StreamTimes
from offloadtrain.runtime.lanes.timeline import Interval
from offloadtrain.step.program.operations import Lane

_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled

DISK_LANES = (Lane.WRITE, Lane.DISK_READ, Lane.DISK_WRITE, Lane.DISK_LOAD)
"""Lanes between the host and the disk."""


class CudaLanes(QueuedLanes):
    """The lanes of one device. Streams live as long as the lanes."""

    def __init__(self, device: torch.device, *, among_ranks: bool = False) -> None:
        super().__init__()
        self._device = device = _indexed(device)
        # d2h runs during backward; h2d during Adam of the next block and the next forward; load
        # during compute of the previous block; comm during all of them; ortho during Adam of the
        # previous block; update during compute of other blocks, and Adam on the host. A lane with a
        # thread waits on it for events not yet issued; d2h of a single rank blocks the launching
        # thread.
        on_threads = [Lane.H2D, Lane.LOAD, Lane.COMM, Lane.ORTHO, Lane.UPDATE]
        on_threads += [Lane.D2H] if among_ranks else []
        streamed = dict.fromkeys([*on_threads, Lane.D2H, Lane.WRITE])
        self._streams = {lane: torch.cuda.Stream(device) for lane in streamed}
        begin = partial(_bind, device)
        self._host = make_host_queue(self._failure, begin, cuda_driver.event_synchronize())
        self._workers = {lane: Worker(lane, self._failure, begin) for lane in on_threads}
        self._awaited: dict[Lane, list[StreamEvent]] = {lane: [] for lane in on_threads}
        """Events that the next task of a lane with a thread waits for."""
        self._queues = {Lane.HOST: self._host}
        for lane in DISK_LANES:
            # write also reads state on the device: on compute's stream the next forward would wait
            # for it.
            bound = partial(_bind, device, self._streams.get(lane))
            self._queues[lane] = PythonQueue(self._failure, bound, lane)
        self._times = StreamTimes()
        self._computed_on: torch.cuda.Stream | None = None

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
        # A queue owns the operands until it has run them. No record_stream: the memory is fixed
        # buffers, or block inputs, which compute waits for before they are freed.
        if lane in self._queues:
            self._queues[lane].compute(name, fn, operands)
        elif worker is None:
            self._run_on_stream(lane, name, fn, operands)
        else:
            self._put(lane, worker, lambda: self._run_on_stream(lane, name, fn, operands))

    def record(self, lane: Lane) -> LaneEvent:
        # Closed lanes run nothing, but compute is the user's stream: weights still leave the
        # device.
        if not self._closed:
            self._failure.check()
        elif lane is not Lane.COMPUTE:
            raise LaneError(f"nothing will happen on {lane}: the lanes are closed")
        if lane in self._queues:
            # A flag that the host thread can wait for without the GIL.
            event = StreamEvent(lane, None, self._host.make_flag())
            self._queues[lane].set(event.issued)
            return event
        # blocking: the host thread sleeps in synchronize() and leaves its core to Adam.
        event = StreamEvent(lane, torch.cuda.Event(blocking=True), self._host.make_flag())
        worker = self._workers.get(lane)
        # After the waits too: code that waits for this event relies on them.
        if worker is not None and self._awaited[lane]:
            self._put(lane, worker, lambda: None)
        # `always`: also set after a failure, or a thread that waits for it would never end.
        if worker is None or self._launches_itself(lane, worker):
            self._issue(event, lane)
        else:
            worker.put(lambda: self._issue(event, lane), always=True)
        return event

    def wait(self, lane: Lane, event: LaneEvent, why: object) -> None:
        event = StreamEvent.own(event)
        worker = self._workers.get(lane)
        # A lane with a thread waits on that thread: later tasks of its queue are delayed, and
        # this thread continues to launch.
        if lane in self._queues:
            self._queue_waits(self._queues[lane], event)
        # Queued with the next launch, which it delays: one task wakes the thread, not two.
        elif worker is not None:
            self._awaited[lane].append(event)
        # Compute: this thread blocks until the event is issued, the stream until it happens: all
        # exposed.
        elif lane is Lane.COMPUTE and not event.has_happened():
            began = self._timing_event(Lane.COMPUTE)
            event.issued.wait()
            # A failed lane has set the flag without recording an event.
            self._failure.check()
            self._stream_wait(lane, event)
            self._expose(event.lane, began)
        # d2h without a thread: for an event of the host lane this thread blocks until it happens.
        else:
            # This thread launches compute: while it is blocked, compute's stream is idle.
            if not event.issued.is_set():
                began = self._timing_event(Lane.COMPUTE)
                event.issued.wait()
                self._expose(event.lane, began)
            self._failure.check()
            self._stream_wait(lane, event)

    def follow_caller(self) -> None:
        # The caller's code may have launched writes to memory that the lane reads next.
        self.wait(Lane.WRITE, self.record(Lane.COMPUTE), "code of the caller")

    def _put(self, lane: Lane, worker: Worker, task: Callable[[], object]) -> None:
        """Queue a task of a lane with a thread after the waits since its last task."""
        awaited = self._awaited[lane]
        is_direct = self._launches_itself(lane, worker)
        if awaited:
            self._awaited[lane] = []
        # From here on the queue owns the operands; this thread continues to launch.
        put = worker.run if is_direct else worker.put
        put(partial(self._run_after, lane, awaited, task) if awaited else task)

    def _run_after(
        self, lane: Lane, awaited: Sequence[StreamEvent], task: Callable[[], object]
    ) -> None:
        for event in awaited:
            self._stream_wait(lane, event)
        # A failed lane has also set the flag: nothing runs after it.
        if self._failure.error is None:
            task()

    def _launches_itself(self, lane: Lane, worker: Worker) -> bool:
        """Return True if this thread launches an operation of a lane with a thread itself: it does
        not block, and all earlier operations of the lane are launched."""
        if lane is not Lane.LOAD or worker.pending() or self.copies_block:
            return False
        return all(event.issued.is_set() for event in self._awaited[lane])

    def _queue_waits(self, queue: LaneQueue, event: StreamEvent) -> None:
        # On the queue's thread: for a copy, it blocks on the CUDA event itself.
        if event.cuda is None:
            queue.wait(event.issued)
        else:
            queue.wait_event(event.issued, event.handle, lambda: self._block_on(event))

    def host_wait(self, event: LaneEvent, why: object) -> None:
        awaited = StreamEvent.own(event)
        if not awaited.has_happened():
            # While this thread is blocked, compute's stream is idle between the events.
            began = self._timing_event(Lane.COMPUTE)
            self._block_on(awaited)
            if not self._is_reading:
                self._expose(awaited.lane, began)
        self._failure.check()

    def synchronize(self) -> None:
        # Nothing is launched meanwhile: a lane that has reached its event is idle.
        for lane in (lane for lane in Lane if lane is not Lane.COMPUTE):
            self.host_wait(self.record(lane), "synchronize")
        self._stream(Lane.COMPUTE).synchronize()

    def abandon(self) -> None:
        self._failure.fail(LaneError("the lanes were abandoned"))
        # Only for the host lane: a stream's event may never happen. The flag is also set after a
        # failure. The device's lanes only read the state, or write memory that no update reads.
        stopped = self._host.make_flag()
        self._host.set(stopped)
        stopped.wait()

    def close(self) -> None:
        if not self._closed:
            super().close()
            # The threads have launched everything: copies may still use memory that is freed next.
            for stream in self._streams.values():
                # After a failure of the GPU: the next call that needs it raises.
                try:
                    stream.synchronize()
                except RuntimeError as error:
                    self._failure.fail(error)

    def _run_in_order(self, lane: Lane, task: Callable[[], object]) -> None:
        worker = self._workers.get(lane)
        if lane in self._queues:
            self._queues[lane].run(task)
        elif worker is None:
            self._on_stream(lane, task)
        else:
            # Through the queue: after the lane's earlier work, before later launches.
            self._put(lane, worker, partial(self._on_stream, lane, task))

    def _begin_sampling(self) -> None:
        # Compute is idle from here on, so an event happens as soon as it is recorded. After step()
        # it is idle already: the thread has waited for the norm.
        self._stream(Lane.COMPUTE).synchronize()
        self._times.begin_sampling(self._stream(Lane.COMPUTE))
        super()._begin_sampling()

    def _end_sampling(self, lane: Lane) -> None:
        self._times.end_sampling(lane)
        super()._end_sampling(lane)

    def _sampled(self) -> list[Interval]:
        began_ms, resolved = self._times.sampled()
        return resolved + self._of_queues(began_ms)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        mark = self._times.open(name, self._compute_event, self.totals)
        return Span(name, tuple(reads), tuple(writes), mark=mark)

    def close_span(self, span: Span) -> None:
        if not span.closed:
            mark = span.mark if isinstance(span.mark, torch.cuda.Event) else None
            self._times.close(span.name, mark, self._compute_event)
        span.closed = True

    def read_totals(self) -> LaneTotals:
        self._times.settle(self.totals)
        return super().read_totals()

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        """Return the lane's stream; for compute, the caller's current stream."""
        if lane in self._streams:
            return self._streams[lane]
        current = torch.cuda.current_stream(self._device)
        # A new stream waits for the previous one: a step() outside the `with
        # torch.cuda.stream(...)` of its forward must run after that forward.
        if self._computed_on is not None and current != self._computed_on:
            current.wait_stream(self._computed_on)
        self._computed_on = current
        return current

    def _run_on_stream(
        self, lane: Lane, name: str, fn: Operation, operands: list[torch.Tensor]
    ) -> None:
        stream = self._stream(lane)
        # A name for torch's profiler takes as long as a launch: only if a profiler is active.
        named = torch.profiler.record_function(name) if _profiled() else nullcontext()
        with named, nullcontext() if lane is Lane.COMPUTE else torch.cuda.stream(stream):
            if not self._times.should_time(lane, name):
                fn(*operands)
                return
            start = self._timing_event(lane)
            fn(*operands)
            self._times.ran(lane, name, start, self._timing_event(lane))

    def _on_stream(self, lane: Lane, task: Callable[[], object]) -> None:
        """Run a task that is not counted."""
        with nullcontext() if lane is Lane.COMPUTE else torch.cuda.stream(self._stream(lane)):
            task()

    def _issue(self, event: StreamEvent, lane: Lane) -> None:
        # After a failure the flag is set without an event: waiting threads then see the error.
        try:
            if self._failure.error is None:
                event.issue(self._stream(lane))
        finally:
            event.issued.set()

    def _stream_wait(self, lane: Lane, event: StreamEvent) -> None:
        # First the flag: a stream does not wait for an event that is not recorded yet.
        event.issued.wait()
        if event.cuda is not None:
            self._stream(lane).wait_event(event.cuda)

    def _block_on(self, event: StreamEvent) -> None:
        # First the flag: an event that is not recorded yet would return at once.
        event.issued.wait()
        if event.cuda is not None:
            event.cuda.synchronize()

    def _expose(self, lane: Lane, began: torch.cuda.Event) -> None:
        """Count a stall of compute since `began`, in which it waited for `lane`."""
        ended = self._timing_event(Lane.COMPUTE)
        self._times.waited(lane, began, ended)

    def _timing_event(self, lane: Lane) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        # Nothing waits for it: it gets its time when the stream passes it, and is read much later.
        event.record(self._stream(lane))
        return event

    def _compute_event(self) -> torch.cuda.Event:
        return self._timing_event(Lane.COMPUTE)


def _indexed(device: torch.device) -> torch.device:
    """Add the index of the current device, which threads need."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _bind(device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
    """Direct a thread's calls, including driver calls, to the device, and to a stream of it."""
    torch.cuda.set_device(device)
    if stream is not None:
        torch.cuda.set_stream(stream)
    # The first CUDA runtime call makes the context current; a query is the cheapest call.
    torch.cuda.current_stream(device).query()
