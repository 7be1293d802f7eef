"""Training over the real CUDA lanes and a stand-in for CUDA: the bits of the other backends, and no
access that nothing orders. And the stand-in can say no."""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.engine.interpreter import Functions
from offloadtrain.engine.step_report import StepReport
from offloadtrain.runtime.lanes import CudaLanes, Lane, LaneError, LaneEvent, Lanes, copy, on_lanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.program import updates
from offloadtrain.step.program.operations import Dependencies, Kind
from offloadtrain.step.proof.recording import Launched
from tests.distributed.conftest import Run
from tests.distributed.reference import own_batches
from tests.engine.test_async_save import Copies
from tests.engine.test_proof import allocate_after_the_event
from tests.harsh_lanes import poisoned
from tests.numerics.models import MODELS, Chain, batches, loss_of
from tests.recording_lanes import extent
from tests.runtime.fake_cuda import (
    HOSTS,
    LONGEST_S,
    FakeCudaError,
    Gpu,
    LoggedLanes,
    ManualClock,
    installed,
    timely,
    within,
)


@pytest.fixture(params=HOSTS)
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """With each kind of host lane."""
    with installed(request.param) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Case:
    """A way to train: `options` are those of `offload`, `lanes` those of `CudaLanes`."""

    options: dict[str, Any] = field(default_factory=dict)
    lanes: dict[str, bool] = field(default_factory=dict)
    model: str = "chain"
    poison: bool = False


STREAMED: dict[str, Any] = {"working": "host"}
OFFLOADED = {**STREAMED, "activation": "offload"}
RIGHT = {"update": "speculative", "clip_norm": 1e9}
RESIDENT = {"state_on": "device"}
ON_DISK = {"state_on": "disk", "scratch_dir": gettempdir(), "scratch_in_memory": True}
HALF: dict[str, Any] = {"state_on": {"device": 0.5}}
EARLY: dict[str, Any] = {"clip_norm": None, "skip_nonfinite": False}
SKIPPED: dict[str, Any] = {"skip_unused": ["*.experts.up"]}
AMONG = {"among_ranks": True}

CASES = {
    "exact": Case(),
    "early": Case(EARLY),
    "speculative, right": Case(RIGHT),
    "speculative, wrong": Case({"update": "speculative"}),
    "delayed": Case({"update": "delayed", "warmup_steps": 1}),
    "fp32": Case({"precision": "fp32"}, model="unusual"),
    "accumulated": Case({"grad_accum_steps": 3}, model="tied", poison=True),
    "split16": Case({"state": "split16", "grad_accum_steps": 2}, poison=True),
    "split16, delayed": Case({"state": "split16", "update": "delayed"}, model="tied"),
    "int8": Case({"state": "int8"}, model="unusual", poison=True),
    "int8, speculative": Case({"state": "int8", "grad_accum_steps": 2, **RIGHT}),
    "streamed": Case(STREAMED, poison=True),
    "streamed, speculative": Case({**STREAMED, **RIGHT}, model="skipping"),
    "streamed, delayed": Case({**STREAMED, "update": "delayed", "device_slots": 1}),
    "streamed, int8": Case({**STREAMED, "state": "int8", "grad_accum_steps": 2}, model="tied"),
    "partly streamed": Case({**STREAMED, "resident_blocks": 1}, model="two heads"),
    "recompute": Case({"activation": "recompute"}, model="tied"),
    "offloaded": Case(OFFLOADED, poison=True),
    "offloaded, accumulated": Case({**OFFLOADED, "grad_accum_steps": 2}),
    "on the disk": Case(ON_DISK, poison=True),
    "on the disk, int8, streamed": Case({**ON_DISK, **STREAMED, "state": "int8"}),
    "resident": Case(RESIDENT),
    "resident, accumulated": Case({**RESIDENT, "grad_accum_steps": 2}, model="unusual"),
    "resident, offloaded": Case({**RESIDENT, "activation": "offload"}),
    "half resident": Case(HALF, poison=True),
    "half resident, accumulated": Case({**HALF, "grad_accum_steps": 2}, model="unusual"),
    "half resident, sums": Case({**HALF, "grad_accum_steps": 3, "sums_on": "device"}, poison=True),
    "half resident, speculative": Case({**HALF, "state": "split16", **RIGHT}, model="tied"),
    "half resident, delayed": Case({**HALF, "state": "int8", "update": "delayed"}, poison=True),
    "experts skipped": Case({"skip_unused": ["experts.*"]}, model="unusual", poison=True),
    "experts skipped, delayed": Case({**SKIPPED, "update": "delayed"}, model="experts"),
    "experts skipped, early": Case({**SKIPPED, **EARLY}, model="experts", poison=True),
    "experts skipped, half resident": Case({**SKIPPED, **HALF, **RIGHT}, model="experts"),
    "among ranks, half resident": Case({**HALF, "grad_accum_steps": 2, **RIGHT}, AMONG),
    "among ranks": Case({}, AMONG, poison=True),
    "among ranks, streamed": Case({**OFFLOADED, "update": "delayed"}, AMONG),
    "among ranks, int8": Case({"state": "int8", "grad_accum_steps": 2, **RIGHT}, AMONG),
    "among ranks, resident": Case({**RESIDENT, "grad_accum_steps": 2}, AMONG),
}


