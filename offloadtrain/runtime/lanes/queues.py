"""Lanes that work on the CPU: queues, each run by a separate thread.

The host lane's queue is native if the kernels are native, otherwise a Python thread like those of
the other lanes. Both run operations in order, set and wait for flags, and measure the time of
computation. See [Note: Without the interpreter] in `runtime/kernels/selection.py`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import addressof, c_uint64
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.lanes.base import (
    HostProgress,
    LaneError,
    Lanes,
    LaneTotals,
    Operation,
    now_ms,
)
from offloadtrain.runtime.lanes.timeline import Interval
from offloadtrain.step.program.operations import Lane

_Task = Callable[[], object]


class Failure:
    """The first error of the workers that share it; the launching thread raises it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._watched: list[tuple[Callable[[], str], Callable[[], None]]] = []

    def watch(self, error: Callable[[], str], stop: Callable[[], None]) -> None:
        """Watch a native queue. `error`: returns its error, or ""; `stop`: stops it."""
        self._watched.append((error, stop))

    def fail(self, error: BaseException) -> None:
        """Stop all workers; the launching thread will raise the error."""
        # Set without a lock: workers only check whether there is an error, and any first error will
        # do.
        self.error = self.error or error
        for _, stop in self._watched:
            stop()

    def check(self) -> None:
        """Raises LaneError if a worker has failed."""
        # A native queue cannot stop the other queues: the launching thread does so here.
        for error, _ in self._watched:
            if (message := error()) and self.error is None:
                self.fail(RuntimeError(message))
        if self.error is not None:
            raise LaneError(f"a lane failed: {self.error}") from self.error


