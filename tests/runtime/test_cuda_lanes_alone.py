"""The CUDA lanes by themselves, over a stand-in for CUDA: times that are never read too early,
waits that are counted, failures that reach the training thread, and an end of every thread.

Times of streams are those of a `ManualClock`, which only these tests move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from offloadtrain.events.schema import WAIT
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import KernelCalls
from offloadtrain.runtime.lanes import Buffer, Lane, LaneError, LaneEvent
from tests.harsh_lanes import poisoned
from tests.runtime.fake_cuda import (
    HOSTS,
    LONGEST_S,
    Gpu,
    LoggedLanes,
    ManualClock,
    installed,
    running,
    timely,
    within,
)

ON_STREAMS = (Lane.COMPUTE, Lane.D2H, Lane.H2D, Lane.LOAD, Lane.COMM, Lane.ORTHO, Lane.UPDATE)
ALWAYS = {"h2d", "load", "comm", "ortho", "update", "write", "disk_read", "disk_write", "disk_load"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=HOSTS)
def gpu(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Gpu]:
    """With each kind of host lane."""
    with installed(request.param, clock=clock) as made:
        yield made


@pytest.fixture
def lanes(gpu: Gpu) -> Iterator[LoggedLanes]:
    made = LoggedLanes(gpu)
    yield made
    within(LONGEST_S, made.close)


def takes(ms: float, clock: ManualClock) -> Callable[..., None]:
    """An operation that takes so long."""
    return lambda *_: clock.advance(ms / 1e3)


def nothing(*_: Tensor) -> None:
    """An operation."""


@pytest.mark.parametrize("host", HOSTS)
@timely
def test_busy_times_are_the_sums_of_the_intervals(host: str) -> None:
    """On the clock of the process, which the lanes of the CPU use. However slow the machine is, all
    happens between the two readings."""
    with installed(host) as gpu:
        lanes, buffer = LoggedLanes(gpu), Buffer("b", torch.zeros(64))
        before = time.perf_counter()
        lanes.start_timeline()
        for lane in Lane:
            for _ in range(2):
                lanes.launch(lane, f"on {lane}", lambda *_: time.sleep(2e-3), [], [buffer.whole])
        timeline = lanes.end_timeline().intervals
        between_ms = 1e3 * (time.perf_counter() - before)
        spent = lanes.read_totals().busy_ms
        for lane in Lane:
            intervals = [interval for interval in timeline if interval.lane == lane]
            durations_ms = [interval.duration_ms for interval in intervals]
            assert len(intervals) == 2
            assert all(0 <= interval.start_ms <= between_ms for interval in intervals)
            assert spent[lane] == pytest.approx(sum(durations_ms), abs=1e-6)
            assert min(durations_ms) >= 2 - 1e-6 and spent[lane] <= between_ms
        assert lanes.read_totals().busy_ms == spent, "it has settled"
        lanes.close()


@timely
def test_compute_is_counted_once(lanes: LoggedLanes, clock: ManualClock) -> None:
    """Spans in spans, and compute's own operations in a span; a second close changes nothing."""
    buffer = Buffer("b", torch.zeros(8))
    outer = lanes.open_span("outer", [buffer.whole])
    inner = lanes.open_span("inner", [buffer.whole])
    lanes.launch(Lane.COMPUTE, "gather", takes(10, clock))
    lanes.close_span(inner)
    clock.advance(0.01)
    lanes.close_span(outer)
    lanes.close_span(inner)
    clock.advance(0.01)
    lanes.launch(Lane.COMPUTE, "after", takes(10, clock))
    lanes.synchronize()
    assert lanes.read_totals().busy_ms[Lane.COMPUTE] == pytest.approx(30)


