"""The workers of the host lane: order, failures, and no lock of the interpreter between kernels."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import KernelCalls
from offloadtrain.runtime.lanes import Buffer, Lane, LaneError
from offloadtrain.runtime.lanes.queues import (
    Failure,
    LaneQueue,
    NativeQueue,
    PythonQueue,
    make_host_queue,
)
from offloadtrain.runtime.lanes.threads import ThreadLanes

ZERO = KernelCalls(kernels.zero)
BACKENDS = {b.name: b for b in kernels.available()}
needs_native = pytest.mark.skipif("native" not in BACKENDS, reason="not built here")


@pytest.fixture(params=["native", "numba"])
def lane(request: pytest.FixtureRequest) -> Iterator[LaneQueue]:
    """Each kind of worker."""
    if request.param not in BACKENDS:
        pytest.skip("not built here")
    with kernels.use(BACKENDS[request.param]):
        worker = make_host_queue(Failure())
        assert isinstance(worker, NativeQueue) == (request.param == "native")
        yield worker
        worker.end()


def progress(lane: LaneQueue, longest_s: float) -> int:
    """How many of ten kernels run while this thread keeps the interpreter's lock."""
    buffers = [torch.ones(1000) for _ in range(10)]
    gate = lane.make_flag()
    lane.wait(gate)
    for buffer in buffers:
        lane.compute("zero", ZERO, [buffer])
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        gate.set()
        until = time.perf_counter() + longest_s
        while time.perf_counter() < until and buffers[-1].data_ptr() and peek(buffers[-1]):
            pass
        return sum(not peek(buffer) for buffer in buffers)
    finally:
        sys.setswitchinterval(before)


def peek(buffer: Tensor) -> float:
    """Its first element, without giving the lock away, as torch's own calls do."""
    return ctypes.c_float.from_address(buffer.data_ptr()).value


@needs_native
def test_native_kernels_need_no_lock_of_the_interpreter() -> None:
    with kernels.use(BACKENDS["native"]):
        lane = make_host_queue(Failure())
        assert progress(lane, 60) == 10
        lane.end()


def held_up() -> bool:
    lane = PythonQueue(Failure(), None)
    try:
        return progress(lane, 0.3) < 10
    finally:
        lane.end()


def test_the_test_above_can_fail() -> None:
    """Beside other load this thread may lose the lock by itself, now and then."""
    assert any(held_up() for _ in range(20))


def test_tasks_run_in_order_and_are_counted(lane: LaneQueue) -> None:
    ran: list[str] = []
    x = torch.ones(8)
    lane.keep_intervals(True)
    began_ms = 1e3 * time.perf_counter()
    lane.compute("first", lambda x: ran.append(f"first {x[0].item()}"), [x])
    lane.compute("zero", ZERO, [x], least_s=0.02)
    lane.compute("last", lambda x: ran.append(f"last {x[0].item()}"), [x])
    done = lane.make_flag()
    lane.set(done)
    done.wait()
    assert ran == ["first 1.0", "last 0.0"] and done.is_set()
    intervals = sorted(lane.take_intervals(began_ms), key=lambda interval: interval.start_ms)
    assert [interval.name for interval in intervals] == ["first", "zero", "last"]
    assert intervals[1].duration_ms >= 20
    total = sum(interval.duration_ms for interval in intervals)
    assert lane.busy_ms() == pytest.approx(total, abs=1e-3)


def test_operands_are_checked_when_they_are_launched() -> None:
    lanes = ThreadLanes()
    half = Buffer("half", torch.ones(8, dtype=torch.int16))
    if isinstance(lanes._host, NativeQueue):
        with pytest.raises(TypeError, match="memory must be float32"):
            lanes.launch(Lane.HOST, "zero", ZERO, [], [half.whole])
    lanes.close()