@dataclass(slots=True)
class Trained:
    bits: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    saved: list[Copies] = field(default_factory=list)


def made(lanes: Lanes, model: nn.Module, **options: Any) -> ot.OffloadOptimizer:
    with on_lanes(lanes):
        chosen: dict[str, Any] = {"device": "cpu", "clip_norm": 0.5} | options
        return ot.offload(model, ot.AdamW(lr=1e-2), **chosen)


def train(
    lanes: Lanes,
    case: Case,
    *,
    steps: int = 3,
    sampled: int | None = None,
    loss_scale: float | None = None,
    stream: Callable[[int], list[Tensor]] = batches,
    saves: bool = False,
) -> Trained:
    """On these lanes, which are closed afterwards. `saves`: the state after each step is written;
    `saved` has it."""
    torch.manual_seed(0)
    model, result = MODELS[case.model](), Trained()
    if case.poison:
        poisoned(lanes)
    accum = case.options.get("grad_accum_steps", 1)
    optimizer = made(lanes, model, **case.options)
    if loss_scale is not None and optimizer._engine.counter.scaler is not None:
        optimizer._engine.counter.scaler.scale = loss_scale
    try:
        tokens = iter(stream(steps * accum))
        for step in range(steps):
            if step == sampled:
                optimizer.sample_timeline()
            for _ in range(accum):
                loss = loss_of(model, next(tokens))
                optimizer.backward(loss)
                result.losses.append(loss.item())
            optimizer.step()
            assert optimizer.last_step is not None
            result.reports.append(optimizer.last_step)
            if saves:
                result.saved.append(Copies())
                optimizer.write_state(result.saved[-1])
            if sampled is None:
                with torch.inference_mode():
                    result.losses.append(loss_of(model, batches(1)[0]).item())
        for param, tensors in optimizer.named_state():
            result.bits |= {f"{param}/{key}": value.clone() for key, value in tensors.items()}
        result.bits |= {name: p.detach().clone() for name, p in optimizer.full_weights()}
    finally:
        optimizer.close()
    return result


def over_streams(gpu: Gpu, case: Case, **options: Any) -> Trained:
    return within(LONGEST_S, lambda: train(LoggedLanes(gpu, **case.lanes), case, **options))


def compare(gpu: Gpu, case: Case, **options: Any) -> Trained:
    """With the same run over threads: the same bits, and all of it in order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates.SpeculationPolicy, "should_speculate", lambda policy: True)
        expected = train(ThreadLanes(), case, **options)
        gpu.backward_passes = 0
        result = over_streams(gpu, case, **options)
    assert result.losses == expected.losses
    assert result.bits.keys() == expected.bits.keys()
    for key, value in expected.bits.items():
        assert torch.equal(result.bits[key], value), key
    assert gpu.log.faults() == []
    assert gpu.backward_passes == len(result.losses) - len(result.reports)
    for copies, wanted in zip(result.saved, expected.saved, strict=True):
        assert copies.finished and copies.buffers.keys() == wanted.buffers.keys()
        for bucket, values in wanted.buffers.items():
            assert all(map(torch.equal, copies.buffers[bucket], values)), bucket
    for report, other in zip(result.reports, expected.reports, strict=True):
        assert (report.d2h_bytes, report.h2d_bytes) == (other.d2h_bytes, other.h2d_bytes)
        assert (str(report.grad_norm), report.skipped) == (str(other.grad_norm), other.skipped)
        assert report.exposed_ms >= 0 and min(report.busy_ms.values()) >= 0
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "gpu"),
    [(case, HOSTS[number % 2]) for number, case in enumerate(CASES) if number % 3 == 0],
    indirect=["gpu"],
)
def test_state_is_written_beside_whole_steps(gpu: Gpu, case: str) -> None:
    compare(gpu, CASES[case], saves=True)


@pytest.mark.parametrize("reader", ["checkpoint", "average"])
@timely
def test_what_reads_state_follows_the_code_of_the_caller(gpu: Gpu, reader: str) -> None:
    """It may have changed state on the device between two steps, by operations of its own."""
    model = MODELS["chain"]()
    optimizer = made(LoggedLanes(gpu), model, **RESIDENT)
    average = ot.EMA(optimizer, 0.9)
    optimizer.backward(loss_of(model, batches(1)[0]))
    optimizer.step()
    optimizer.synchronize()
    buckets = [bucket for block in optimizer._blocks for bucket in block.buckets]
    state = [buffer.whole for bucket in buckets for buffer in bucket.state]
    changed = Launched(Lane.COMPUTE, "code of the caller", (), tuple(map(extent, state)))
    gpu.log.on_stream(Lane.COMPUTE, changed)
    if reader == "average":
        average.update()
    else:
        optimizer.write_state(Copies())
    optimizer.close()
    assert gpu.log.faults() == []


BY_A_THREAD = ("exact", "int8, speculative", "offloaded", "resident", "among ranks, streamed")
IN_QUICK = (
    "exact",
    "early",
    "delayed",
    "streamed, speculative",
    "offloaded, accumulated",
    "resident",
)
THREAD_WAITS = {"exact", "streamed", "partly streamed", "recompute", "offloaded", "among ranks"}
"""One microbatch of a single rank, updated behind its norm: the training thread has waited for the
last gradient, and the host's thread waits for no copy."""
WHOLE_STEPS = [*((case, "queue") for case in CASES), *((case, "thread") for case in BY_A_THREAD)]


