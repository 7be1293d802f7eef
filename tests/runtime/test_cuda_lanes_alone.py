"""The CUDA lanes by themselves, over a stand-in for CUDA: times that are never read too early,
waits that are counted, failures that reach the training thread, and an end of every thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from offloadtrain.events.schema import WAIT
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import KernelCalls
from offloadtrain.runtime.lanes import Buffer, Lane, LaneError, LaneEvent
from tests.runtime.fake_cuda import HOSTS, Gpu, LoggedLanes, installed, running, timely, within

ON_STREAMS = (Lane.COMPUTE, Lane.D2H, Lane.H2D, Lane.LOAD, Lane.COMM, Lane.ORTHO, Lane.UPDATE)
ALWAYS = {"h2d", "load", "comm", "ortho", "update", "write", "disk_read", "disk_write", "disk_load"}


@pytest.fixture(params=HOSTS)
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """With each kind of host lane."""
    with installed(request.param) as made:
        yield made


@pytest.fixture
def lanes(gpu: Gpu) -> Iterator[LoggedLanes]:
    made = LoggedLanes(gpu)
    yield made
    within(10, made.close)


def sleeps(ms: float) -> Callable[..., None]:
    return lambda *_: time.sleep(ms / 1e3)


@timely
def test_busy_times_are_the_sums_of_the_intervals(lanes: LoggedLanes) -> None:
    buffer = Buffer("b", torch.zeros(64))
    lanes.start_timeline()
    began = time.perf_counter()
    for lane in Lane:
        for _ in range(2):
            lanes.launch(lane, f"on {lane}", sleeps(2), [], [buffer.whole])
    taken = lanes.end_timeline().intervals
    wall_ms = 1e3 * (time.perf_counter() - began)
    spent = lanes.read_totals().busy_ms
    for lane in Lane:
        own = [one for one in taken if one.lane == lane]
        assert len(own) == 2 and all(-1 <= one.start_ms <= wall_ms for one in own)
        assert spent[lane] == pytest.approx(sum(one.duration_ms for one in own), abs=1e-6)
        assert 4 <= spent[lane] <= wall_ms
    assert lanes.read_totals().busy_ms == spent, "it has settled"


@timely
def test_compute_is_counted_once(lanes: LoggedLanes) -> None:
    """Spans in spans, and compute's own operations in a span; a second close changes nothing."""
    buffer = Buffer("b", torch.zeros(8))
    times = [time.perf_counter()]
    outer = lanes.open_span("outer", [buffer.whole])
    inner = lanes.open_span("inner", [buffer.whole])
    lanes.launch(Lane.COMPUTE, "gather", sleeps(10))
    lanes.close_span(inner)
    time.sleep(0.01)
    lanes.close_span(outer)
    lanes.close_span(inner)
    times.append(time.perf_counter())
    time.sleep(0.01)
    times.append(time.perf_counter())
    lanes.launch(Lane.COMPUTE, "after", sleeps(10))
    times.append(time.perf_counter())
    lanes.synchronize()
    wall_ms = 1e3 * (times[3] - times[2] + times[1] - times[0])
    assert 30 <= lanes.read_totals().busy_ms[Lane.COMPUTE] <= wall_ms


@pytest.mark.parametrize("lane", ON_STREAMS[:2])
@timely
def test_a_run_that_is_not_timed_counts_as_long_as_usual(gpu: Gpu, lane: Lane) -> None:
    """After a few timed ones, and until a sample tells that it takes longer; a span as well."""
    lanes = LoggedLanes(gpu)
    timed: list[Lane] = []
    record = lanes._timing_event
    lanes._timing_event = lambda on: (timed.append(on), record(on))[1]  # type: ignore[method-assign]

    def spent(ms: float) -> tuple[float, int]:
        lanes.synchronize()
        before, events = lanes.read_totals().busy_ms[lane], len(timed)
        span = lanes.open_span("forward", []) if lane is Lane.COMPUTE else None
        lanes.launch(lane, "work", sleeps(ms))
        if span is not None:
            lanes.close_span(span)
        events = len(timed) - events
        lanes.host_wait(lanes.record(lane), "its end")
        return lanes.read_totals().busy_ms[lane] - before, events

    cold_ms, _ = spent(60)
    learnt = [spent(2) for _ in range(4)]
    assert cold_ms >= 60 and all(ms >= 2 and events == 2 for ms, events in learnt)
    usual_ms = sum(ms for ms, _ in learnt) / len(learnt)
    assert spent(30) == (pytest.approx(usual_ms), 0)
    lanes.start_timeline()
    sampled_ms, _ = spent(30)
    assert lanes.end_timeline().intervals
    assert sampled_ms >= 30 and spent(0) == (pytest.approx(sampled_ms), 0)
    lanes.close()


