"""A stand-in for torch.cuda and the driver's events, over plain memory of the CPU.

[Note: The stand-in]
Work on a stream is done at once by the thread that launches it, which is one legal order. What a
GPU would *tell* of it comes late: an event is reached some time after it was recorded, and not
before what its stream waits for. Tasks of a lane's thread begin late too, so that events are often
waited for before they are recorded.

An allocation of device memory counts as a write of the current stream, which may still run an
earlier user of that memory, and fills it in deterministic mode.

Its clock is the process's, or a `ManualClock`: tests that assert times use that.

It is strict where CUDA says nothing: a stream that waits for an event that was never recorded
raises, the driver refuses a thread on which no context is current, and times of events that have
not happened are refused as by torch itself. Where all is done at once a missing wait changes no
value: so what streams and threads do is logged, with the bytes that operations touch, and proved
(`cuda_log.py`).

Backward runs on a thread of its own, as it does for a GPU.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import cuda_driver, kernels
from offloadtrain.runtime.arena import Ledger
from offloadtrain.runtime.lanes import Buffer, CudaLanes, Lane, Operation, Range, Span
from offloadtrain.runtime.lanes import cuda as cuda_module
from offloadtrain.runtime.lanes.queues import PythonQueue, Worker, make_host_queue
from offloadtrain.runtime.thread_pools import POOLS, shared_pool
from offloadtrain.step.proof.recording import (
    Bytes,
    Closed,
    Launched,
    Opened,
    Recorded,
    Undefined,
    Waited,
)
from tests.recording_lanes import extent
from tests.runtime.cuda_log import ADDRESS, Log, LoggedHost

CPU = torch.device("cpu")
_INVALID_CONTEXT, _INVALID_HANDLE = 201, 400  # of the driver
_T = TypeVar("_T")
_P = ParamSpec("_P")


class FakeCudaError(RuntimeError):
    """What CUDA would have passed over in silence, or refused."""


class WallClock:
    """The clock of this process."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - time.perf_counter()))