@pytest.mark.parametrize(
    ("case", "gpu"),
    [
        pytest.param(*case, marks=[] if case[0] in IN_QUICK else pytest.mark.slow)
        for case in WHOLE_STEPS
    ],
    indirect=["gpu"],
)
def test_whole_steps(gpu: Gpu, case: str, request: pytest.FixtureRequest) -> None:
    result = compare(gpu, CASES[case])
    options = CASES[case].options
    resident = options.get("state_on") == "device"
    awaits_copies = not resident and case not in THREAD_WAITS
    assert (gpu.driver_waits > 0) == ("queue" in request.node.name and awaits_copies)
    of_host = {"d2h", "host", "load" if options.get("working") == "host" else "h2d"}
    of_device = {"update"} if options.get("state_on", "disk") != "disk" else set()
    assert worked(result) >= {"compute"} | of_device | (set() if resident else of_host)


def worked(run: Trained) -> set[str]:
    """Lanes that say they did something."""
    return {lane for report in run.reports for lane, ms in report.busy_ms.items() if ms > 0}


@pytest.mark.parametrize("case", ["streamed, int8", "offloaded", "among ranks, resident"])
def test_everything_late(case: str) -> None:
    with installed(lag_ms=2, task_delay_ms=2, seed=1) as gpu:
        compare(gpu, CASES[case], steps=2)


def test_an_overflow_is_skipped(gpu: Gpu) -> None:
    case = Case({"precision": "fp16", "state": "int8", "grad_accum_steps": 2})
    skipped = [report.skipped for report in compare(gpu, case, loss_scale=2.0**20, steps=8).reports]
    assert skipped[0] and not skipped[-1]


def on_a_rank(case: Case) -> tuple[list[str], bool, int, set[str]]:
    """What went wrong, whether bits are the same, bytes that were sent, and who worked."""
    with installed() as gpu:
        expected = train(ThreadLanes(), case, stream=own_batches)
        result = over_streams(gpu, case, stream=own_batches)
    equal = all(torch.equal(result.bits[key], value) for key, value in expected.bits.items())
    sent = sum(report.comm_bytes for report in result.reports)
    return gpu.log.faults(), equal, sent, worked(result)


def test_collectives_between_two_ranks(ranks: Run) -> None:
    for case in (
        Case({**OFFLOADED, "reduction": "fp32", "state": "int8", "grad_accum_steps": 2}, AMONG),
        Case({**RESIDENT, "zero_stage": 2}, AMONG),
        Case({"zero_stage": 3}, AMONG),
    ):
        for faults, equal, sent, lanes in ranks(2, on_a_rank, case):
            assert faults == [] and equal and sent > 0
            working = {"update"} if "state_on" in case.options else {"d2h", "host"}
            assert lanes >= {"compute", "comm"} | working


