"""The host lane's worker: a native queue if the kernels are native, else a Python thread.

Both run operations in order, set and wait for flags, and count the time of computation.
See [Note: Without the interpreter] in `runtime/kernels/command_capture.py`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import addressof, c_uint64
from typing import Any, Protocol

from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.lanes.base import HostProgress, Operation, now_ms
from offloadtrain.runtime.lanes.timeline import Interval
from offloadtrain.runtime.lanes.worker import Failure, Worker
from offloadtrain.step.program.operations import Lane


class Flag(Protocol):
    """A flag that is set once; `threading.Event` is one, and so is the native queue's."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self) -> object: ...


class Endable(Protocol):
    """The interface of a worker."""

    def end(self) -> None:
        """Run the queued tasks, then stop."""
        ...


class HostLane(Endable, Protocol):
    """The interface of both workers."""

    def make_flag(self) -> Flag: ...

    def compute(
        self,
        name: str,
        fn: Operation,
        operands: Sequence[Tensor],
        *,
        pause_s: float = 0.0,
        least_s: float = 0.0,
    ) -> None:
        """Queue a call of `fn` with the operands; counted. It is preceded by a pause and takes at
        least `least_s`: for tests and measurements."""
        ...

    def run(self, task: Callable[[], None]) -> None:
        """Queue a task that is not counted."""
        ...

    def set(self, flag: Flag) -> None:
        """Queue the setting of a flag, which happens also after a failure."""
        ...

    def wait(self, flag: Flag) -> None: ...

    def wait_event(self, issued: Flag, handle: c_uint64, block: Callable[[], None]) -> None:
        """Queue a wait for a CUDA event. `block` waits from Python; `handle` holds the event's
        address once `issued` is set, for a wait without the interpreter's lock."""
        ...

    def progress(self) -> HostProgress: ...

    def busy_ms(self) -> float: ...

    def keep_intervals(self, keep: bool) -> None: ...

    def take_intervals(self, origin_ms: float) -> list[Interval]: ...


def make_host_lane(
    failure: Failure, begin: Callable[[], None] | None = None, synchronize_event: int = 0
) -> HostLane:
    """Make the worker that fits the active kernels.

    Args:
        begin: run first on its thread.
        synchronize_event: address of the CUDA driver's cuEventSynchronize.
    """
    native = kernels.native_lane()
    if native is None:
        return PythonHostLane(failure, begin)
    return NativeHostLane(native, failure, begin, synchronize_event)


class _Timed:
    """Runs and counts computations in Python, on either worker."""

    def __init__(self, lane: Lane = Lane.HOST) -> None:
        self._lane = lane
        self.busy_ms = 0.0
        self.begun = self.ended = 0
        self.keeping = False
        self.spans: list[tuple[str, float, float]] = []

    def run(self, name: str, fn: Callable[[], object]) -> None:
        start_ms = now_ms()
        self.begun += 1
        fn()
        self.ended += 1
        spent_ms = now_ms() - start_ms
        self.busy_ms += spent_ms
        if self.keeping:
            self.spans.append((name, start_ms, spent_ms))

    def take(self, origin_ms: float) -> list[Interval]:
        spans, self.spans, lane = self.spans, [], self._lane
        return [Interval(lane, name, start - origin_ms, spent) for name, start, spent in spans]


class PythonHostLane:
    """A Python thread, which takes the GIL between two kernels."""

    def __init__(
        self, failure: Failure, begin: Callable[[], None] | None, lane: Lane = Lane.HOST
    ) -> None:
        self._worker = Worker(lane, failure, begin)
        self._timed = _Timed(lane)
        self._launched = 0

    def make_flag(self) -> Flag:
        return threading.Event()

    def compute(
        self,
        name: str,
        fn: Operation,
        operands: Sequence[Tensor],
        *,
        pause_s: float = 0.0,
        least_s: float = 0.0,
    ) -> None:
        self._launched += 1
        task = _paced(lambda: fn(*operands), least_s)
        # From here on the queue owns the operands; this thread goes on to launch.
        self._worker.put(_delayed(lambda: self._timed.run(name, task), pause_s))

    def run(self, task: Callable[[], None]) -> None:
        self._worker.put(task)

    def set(self, flag: Flag) -> None:
        # After a failure, too: another thread may be waiting for the flag.
        self._worker.put(flag.set, always=True)

    # A task of the queue: the lane is held back, the launching thread goes on.
    def wait(self, flag: Flag) -> None:
        self._worker.put(flag.wait)

    def wait_event(self, issued: Flag, handle: c_uint64, block: Callable[[], None]) -> None:
        self._worker.put(block)

    def progress(self) -> HostProgress:
        return HostProgress(self._launched, self._timed.begun, self._timed.ended)

    def busy_ms(self) -> float:
        return self._timed.busy_ms

    def keep_intervals(self, keep: bool) -> None:
        self._timed.keeping = keep

    def take_intervals(self, origin_ms: float) -> list[Interval]:
        return self._timed.take(origin_ms)

    def end(self) -> None:
        self._worker.end()