@pytest.mark.parametrize("lane", ON_STREAMS[:2])
@timely
def test_a_run_that_is_not_timed_counts_as_long_as_usual(
    gpu: Gpu, clock: ManualClock, lane: Lane
) -> None:
    """After a few timed ones, and until a sample tells that it takes longer; a span as well."""
    lanes = LoggedLanes(gpu)
    timed: list[Lane] = []
    record = lanes._timing_event
    lanes._timing_event = lambda on: (timed.append(on), record(on))[1]  # type: ignore[method-assign]

    def spent(ms: float) -> tuple[float, int]:
        lanes.synchronize()
        before, events = lanes.read_totals().busy_ms[lane], len(timed)
        span = lanes.open_span("forward", []) if lane is Lane.COMPUTE else None
        lanes.launch(lane, "work", takes(ms, clock))
        if span is not None:
            lanes.close_span(span)
        events = len(timed) - events
        lanes.host_wait(lanes.record(lane), "its end")
        return lanes.read_totals().busy_ms[lane] - before, events

    assert spent(60) == (pytest.approx(60), 2)
    assert [spent(ms) for ms in (1, 2, 3, 4)] == [(pytest.approx(ms), 2) for ms in (1, 2, 3, 4)]
    assert spent(30) == (pytest.approx(2.5), 0)
    lanes.start_timeline()
    sampled_ms, _ = spent(30)
    assert lanes.end_timeline().intervals
    assert sampled_ms == pytest.approx(30) and spent(0) == (pytest.approx(30), 0)
    lanes.close()


class Slow:
    """An operation of the host lane that begins when compute has begun to wait, and then takes so
    long."""

    def __init__(self, lanes: LoggedLanes, ms: float, clock: ManualClock) -> None:
        self.begins = threading.Event()
        self._ms, self._clock = ms, clock
        record = lanes._timing_event

        def recorded(lane: Lane) -> Any:
            event = record(lane)
            if lane is Lane.COMPUTE:  # where the wait begins: no span is opened meanwhile
                self.begins.set()
            return event

        lanes._timing_event = recorded  # type: ignore[method-assign]

    def launch(self, lanes: LoggedLanes) -> LaneEvent:
        self.begins.clear()
        lanes.launch(Lane.HOST, "slow", self)
        return lanes.record(Lane.HOST)

    def __call__(self, *_: Tensor) -> None:
        assert self.begins.wait(LONGEST_S)
        self._clock.advance(self._ms / 1e3)


LAG = pytest.approx(0, abs=0.5)
"""Milliseconds of an event that its stream has passed already."""


def exposed(lanes: LoggedLanes, wait: Callable[[], None]) -> float:
    """Milliseconds that compute waited in it."""
    lanes.synchronize()
    before = lanes.read_totals().exposed_ms
    wait()
    lanes._stream(Lane.COMPUTE).synchronize()
    return lanes.read_totals().exposed_ms - before


@timely
def test_waiting_is_exposed(lanes: LoggedLanes, clock: ManualClock) -> None:
    """For the host lane, for an upload behind it, for an event; not where a lane's thread waits."""
    slow = Slow(lanes, 150, clock)

    def upload() -> LaneEvent:
        lanes.wait(Lane.H2D, slow.launch(lanes), "slow")
        lanes.launch(Lane.H2D, "up", nothing)
        return lanes.record(Lane.H2D)

    def by_a_thread() -> None:
        lanes.wait(Lane.LOAD, upload(), "upload")

    assert exposed(lanes, lambda: lanes.wait(Lane.COMPUTE, slow.launch(lanes), "host")) - 150 == LAG
    assert exposed(lanes, lambda: lanes.wait(Lane.D2H, upload(), "upload")) - 150 == LAG
    assert exposed(lanes, lambda: lanes.host_wait(upload(), "upload")) - 150 == LAG
    assert exposed(lanes, by_a_thread) == 0
    slow.begins.set()
    assert exposed(lanes, lambda: lanes.wait(Lane.COMPUTE, lanes.record(Lane.D2H), "")) == LAG