@pytest.mark.parametrize("options", [{}, OFFLOADED], ids=["device", "offloaded"])
def test_a_timeline_has_what_each_lane_did(gpu: Gpu, options: dict[str, Any]) -> None:
    result = over_streams(gpu, Case(options), sampled=2)
    report, moved = result.reports[2], Counter[str]()
    for interval in report.timeline:
        moved[interval.lane] += interval.num_bytes
        assert interval.duration_ms >= 0
    assert moved["d2h"] == report.d2h_bytes > 0
    assert moved["h2d"] + moved["load"] == report.h2d_bytes > 0
    assert {"compute", "d2h", "host"} <= set(moved) and moved["compute"] == moved["host"] == 0
    starts = [interval.start_ms for interval in report.timeline]
    assert starts == sorted(starts)
    assert not any(other.timeline for other in result.reports if other is not report)


@pytest.mark.parametrize("broken", [Kind.GRAD_DOWN, Kind.WEIGHTS_UP, Kind.LOAD])
@pytest.mark.parametrize("among", [False, True])
def test_a_failure_in_a_step(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, broken: Kind, among: bool
) -> None:
    """The training thread raises, and `close` ends everything."""
    left = iter(range(7))

    def fails(source: Tensor, target: Tensor) -> None:
        if next(left, None) is None:
            raise OSError("planted")
        copy(source, target)

    made = Functions.of
    monkeypatch.setattr(Functions, "of", lambda f, op: fails if op.kind is broken else made(f, op))
    case = Case(OFFLOADED if broken is Kind.LOAD else {}, {"among_ranks": among})
    with pytest.raises((LaneError, OSError), match="planted"):
        over_streams(gpu, case, steps=6)


@timely
def test_an_optimizer_that_is_dropped_ends_its_threads(gpu: Gpu) -> None:
    optimizer: Any = made(LoggedLanes(gpu), Chain())
    optimizer = None
    gc.collect()
    assert optimizer is None


# ---- the stand-in can say no


def waits_for_the_flag_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaLanes, "_stream_wait", lambda lanes, lane, event: event.issued.wait())


def waits_without_the_flag(patch: pytest.MonkeyPatch) -> None:
    def wait(lanes: Any, lane: Lane, event: Any) -> None:
        if event.cuda is not None:
            lanes._stream(lane).wait_event(event.cuda)

    patch.setattr(CudaLanes, "_stream_wait", wait)


def records_at_once(patch: pytest.MonkeyPatch) -> None:
    """From the launching thread, before the lane's thread has launched what comes first."""

    def record(lanes: Any, lane: Lane) -> LaneEvent:
        workers, lanes._workers = lanes._workers, {}
        try:
            return recorded(lanes, lane)
        finally:
            lanes._workers = workers

    recorded = CudaLanes.record
    patch.setattr(CudaLanes, "record", record)


def runs_on_the_current_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())


def leaves_out(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(CudaLanes, name, lambda *_: None)


def allocates_after_the_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dependencies, "allocate", allocate_after_the_event)


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "no stream waits": (waits_for_the_flag_only, "streamed, int8", "^race: "),
    "waits for what is not recorded": (
        waits_without_the_flag,
        "streamed, int8",
        "never recorded|^race: ",
    ),
    "records at once": (records_at_once, "streamed, int8", "after what was launched later"),
    "all on one stream": (
        runs_on_the_current_stream,
        "streamed, int8",
        "^race: |after what was launched later",
    ),
    "the host lane does not wait": (leaves_out("_queue_waits"), "streamed, int8", "^race: "),
    "nobody waits for events": (leaves_out("_block_on"), "streamed, int8", "^race: "),
    "allocates after the event": (allocates_after_the_event, "offloaded", "^race: .*'allocate'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    plant, case, pattern = MISTAKES[mistake]
    with installed("thread") as gpu:
        plant(monkeypatch)
        try:
            over_streams(gpu, CASES[case])
        except (LaneError, FakeCudaError) as error:
            assert re.search(pattern, str(error))
        else:
            assert any(re.search(pattern, fault) for fault in gpu.log.faults())


def test_times_that_are_not_there_are_refused() -> None:
    clock = ManualClock()
    with installed(clock=clock) as gpu:
        start, end, plain = (gpu.event_type(enable_timing=timed) for timed in (True, True, False))
        with pytest.raises(ValueError, match="enable_timing"):
            start.elapsed_time(plain)
        with pytest.raises(ValueError, match="must be recorded"):
            start.elapsed_time(end)
        start.record()
        clock.advance(5e-3)
        end.record()
        assert not end.query()
        with pytest.raises(RuntimeError, match="must be completed"):
            start.elapsed_time(end)
        end.synchronize()
        assert end.query() and start.elapsed_time(end) == pytest.approx(5)
        with pytest.raises(FakeCudaError, match="never recorded"):
            plain.wait()
        with pytest.raises(FakeCudaError, match="not the device"):
            gpu.stream_type(torch.device("cuda", 1))