def test_after_a_failure_only_flags_are_set() -> None:
    lanes = ThreadLanes()
    buffer = Buffer("b", torch.ones(8))

    def fail(x: Tensor) -> None:
        raise OSError("planted")

    gate = threading.Event()
    lanes.launch(Lane.HOST, "gate", lambda x: gate.wait(), [buffer.whole])
    lanes.launch(Lane.HOST, "fail", fail, [buffer.whole])
    lanes.launch(Lane.HOST, "zero", ZERO, [], [buffer.whole])
    after = lanes.record(Lane.HOST)
    gate.set()
    with pytest.raises(LaneError, match="planted"):
        lanes.host_wait(after, "the flag is set all the same")
    with pytest.raises(LaneError, match="planted"):
        lanes.launch(Lane.D2H, "anything", fail, [buffer.whole])
    assert buffer.flat.eq(1).all()
    lanes.close()


def test_a_failure_elsewhere_stops_the_host_lane() -> None:
    lanes = ThreadLanes()
    buffer = Buffer("b", torch.ones(8))

    def fail(x: Tensor) -> None:
        raise OSError("planted")

    gate = threading.Event()
    lanes.launch(Lane.HOST, "gate", lambda x: gate.wait(), [buffer.whole])
    lanes.launch(Lane.HOST, "zero", ZERO, [], [buffer.whole])
    lanes.launch(Lane.D2H, "fail", fail, [buffer.whole])
    until = time.monotonic() + 60
    while lanes._failure.error is None and time.monotonic() < until:
        time.sleep(1e-3)
    gate.set()
    lanes._host.end()
    assert buffer.flat.eq(1).all()
    lanes.close()


@needs_native
@pytest.mark.parametrize("result", [0, 700])
def test_an_event_of_cuda_is_waited_for_by_its_address(result: int) -> None:
    """With a function of our own in the place of the driver's."""
    addresses: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def synchronize(event: int) -> int:
        addresses.append(event)
        return result

    failure = Failure()
    address = ctypes.cast(synchronize, ctypes.c_void_p).value or 0
    with kernels.use(BACKENDS["native"]):
        lane = make_host_queue(failure, None, address)
        issued, handle, x = lane.make_flag(), ctypes.c_uint64(), torch.ones(4)
        lane.wait_event(issued, handle, lambda: None)
        lane.compute("zero", ZERO, [x])
        assert not addresses
        handle.value = 4711
        issued.set()
        lane.end()
    assert addresses == [4711]
    assert x.eq(0).all() == (result == 0)
    if result:
        with pytest.raises(LaneError, match="cuEventSynchronize gave 700"):
            failure.check()


@needs_native
def test_a_lane_that_nobody_ends_ends_when_it_is_dropped() -> None:
    with kernels.use(BACKENDS["native"]):
        lane = make_host_queue(Failure())
    x = torch.ones(1000)
    lane.compute("python", lambda x: time.sleep(0.05), [x])
    lane.compute("zero", ZERO, [x])
    gone = weakref.ref(lane)
    del lane
    assert gone() is None
    assert x.eq(0).all(), "what was queued has run"


@needs_native
def test_calls_over_the_same_memory_are_captured_once() -> None:
    """And over other memory anew."""
    made: list[Tensor] = []

    def zero(x: Tensor) -> None:
        made.append(x)
        kernels.zero(x)

    item, other = torch.ones(1000), torch.ones(1000)
    with kernels.use(BACKENDS["native"]):
        lane, operation = make_host_queue(Failure()), KernelCalls(zero, keeps=True)
        for operands in ([item], [other], [item], [other]):
            operands[0].fill_(1)
            lane.compute("zero", operation, operands)
            done = lane.make_flag()
            lane.set(done)
            done.wait()
            assert operands[0].eq(0).all()
        lane.end()
    assert [x is item for x in made] == [True, False]


@needs_native
def test_what_is_queued_is_kept_alive_and_then_let_go() -> None:
    with kernels.use(BACKENDS["native"]):
        lane = make_host_queue(Failure())
        gate = lane.make_flag()
        lane.wait(gate)
        operands = [torch.ones(1000)]
        operand = weakref.ref(operands[0])
        lane.compute("zero", ZERO, operands)
        del operands
        assert operand() is not None
        gate.set()
        done = lane.make_flag()
        lane.set(done)
        done.wait()
        lane.set(lane.make_flag())
        lane.set(lane.make_flag())
        assert operand() is None
        lane.end()