@timely
def test_what_compute_waits_is_not_its_work(lanes: LoggedLanes, clock: ManualClock) -> None:
    """In a timeline it is a stretch of its own; waiting for the lanes at its end is none."""
    slow = Slow(lanes, 40, clock)
    for _ in range(2):
        lanes.synchronize()
        before = lanes.read_totals().busy_ms[Lane.COMPUTE]
        lanes.start_timeline()
        span = lanes.open_span("forward", [])
        lanes.wait(Lane.COMPUTE, slow.launch(lanes), "slow")
        lanes.launch(Lane.COMPUTE, "gather", takes(5, clock))
        lanes.close_span(span)
        lanes.launch(Lane.HOST, "after", takes(5, clock))
        (wait,) = (interval for interval in lanes.end_timeline().intervals if interval.lane == WAIT)
        worked_ms = lanes.read_totals().busy_ms[Lane.COMPUTE] - before
        assert wait.name == Lane.HOST and wait.duration_ms == pytest.approx(40)
        assert worked_ms == pytest.approx(5)


@timely
def test_a_stream_that_waits_is_exposed_and_its_thread_goes_on(
    lanes: LoggedLanes, clock: ManualClock
) -> None:
    stream: Any = lanes._streams[Lane.D2H]

    def wait() -> None:
        stream.busy_until = clock.now() + 0.2
        lanes.wait(Lane.COMPUTE, lanes.record(Lane.D2H), "a long copy")
        assert clock.now() < stream.busy_until

    assert exposed(lanes, wait) - 200 == LAG


@timely
def test_who_waits_for_an_event_finds_it_reached(gpu: Gpu) -> None:
    """The training thread by itself, the host lane by the driver or by itself."""
    reached: list[bool] = []
    lanes = LoggedLanes(gpu)
    for lane in ON_STREAMS:
        event: Any = lanes.record(lane)
        looked = threading.Event()

        def look(event: Any = event, looked: threading.Event = looked) -> None:
            reached.append(event.cuda.query())
            looked.set()

        lanes.wait(Lane.HOST, event, "the event")
        lanes.launch(Lane.HOST, "look", look)
        assert looked.wait(LONGEST_S)  # nobody else has moved the clock before
        other: Any = lanes.record(lane)
        lanes.host_wait(other, "the event")
        reached.append(other.cuda.query())
    lanes.synchronize()
    assert gpu.current_stream().query()
    lanes.close()
    assert reached == [True] * 2 * len(ON_STREAMS)


@timely
def test_poison_is_in_the_order_of_its_lane(lanes: LoggedLanes) -> None:
    memory = Buffer("memory", torch.zeros(8))
    poisoned(lanes)
    is_nan: list[bool] = []

    def look(x: Tensor) -> None:
        is_nan.append(bool(x.isnan().all()))
        x.zero_()

    for lane in Lane:
        is_nan.clear()
        for _ in range(2):
            lanes.undefine(memory.whole, lane)
            lanes.launch(lane, "look", look, [], [memory.whole])
        lanes.synchronize()
        assert is_nan == [True, True] and memory.flat.eq(0).all(), lane


@timely
def test_what_reads_the_device_has_a_stream_of_its_own(gpu: Gpu, lanes: LoggedLanes) -> None:
    """Also where a thread reads memory and launches nothing: state that goes into a checkpoint."""
    streams: dict[Lane, Lane] = {}

    def look(lane: Lane) -> None:
        streams[lane] = gpu.lane_of(gpu.current_stream())

    for lane in (*ON_STREAMS, Lane.WRITE):
        lanes.launch(lane, "look", partial(look, lane))
    lanes.synchronize()
    assert streams == {lane: lane for lane in (*ON_STREAMS, Lane.WRITE)}


# ---- failures and the end