class NativeHostLane:
    """A native queue. Operations that only call kernels are captured when they are launched and run
    without the interpreter's lock; others take it.

    The queue borrows the objects of a task: `_in_use` owns them until the task is done.
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
        self._timed = _Timed()
        self._launched = 0
        self._in_use: deque[tuple[int, object]] = deque()
        self._launching = threading.Lock()
        # The native queue stops with the other workers, and they with it.
        failure.watch(self._queue.error, self._queue.fail)
        if begin is not None:
            self.run(begin)

    def make_flag(self) -> Flag:
        flag: Flag = self._native.make_flag()
        return flag

    def compute(
        self,
        name: str,
        fn: Operation,
        operands: Sequence[Tensor],
        *,
        pause_s: float = 0.0,
        least_s: float = 0.0,
    ) -> None:
        calls = kernels.capture(fn, operands)
        self._launched += 1
        if calls is None:
            task, timed = _paced(lambda: fn(*operands), least_s), self._timed
            self.run(_delayed(lambda: timed.run(name, task), pause_s))
        else:
            # The calls hold addresses only: the operands keep their memory alive.
            objects = (calls, fn, operands)
            self._push(lambda: self._queue.call(calls, name, pause_s, least_s), objects)

    def set(self, flag: Flag) -> None:
        self._push(lambda: self._queue.set(flag), flag)

    # A task of the queue: the lane is held back, the launching thread goes on.
    def wait(self, flag: Flag) -> None:
        self._push(lambda: self._queue.wait(flag), flag)

    def wait_event(self, issued: Flag, handle: c_uint64, block: Callable[[], None]) -> None:
        address, synchronize = addressof(handle), self._synchronize_event
        # `block` refers to the event: destroyed early, its handle would dangle in the native wait.
        objects = (issued, handle, block)
        self._push(lambda: self._queue.wait_event(issued, address, synchronize), objects)

    def progress(self) -> HostProgress:
        begun, ended = self._queue.counts()
        return HostProgress(self._launched, begun + self._timed.begun, ended + self._timed.ended)

    def busy_ms(self) -> float:
        return self._timed.busy_ms + 1e3 * float(self._queue.busy_s())

    def keep_intervals(self, keep: bool) -> None:
        self._timed.keeping = keep
        self._queue.keep_stretches(keep)

    def take_intervals(self, origin_ms: float) -> list[Interval]:
        native = [
            Interval(Lane.HOST, name, 1e3 * start_s - origin_ms, 1e3 * seconds)
            for name, start_s, seconds in self._queue.take_stretches()
        ]
        return native + self._timed.take(origin_ms)

    def end(self) -> None:
        self._queue.end()

    def __del__(self) -> None:
        # Joins without the interpreter's lock. The native destructor would hold it, and a task of
        # the thread that needs it would never end.
        self._queue.end()

    def run(self, task: Callable[[], None]) -> None:
        # Not `self`: its own `_in_use` would keep the lane alive.
        failure = self._failure

        def guarded() -> None:
            try:
                task()
            except BaseException as error:
                failure.fail(error)

        self._push(lambda: self._queue.run(guarded, False), guarded)

    def _push(self, push: Callable[[], int], objects: object) -> None:
        # The training thread and autograd's both launch: numbers must ascend in `_in_use`.
        with self._launching:
            self._in_use.append((push(), objects))
            # Tasks up to this number are done: nothing native uses their objects any more.
            done = self._queue.done()
            while self._in_use and self._in_use[0][0] <= done:
                self._in_use.popleft()


def _paced(task: Callable[[], object], least_s: float) -> Callable[[], object]:
    if least_s <= 0:
        return task

    def run() -> None:
        start_ms = now_ms()
        task()
        time.sleep(max(least_s - (now_ms() - start_ms) / 1e3, 0.0))

    return run


def _delayed(task: Callable[[], None], pause_s: float) -> Callable[[], None]:
    def run() -> None:
        time.sleep(pause_s)
        task()

    return run if pause_s > 0 else task