class Worker:
    """Runs tasks in order. After a failure of any worker it runs only the tasks that set events, so
    that no thread waits forever."""

    def __init__(
        self, name: str, failure: Failure, begin: Callable[[], None] | None = None
    ) -> None:
        """`begin`: runs first on the thread."""
        self._failure = failure
        self._begin = begin
        self._num_queued = self._num_done = 0
        """Numbers of tasks; each is written by only one thread."""
        self._tasks: queue.SimpleQueue[tuple[_Task, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"offloadtrain-{name}", daemon=True)
        self._thread.start()

    def put(self, task: _Task, *, always: bool = False) -> None:
        """Queue a task; `always`: run it even after a failure (it sets an event)."""
        # The queue owns the task, and with it the tensors that it uses, until it has run.
        self._num_queued += 1
        self._tasks.put((task, always))

    def pending(self) -> int:
        """Return the number of queued tasks, including the running one."""
        return self._num_queued - self._num_done

    def end(self) -> None:
        """Run the queued tasks, then stop the thread."""
        # Last in the queue: the thread ends after all earlier tasks.
        self._tasks.put(None)
        # The garbage collector may call this on the worker's own thread, which cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        if self._begin is not None:
            self.run(self._begin)
        while (entry := self._tasks.get()) is not None:
            task, always = entry
            if self._failure.error is None or always:
                self.run(task)
            self._num_done += 1

    def run(self, task: _Task) -> None:
        """Run a task now, on the calling thread."""
        # The next call of the launching thread raises the error.
        try:
            task()
        except BaseException as error:
            self._failure.fail(error)


class Flag(Protocol):
    """A flag that is set once: `threading.Event`, or the native queue's."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self) -> object: ...


class _Counted:
    """Runs and counts computations in Python."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._busy_ms = 0.0
        self._launched = self._begun = self._ended = 0
        self._keeps = False
        self._intervals: list[tuple[str, float, float]] = []

    def run_counted(self, name: str, task: Callable[[], object], least_s: float) -> None:
        start_ms = now_ms()
        self._begun += 1
        task()
        if least_s > 0:
            time.sleep(max(least_s - (now_ms() - start_ms) / 1e3, 0.0))
        self._ended += 1
        spent_ms = now_ms() - start_ms
        self._busy_ms += spent_ms
        if self._keeps:
            self._intervals.append((name, start_ms, spent_ms))

    def progress(self) -> HostProgress:
        return HostProgress(self._launched, self._begun, self._ended)

    def busy_ms(self) -> float:
        return self._busy_ms

    def keep_intervals(self, keep: bool) -> None:
        self._keeps = keep

    def take_intervals(self, origin_ms: float) -> list[Interval]:
        intervals, self._intervals, lane = self._intervals, [], self._lane
        return [Interval(lane, name, start - origin_ms, spent) for name, start, spent in intervals]


class PythonQueue(_Counted):
    """The queue of a Python thread, which takes the GIL between two kernels."""

    def __init__(
        self, failure: Failure, begin: Callable[[], None] | None, lane: Lane = Lane.HOST
    ) -> None:
        super().__init__(lane)
        self._worker = Worker(lane, failure, begin)

    def make_flag(self) -> Flag:
        return threading.Event()

    def compute(
        self, name: str, fn: Operation, operands: Sequence[Tensor], *, least_s: float = 0.0
    ) -> None:
        """Queue a call of `fn` with the operands; counted. It takes at least `least_s` seconds, for
        measurements."""
        self._launched += 1
        # From here on the queue owns the operands; this thread continues to launch.
        self._worker.put(partial(self.run_counted, name, partial(fn, *operands), least_s))

    def run(self, task: Callable[[], object]) -> None:
        """Queue a task that is not counted."""
        self._worker.put(task)

    def set(self, flag: Flag) -> None:
        """Queue the setting of a flag, which also happens after a failure."""
        # Another thread may be waiting for the flag.
        self._worker.put(flag.set, always=True)

    # A task of the queue: it delays the lane; the launching thread continues.
    def wait(self, flag: Flag) -> None:
        self._worker.put(flag.wait)

    def wait_event(self, issued: Flag, handle: c_uint64, block: Callable[[], None]) -> None:
        """Queue a wait for a CUDA event. `block` waits from Python; `handle` has the event's
        address once `issued` is set, for a wait without the GIL."""
        self._worker.put(block)

    def end(self) -> None:
        """Run the queued tasks, then stop."""
        self._worker.end()


class NativeQueue:
    """A native queue with the same methods. Operations that only call kernels are captured when
    they are launched and run without the GIL; others take it.

    The queue borrows the objects of a task: `_in_use` owns them until the task has run.
    """

    def __init__(
        self,
        native: Any,
        failure: Failure,
        begin: Callable[[], None] | None,
        synchronize_event: int,
    ) -> None:
        self._native = native
        self._queue = native.make_queue()
        self._failure = failure
        self._synchronize_event = synchronize_event
        # Not a base class: queued tasks must not keep this object alive.
        self._counted = _Counted(Lane.HOST)
        self._launched = 0
        self._in_use: deque[tuple[int, object]] = deque()
        self._launching = threading.Lock()
        # The native queue stops with the other workers, and vice versa.
        failure.watch(self._queue.error, self._queue.fail)
        if begin is not None:
            self.run(begin)

    def make_flag(self) -> Flag:
        flag: Flag = self._native.make_flag()
        return flag

    def compute(
        self, name: str, fn: Operation, operands: Sequence[Tensor], *, least_s: float = 0.0
    ) -> None:
        calls = kernels.capture(fn, operands)
        self._launched += 1
        if calls is None:
            task = partial(fn, *operands)
            self.run(partial(self._counted.run_counted, name, task, least_s))
        else:
            # The calls contain only addresses: the operands keep their memory alive.
            objects = (calls, fn, operands)
            self._push(lambda: self._queue.call(calls, name, least_s), objects)

    def set(self, flag: Flag) -> None:
        self._push(lambda: self._queue.set(flag), flag)

    # A task of the queue: it delays the lane; the launching thread continues.
    def wait(self, flag: Flag) -> None:
        self._push(lambda: self._queue.wait(flag), flag)

    def wait_event(self, issued: Flag, handle: c_uint64, block: Callable[[], None]) -> None:
        address, synchronize = addressof(handle), self._synchronize_event
        # `block` refers to the event: if it were destroyed early, its handle would dangle in the
        # native wait.
        objects = (issued, handle, block)
        self._push(lambda: self._queue.wait_event(issued, address, synchronize), objects)

    def progress(self) -> HostProgress:
        begun, ended = self._queue.counts()
        counted = self._counted.progress()
        return HostProgress(self._launched, begun + counted.begun, ended + counted.ended)

    def busy_ms(self) -> float:
        return self._counted.busy_ms() + 1e3 * float(self._queue.busy_s())

    def keep_intervals(self, keep: bool) -> None:
        self._counted.keep_intervals(keep)
        self._queue.keep_stretches(keep)

    def take_intervals(self, origin_ms: float) -> list[Interval]:
        native = [
            Interval(Lane.HOST, name, 1e3 * start_s - origin_ms, 1e3 * seconds)
            for name, start_s, seconds in self._queue.take_stretches()
        ]
        return native + self._counted.take_intervals(origin_ms)

    def end(self) -> None:
        self._queue.end()

    def __del__(self) -> None:
        # Joins without the GIL. The native destructor would hold it, and a task of the thread that
        # needs it would never end.
        self._queue.end()

    def run(self, task: Callable[[], object]) -> None:
        # Not `self`: `_in_use` would keep the lane alive.
        failure = self._failure

        def guarded() -> None:
            try:
                task()
            except BaseException as error:
                failure.fail(error)

        self._push(lambda: self._queue.run(guarded, False), guarded)

    def _push(self, push: Callable[[], int], objects: object) -> None:
        # The training thread and autograd's thread both launch: numbers must ascend in `_in_use`.
        with self._launching:
            self._in_use.append((push(), objects))
            # Tasks up to this number have run: native code does not use their objects any more.
            done = self._queue.done()
            while self._in_use and self._in_use[0][0] <= done:
                self._in_use.popleft()


LaneQueue = PythonQueue | NativeQueue


def make_host_queue(
    failure: Failure, begin: Callable[[], None] | None = None, synchronize_event: int = 0
) -> LaneQueue:
    """Make the queue of the host lane for the active kernels.

    Args:
        begin: runs first on its thread.
        synchronize_event: address of the CUDA driver's cuEventSynchronize.
    """
    native = kernels.native_lane()
    if native is None:
        return PythonQueue(failure, begin)
    return NativeQueue(native, failure, begin, synchronize_event)


class QueuedLanes(Lanes):
    """Lanes some of which have a queue each."""

    _host: LaneQueue

    def __init__(self) -> None:
        super().__init__()
        self._failure = Failure()
        self._queues: dict[Lane, LaneQueue] = {}
        """Queues of the lanes that work on the CPU."""
        self._workers: dict[Lane, Worker] = {}
        """Threads of the lanes that launch onto a stream."""
        self._closed = False

    def host_progress(self) -> HostProgress:
        return self._host.progress()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            # Joins the threads: each runs its queue to the end. Waits only refer to earlier
            # launches, so no order of these joins can deadlock.
            threads: list[LaneQueue | Worker] = [*self._queues.values(), *self._workers.values()]
            for thread in threads:
                thread.end()

    def read_totals(self) -> LaneTotals:
        for lane, lane_queue in self._queues.items():
            self.totals.busy_ms[lane] = lane_queue.busy_ms()
        return super().read_totals()

    def _begin_sampling(self) -> None:
        super()._begin_sampling()
        for lane_queue in self._queues.values():
            lane_queue.keep_intervals(True)

    def _end_sampling(self, lane: Lane) -> None:
        super()._end_sampling(lane)
        if lane in self._queues:
            self._queues[lane].keep_intervals(False)

    def _of_queues(self, origin_ms: float) -> list[Interval]:
        """Return the intervals of the queues, relative to `origin_ms`."""
        return [i for q in self._queues.values() for i in q.take_intervals(origin_ms)]

    def _pending(self) -> dict[Lane, int]:
        pending = {lane: worker.pending() for lane, worker in self._workers.items()}
        for lane, lane_queue in self._queues.items():
            progress = lane_queue.progress()
            pending[lane] = progress.launched - progress.ended
        return pending