class Gate:
    """An operation that fails when it is told to."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, *_: Tensor) -> None:
        assert self.opened.wait(LONGEST_S)
        raise OSError("planted")


def host_lane_waits(lanes: LoggedLanes, event: LaneEvent) -> None:
    lanes.wait(Lane.HOST, event, "what fails")
    lanes.host_wait(lanes.record(Lane.HOST), "the host lane")


def thread_waits(lanes: LoggedLanes, event: LaneEvent) -> None:
    lanes.wait(Lane.LOAD, event, "what fails")
    lanes.host_wait(lanes.record(Lane.LOAD), "the lane's thread")


def copies_wait(lanes: LoggedLanes, event: LaneEvent) -> None:
    lanes.wait(Lane.D2H, event, "what fails")
    lanes.synchronize()


def timeline_is_taken(lanes: LoggedLanes, event: LaneEvent) -> None:
    lanes.start_timeline()
    assert lanes.end_timeline().intervals == ()


WAYS: tuple[Callable[[LoggedLanes, LaneEvent], None], ...] = (
    host_lane_waits,
    thread_waits,
    copies_wait,
    lambda lanes, event: lanes.wait(Lane.COMPUTE, event, "what fails"),
    lambda lanes, event: lanes.host_wait(event, "what fails"),
    lambda lanes, _: lanes.synchronize(),
    timeline_is_taken,
)


@pytest.mark.parametrize(
    ("lane", "gpu"),
    [(lane, HOSTS[n % 2]) for n, lane in enumerate([Lane.HOST, *ON_STREAMS[1:]])],
    indirect=["gpu"],
)
@timely
def test_a_failure_reaches_who_waits(gpu: Gpu, lane: Lane) -> None:
    for way in WAYS:
        lanes, gate = LoggedLanes(gpu, among_ranks=lane is Lane.D2H), Gate()
        # Otherwise the launching thread launches it itself, and meets the gate.
        lanes.copies_block = True
        lanes.launch(lane, "fails", gate)
        event = lanes.record(lane)
        threading.Timer(0.01, gate.opened.set).start()
        with pytest.raises(LaneError, match="planted"):
            way(lanes, event)
        with pytest.raises(LaneError, match="planted"):
            lanes.launch(Lane.COMPUTE, "next", nothing)
        with pytest.raises(LaneError, match="planted"):
            lanes.record(Lane.D2H)
        lanes.close()


@timely
def test_a_load_is_launched_by_the_launching_thread_where_nothing_blocks(gpu: Gpu) -> None:
    """In the lane's order: after a load that waits for an event which is not issued, it is not."""
    lanes, gate = LoggedLanes(gpu), Gate()
    launched: list[tuple[str, int]] = []

    def note(name: str) -> None:
        launched.append((name, threading.get_ident()))

    lanes.wait(Lane.LOAD, lanes.record(Lane.COMPUTE), "compute, whose event is issued")
    lanes.launch(Lane.LOAD, "first", partial(note, "first"))
    assert (
        launched == [("first", threading.get_ident())] and lanes.record(Lane.LOAD).issued.is_set()
    )
    lanes.launch(Lane.UPDATE, "held back", gate.opened.wait)
    lanes.wait(Lane.LOAD, lanes.record(Lane.UPDATE), "an event that is not issued")
    for name in ("second", "third"):
        lanes.launch(Lane.LOAD, name, partial(note, name))
    event = lanes.record(Lane.LOAD)
    assert len(launched) == 1 and not event.issued.is_set()
    gate.opened.set()
    lanes.synchronize()
    assert [name for name, _ in launched] == ["first", "second", "third"]
    lanes.launch(Lane.LOAD, "fails", gate)
    with pytest.raises(LaneError, match="planted"):
        lanes.launch(Lane.LOAD, "next", nothing)
    lanes.close()


@timely
def test_nothing_runs_after_a_failure(gpu: Gpu) -> None:
    lanes, gate = LoggedLanes(gpu), Gate()
    memory = Buffer("memory", torch.ones(64))
    lanes.launch(Lane.ORTHO, "fails", gate)
    event = lanes.record(Lane.ORTHO)
    for lane in (Lane.HOST, Lane.H2D, Lane.COMM):
        lanes.wait(lane, event, "in turn")
        lanes.launch(lane, "zero", KernelCalls(kernels.zero), [], [memory.whole])
        event = lanes.record(lane)
    gate.opened.set()
    with pytest.raises(LaneError, match="planted"):
        lanes.host_wait(event, "the last")
    lanes.close()
    assert memory.flat.eq(1).all()