class ManualClock(WallClock):
    """Moves when a test advances it, and on to the time that a thread waits for. It does not depend
    on how busy the machine is."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now_s += seconds

    def sleep_until(self, time_s: float) -> None:
        with self._lock:
            self._now_s = max(self._now_s, time_s)


class FakeStream:
    """Does everything at once, and says so late."""

    gpu: ClassVar[Gpu]

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.gpu.check_device(device)
        self.busy_until = 0.0

    def wait_event(self, event: FakeEvent) -> None:
        lane = self.gpu.lane_of(self)
        self.gpu.log.on_stream(lane, Waited(lane, event.needed("wait_event"), "wait_event"))
        self.busy_until = max(self.busy_until, event.reached)

    def wait_stream(self, stream: FakeStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = self.gpu.event_type() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        self.gpu.binds()
        return self.gpu.clock.now() >= self.busy_until

    def synchronize(self) -> None:
        self.record_event().synchronize()


class FakeEvent:
    """Reached a while after it was recorded."""

    gpu: ClassVar[Gpu]

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.timed = enable_timing
        self.number = 0
        self.reached = 0.0

    @property
    def cuda_event(self) -> int:
        """Its address; 0 before it is recorded, as in torch."""
        return ADDRESS + self.number if self.number else 0

    def record(self, stream: FakeStream | None = None) -> None:
        if self.number:
            raise NotImplementedError("an event that is recorded twice")
        stream = self.gpu.current_stream() if stream is None else stream
        lane, number = self.gpu.lane_of(stream), self.gpu.log.number()
        self.gpu.log.on_stream(lane, Recorded(lane, number))
        self.reached = stream.busy_until = max(stream.busy_until, self.gpu.later())
        self.gpu.events[ADDRESS + number] = self
        self.number = number

    def wait(self, stream: FakeStream | None = None) -> None:
        (self.gpu.current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        if self.was_passed_over("query()"):
            return True
        happened = self.gpu.clock.now() >= self.reached
        if happened and not self.timed:  # a time that is read is no reason to go on
            self.gpu.log.waited(self.number, "query")
        return happened

    def synchronize(self) -> None:
        if not self.was_passed_over("synchronize()"):
            self.sleep()
            self.gpu.log.waited(self.number, "synchronize")

    def elapsed_time(self, end: FakeEvent) -> float:
        """As `c10::cuda::CUDAEvent::elapsed_time`, word for word."""
        if not (self.timed and end.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.number and end.number):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.gpu.clock.now() < max(self.reached, end.reached):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1e3 * (end.reached - self.reached)

    def needed(self, what: str) -> int:
        """Its number; CUDA would take an event without one for one that has happened."""
        if not self.number:
            raise FakeCudaError(f"{what} on an event that was never recorded")
        return self.number

    def was_passed_over(self, what: str) -> bool:
        """Not recorded: as in CUDA, it has happened; remembered, since nobody means that."""
        if not self.number:
            self.gpu.log.passed_over.append(f"{what} on an event that was never recorded")
        return not self.number

    def sleep(self) -> None:
        self.gpu.clock.sleep_until(self.reached)


class _Thread(threading.local):
    stream: FakeStream | None = None


class Gpu:
    """One device and what its threads do; `install` puts it in the place of torch.cuda."""

    def __init__(
        self,
        *,
        lag_ms: float = 0.2,
        task_delay_ms: float = 0.2,
        seed: int = 0,
        clock: WallClock | None = None,
    ) -> None:
        """`lag_ms`: from an event's record until it is reached, at least. `task_delay_ms`: before a
        task of a lane's thread begins, at most."""
        self.log = Log()
        self.clock = clock or WallClock()
        self.lag_s, self.task_delay_s = 1e-3 * lag_ms, 1e-3 * task_delay_ms
        self.driver_waits = 0
        self.backward_passes = 0
        self.events: WeakValueDictionary[int, FakeEvent] = WeakValueDictionary()
        self.on_device: set[int] = set()
        """Threads that have chosen it."""
        self.with_context: set[int] = set()
        """Of these, the ones that have asked the runtime for something since."""
        self.stream_type: type[FakeStream] = type("Stream", (FakeStream,), {"gpu": self})
        self.event_type: type[FakeEvent] = type("Event", (FakeEvent,), {"gpu": self})
        self._draw = random.Random(seed)
        self._thread = _Thread()
        self._default = self.stream_type()
        self._lanes = {self._default: Lane.COMPUTE}
        self._synchronize = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._driver_waits)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Until the patch is undone."""
        for name in ("stream", "current_stream", "set_device", "set_stream"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "Stream", self.stream_type)
        patch.setattr(torch.cuda, "Event", self.event_type)
        address = ctypes.cast(self._synchronize, ctypes.c_void_p).value or 0
        patch.setattr(cuda_driver, "event_synchronize", lambda: address)
        logged = self.log
        patch.setattr(
            cuda_module, "make_host_queue", lambda *args: LoggedHost(logged, make_host_queue(*args))
        )
        patch.setattr(
            cuda_module,
            "PythonQueue",
            lambda *args: LoggedHost(logged, PythonQueue(*args), args[-1]),
        )
        patch.setattr(Worker, "put", self._late(Worker.put))
        patch.setattr(Ledger, "device_tensor", self._allocates(Ledger.device_tensor))
        patch.setattr(Tensor, "backward", self._on_its_own_thread(Tensor.backward))

    def use(self, streams: dict[Lane, FakeStream]) -> None:
        """Whose streams are whose."""
        self._lanes |= {stream: lane for lane, stream in streams.items()}

    def lane_of(self, stream: FakeStream) -> Lane:
        return self._lanes[stream]

    def later(self) -> float:
        """When an event is reached that is recorded now."""
        return self.clock.now() + self.lag_s

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        self.check_device(device)
        return self._thread.stream or self._default

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._thread.stream = self._thread.stream, stream
        try:
            yield
        finally:
            self._thread.stream = before

    def set_stream(self, stream: FakeStream) -> None:
        self._thread.stream = stream

    def set_device(self, device: torch.device) -> None:
        self.check_device(device)
        self.on_device.add(threading.get_ident())

    def allocated(self, memory: Tensor) -> None:
        """The current stream may still fill it, or run an earlier user of it."""
        lane, memory_bytes = self.lane_of(self.current_stream()), extent(Buffer("", memory).whole)
        self.log.on_stream(lane, Launched(lane, "allocate", (), (memory_bytes,)))

    def binds(self) -> None:
        """The runtime makes its context current on the thread that asks it for something."""
        if threading.get_ident() in self.on_device:
            self.with_context.add(threading.get_ident())

    def check_device(self, device: torch.device | None) -> None:
        if device is not None and device != CPU:
            raise FakeCudaError(f"{device} is not the device")

    def _driver_waits(self, address: int) -> int:
        """cuEventSynchronize: needs a context, and an event that is alive."""
        if threading.get_ident() not in self.with_context:
            return _INVALID_CONTEXT
        event = self.events.get(address)
        if event is None:
            return _INVALID_HANDLE
        event.sleep()
        self.driver_waits += 1
        return 0

    def _late(self, put: Callable[..., None]) -> Callable[..., None]:
        def later(worker: Worker, task: Callable[[], None], *, always: bool = False) -> None:
            placed, delay_s = self.log.placed(worker, task), self._draw.random() * self.task_delay_s

            def run() -> None:
                time.sleep(delay_s)
                placed()

            put(worker, run, always=always)

        return later

    def _allocates(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def logged(*args: Any) -> Tensor:
            memory = allocate(*args)
            self.allocated(memory)
            return memory

        return logged

    def _on_its_own_thread(self, backward: Callable[..., None]) -> Callable[..., None]:
        def run(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self.backward_passes += 1
            with ThreadPoolExecutor(1, "autograd") as pool:
                pool.submit(backward, loss, *args, **kwargs).result()

        return run


class LoggedLanes(CudaLanes):
    """The real lanes over the stand-in; says which bytes an operation touches when it runs."""

    def __init__(self, gpu: Gpu, **options: bool) -> None:
        super().__init__(CPU, **options)
        streams: dict[Lane, Any] = dict(self._streams)
        gpu.use(streams)
        self._gpu, self._log = gpu, gpu.log
        self._spans: dict[int, int] = {}

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        touched = name, _bytes(reads), _bytes(writes)
        if lane in self._queues:
            self._log.add(Launched(lane, *touched))
            super().launch(lane, name, fn, reads, writes)
            return

        def logged(*operands: Tensor) -> None:
            where = self._gpu.lane_of(self._gpu.current_stream())
            self._log.on_stream(where, Launched(where, *touched))
            fn(*operands)

        super().launch(lane, name, logged, reads, writes)

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        span = super().open_span(name, reads, writes)
        self._spans[id(span)] = number = self._log.number()
        self._log.add(Opened(number, name, _bytes(reads), _bytes(writes)))
        return span

    def close_span(self, span: Span) -> None:
        if (number := self._spans.pop(id(span), None)) is not None:
            self._log.add(Closed(number))
        super().close_span(span)

    def undefine(self, range_: Range, lane: Lane) -> None:
        self._log.add(Undefined(extent(range_)))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = super().allocate(numel, dtype, device)
        self._gpu.allocated(memory)
        return memory


def _bytes(ranges: Sequence[Range]) -> tuple[Bytes, ...]:
    return tuple(map(extent, ranges))


HOSTS = ("queue", "thread")
LONGEST_S = 300


@contextmanager
def installed(host: str = "queue", **options: Any) -> Iterator[Gpu]:
    """The stand-in, and a host lane that is a native queue or a thread of Python; all threads that
    are begun inside must have ended by the end."""
    for name in POOLS:
        shared_pool(name)  # it lives as long as the process
    before = running()
    with pytest.MonkeyPatch.context() as patch:
        if host == "thread":
            patch.setattr(kernels, "native_lane", lambda: None)
        elif kernels.native_lane() is None:
            pytest.skip("the native kernels are not built here")
        gpu = Gpu(**options)
        gpu.install(patch)
        yield gpu
    until = time.monotonic() + 60
    while (left := running() - before) and time.monotonic() < until:
        time.sleep(1e-3)
    assert not left, f"these threads are left: {left}"


_OTHERS = ("long waits", "tqdm_monitor")
"""Threads of the process: its watch over its ranks, and one that progress bars start."""


def running() -> set[object]:
    """Threads of Python, but for `_OTHERS`, and native queues by their number in the kernel."""
    threads: set[object] = {item for item in threading.enumerate() if item.name not in _OTHERS}
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            if file.read_text() == "ot-host-lane\n":
                threads.add(file.parent.name)
    return threads


def within(seconds: float, body: Callable[[], _T]) -> _T:
    """What `body` returns or raises; TimeoutError where it hangs."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(body())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="body", daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome.result(timeout=0)


def timely(test: Callable[_P, _T]) -> Callable[_P, _T]:
    """A test that fails where it would hang."""

    @wraps(test)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return within(LONGEST_S, lambda: test(*args, **kwargs))

    return run