@pytest.mark.parametrize("lane", ON_STREAMS[:3])
@timely
def test_what_has_not_ended_counts_later(lane: Lane) -> None:
    with installed(lag_ms=80) as gpu:
        lanes = LoggedLanes(gpu)
        lanes.launch(lane, "work", sleeps(5))
        done = lanes.record(lane)
        assert lanes.read_totals().busy_ms[lane] == 0
        lanes.host_wait(done, "the end")
        assert lanes.read_totals().busy_ms[lane] >= 5
        lanes.close()


def exposed(lanes: LoggedLanes, wait: Callable[[], None]) -> float:
    """Milliseconds that compute waited in it."""
    lanes.synchronize()
    time.sleep(0.002)
    before = lanes.read_totals().exposed_ms
    wait()
    lanes._stream(Lane.COMPUTE).synchronize()
    return lanes.read_totals().exposed_ms - before


@timely
def test_waiting_is_exposed(lanes: LoggedLanes) -> None:
    """For the host lane, for an upload behind it, for an event; not where a lane's thread waits."""

    def slow() -> LaneEvent:
        lanes.launch(Lane.HOST, "slow", sleeps(150))
        return lanes.record(Lane.HOST)

    def upload() -> LaneEvent:
        lanes.wait(Lane.H2D, slow(), "slow")
        lanes.launch(Lane.H2D, "up", sleeps(0))
        return lanes.record(Lane.H2D)

    assert exposed(lanes, lambda: lanes.wait(Lane.COMPUTE, slow(), "host")) >= 75
    assert exposed(lanes, lambda: lanes.wait(Lane.D2H, upload(), "upload")) >= 75
    assert exposed(lanes, lambda: lanes.host_wait(upload(), "upload")) >= 75
    assert exposed(lanes, lambda: lanes.wait(Lane.LOAD, upload(), "by a thread")) == 0
    assert exposed(lanes, lambda: lanes.wait(Lane.COMPUTE, lanes.record(Lane.D2H), "")) < 75


@timely
def test_what_compute_waits_is_not_its_work(lanes: LoggedLanes) -> None:
    """In a timeline it is a stretch of its own; waiting for the lanes at its end is none."""
    for _ in range(2):
        lanes.synchronize()
        before = lanes.read_totals().busy_ms[Lane.COMPUTE]
        lanes.start_timeline()
        began = time.perf_counter()
        span = lanes.open_span("forward", [])
        lanes.launch(Lane.HOST, "slow", sleeps(40))
        lanes.wait(Lane.COMPUTE, lanes.record(Lane.HOST), "slow")
        lanes.launch(Lane.COMPUTE, "gather", sleeps(5))
        lanes.close_span(span)
        wall_ms = 1e3 * (time.perf_counter() - began)
        lanes.launch(Lane.HOST, "after", sleeps(5))
        (wait,) = (one for one in lanes.end_timeline().intervals if one.lane == WAIT)
        worked_ms = lanes.read_totals().busy_ms[Lane.COMPUTE] - before
        assert wait.name == Lane.HOST and wait.duration_ms >= 10
        assert 5 <= worked_ms <= wall_ms - wait.duration_ms + 1e-6


@timely
def test_a_stream_that_waits_is_exposed_and_its_thread_goes_on(lanes: LoggedLanes) -> None:
    stream: Any = lanes._streams[Lane.D2H]

    def wait() -> None:
        stream.busy_until = time.perf_counter() + 0.2
        lanes.wait(Lane.COMPUTE, lanes.record(Lane.D2H), "a long copy")
        assert time.perf_counter() < stream.busy_until

    assert exposed(lanes, wait) >= 100


@pytest.mark.parametrize("host", HOSTS)
@timely
def test_who_waits_for_an_event_finds_it_reached(host: str) -> None:
    """The training thread by itself, the host lane by the driver or by itself."""
    late: list[bool] = []
    with installed(host, lag_ms=20) as gpu:
        lanes = LoggedLanes(gpu)
        for lane in ON_STREAMS:
            event: Any = lanes.record(lane)
            lanes.wait(Lane.HOST, event, "the event")
            lanes.launch(Lane.HOST, "look", lambda event=event: late.append(not event.cuda.query()))
            other: Any = lanes.record(lane)
            lanes.host_wait(other, "the event")
            late.append(not other.cuda.query())
        lanes.synchronize()
        assert gpu.current_stream().query()
        lanes.close()
    assert late == [False] * 2 * len(ON_STREAMS)


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("lane", Lane)
@timely
def test_poison_is_in_the_order_of_its_lane(lanes: LoggedLanes, lane: Lane) -> None:
    memory, lanes.poison = Buffer("memory", torch.zeros(8)), True
    seen: list[bool] = []

    def look(x: Tensor) -> None:
        seen.append(bool(x.isnan().all()))
        x.zero_()

    for _ in range(2):
        lanes.launch(lane, "look", look, [], [lanes.alloc(memory.whole, lane)])
    lanes.synchronize()
    assert seen == [True, True] and memory.flat.eq(0).all()