@pytest.mark.parametrize("lane", [Lane.COMPUTE, Lane.D2H])
@timely
def test_what_the_training_thread_launches_fails_in_it(lanes: LoggedLanes, lane: Lane) -> None:
    gate = Gate()
    gate.opened.set()
    with pytest.raises(OSError, match="planted"):
        lanes.launch(lane, "fails", gate)
    lanes.launch(lane, "works", nothing)
    lanes.synchronize()


@timely
def test_the_driver_refuses() -> None:
    with installed() as gpu:
        lanes = LoggedLanes(gpu)
        lanes.synchronize()
        gpu.with_context.clear()
        lanes.wait(Lane.HOST, lanes.record(Lane.COMPUTE), "refused")
        with pytest.raises(LaneError, match="cuEventSynchronize gave 201"):
            lanes.synchronize()
        lanes.close()


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ({}, ALWAYS),
        ({"among_ranks": True}, ALWAYS | {"d2h"}),
    ],
)
@timely
def test_close_runs_what_is_queued_and_may_be_called_again(
    gpu: Gpu, options: dict[str, bool], threads: set[str]
) -> None:
    before, ran = running(), []
    lanes = LoggedLanes(gpu, **options)
    named = {item.name for item in running() - before if isinstance(item, threading.Thread)}
    assert named - {"offloadtrain-host"} == {f"offloadtrain-{x}" for x in threads - {"host"}}

    def late(lane: Lane) -> None:
        time.sleep(0.005)
        ran.append(lane)

    for lane in Lane:
        lanes.launch(lane, "queued", lambda lane=lane: late(lane))
        lanes.wait(Lane.LOAD, lanes.record(lane), "queued")
    for _ in range(2):
        lanes.close()
        assert running() == before
    assert set(ran) == set(Lane) and gpu.log.faults() == []


@timely
def test_close_does_not_raise_what_failed_before(gpu: Gpu) -> None:
    def fail(stream: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    lanes = LoggedLanes(gpu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu.stream_type, "synchronize", fail, raising=False)
        lanes.close()


@timely
def test_a_thread_that_has_no_device_fails_its_lane(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        raise OSError("planted")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    lanes = LoggedLanes(gpu)
    with pytest.raises(LaneError, match="planted"):
        lanes.host_wait(lanes.record(Lane.H2D), "a lane")
    lanes.close()


# ---- whatever is around them


@timely
def test_events_in_inference_mode_and_with_another_default_device(lanes: LoggedLanes) -> None:
    """Streamed weights are loaded in an evaluation too, and the native queue reads an address."""
    with torch.inference_mode(), torch.device("meta"):
        for lane in ON_STREAMS:
            lanes.wait(Lane.HOST, lanes.record(lane), "on the host")
    lanes.synchronize()


@timely
def test_a_stream_of_the_user_s(gpu: Gpu, lanes: LoggedLanes) -> None:
    """What compute does on another stream is in order too; to the log that is an idle lane."""
    memory, other = Buffer("memory", torch.zeros(8)), gpu.stream_type()
    gpu.use({Lane.COMM: other})
    for streams in ((other,), (), (other,)):
        with gpu.stream(*streams) if streams else torch.no_grad():
            lanes.launch(Lane.COMPUTE, "write", nothing, [], [memory.whole])
    assert gpu.log.faults() == []


@timely
def test_a_long_evaluation_keeps_no_intervals(lanes: LoggedLanes) -> None:
    for _ in range(100):
        lanes.close_span(lanes.open_span("forward", []))
        lanes.launch(Lane.LOAD, "load", nothing)
        lanes.host_wait(lanes.record(Lane.LOAD), "the load")
    times = lanes._times
    assert max(len(intervals) for intervals in (*times._running.values(), times._waits)) < 50


@timely
def test_closed_lanes_record_nothing_to_wait_for(lanes: LoggedLanes) -> None:
    lanes.close()
    lanes.record(Lane.COMPUTE)
    for lane in set(Lane) - {Lane.COMPUTE}:
        with pytest.raises(LaneError, match="closed"):
            lanes.record(lane)