# ---- failures and the end


class Gate:
    """An operation that fails when it is told to."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, *_: Tensor) -> None:
        assert self.opened.wait(10)
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


WAYS: dict[str, Callable[[LoggedLanes, LaneEvent], None]] = {
    "the host lane": host_lane_waits,
    "a thread": thread_waits,
    "copies": copies_wait,
    "compute": lambda lanes, event: lanes.wait(Lane.COMPUTE, event, "what fails"),
    "the training thread": lambda lanes, event: lanes.host_wait(event, "what fails"),
    "synchronize": lambda lanes, _: lanes.synchronize(),
    "the timeline": timeline_is_taken,
}


@pytest.mark.cover(1, 2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lane", [Lane.HOST, *ON_STREAMS[1:]])
@timely
def test_a_failure_reaches_who_waits(gpu: Gpu, lane: Lane, way: str) -> None:
    lanes, gate = LoggedLanes(gpu, among_ranks=lane is Lane.D2H), Gate()
    lanes.launch(lane, "fails", gate)
    event = lanes.record(lane)
    threading.Timer(0.01, gate.opened.set).start()
    with pytest.raises(LaneError, match="planted"):
        WAYS[way](lanes, event)
    with pytest.raises(LaneError, match="planted"):
        lanes.launch(Lane.COMPUTE, "next", sleeps(0))
    with pytest.raises(LaneError, match="planted"):
        lanes.record(Lane.D2H)
    lanes.close()


@pytest.mark.parametrize("lane", [Lane.H2D, pytest.param(Lane.COMM, marks=pytest.mark.slow)])
@timely
def test_an_event_behind_a_wait_alone(lanes: LoggedLanes, lane: Lane) -> None:
    """Nothing is launched between them: the event stands for the wait."""
    opened = threading.Event()
    lanes.launch(Lane.LOAD, "slow", lambda: opened.wait(10))
    lanes.wait(lane, lanes.record(Lane.LOAD), "in turn")
    behind: Any = lanes.record(lane)
    assert not behind.issued.is_set()
    time.sleep(0.02)
    assert not behind.issued.is_set()
    opened.set()
    lanes.host_wait(behind, "the wait")


@timely
def test_nothing_runs_after_a_failure(gpu: Gpu) -> None:
    lanes, gate = LoggedLanes(gpu), Gate()
    memory = Buffer("memory", torch.ones(64))
    lanes.launch(Lane.LOAD, "fails", gate)
    event = lanes.record(Lane.LOAD)
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
    lanes.launch(lane, "works", sleeps(0))
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
    named = {one.name for one in threading.enumerate() if one not in before}
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


@timely
def test_events_of_other_lanes_are_refused(lanes: LoggedLanes) -> None:
    with pytest.raises(TypeError, match="not recorded by these lanes"):
        lanes.wait(Lane.HOST, LaneEvent(), "nothing")


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
            lanes.launch(Lane.COMPUTE, "write", sleeps(0), [], [memory.whole])
    assert gpu.log.faults() == []


@timely
def test_bytes_of_a_timeline_that_begins_amid_work(lanes: LoggedLanes) -> None:
    memory, gate = Buffer("memory", torch.zeros(64)), threading.Event()
    lanes.launch(Lane.LOAD, "load", lambda *_: gate.wait(10), [], [memory.first(16)])
    lanes.launch(Lane.LOAD, "load", sleeps(0), [], [memory.first(16)])
    lanes.start_timeline()
    lanes.launch(Lane.LOAD, "load", sleeps(0), [], [memory.first(32)])
    gate.set()
    assert [one for one in lanes.end_timeline().intervals if one.lane == "load"][
        -1
    ].num_bytes == 128


@timely
def test_a_long_evaluation_keeps_no_intervals(lanes: LoggedLanes) -> None:
    for _ in range(100):
        lanes.close_span(lanes.open_span("forward", []))
        lanes.launch(Lane.LOAD, "load", sleeps(0))
        lanes.host_wait(lanes.record(Lane.LOAD), "the load")
    times = lanes._times
    assert max(len(kept) for kept in (*times._running.values(), times._waits)) < 50


@timely
def test_closed_lanes_record_nothing_to_wait_for(lanes: LoggedLanes) -> None:
    lanes.close()
    lanes.record(Lane.COMPUTE)
    for lane in set(Lane) - {Lane.COMPUTE}:
        with pytest.raises(LaneError, match="closed"):
            lanes.record(lane)
