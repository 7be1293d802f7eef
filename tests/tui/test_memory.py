"""Memory on the screen: whose it is, on which machine, and how high it was."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from offloadtrain_tui import memory
from offloadtrain_tui.reading.history import History, fold
from offloadtrain_tui.reading.live_memory import MOST, LiveMemory
from offloadtrain_tui.reading.log_reader import RunReader, Snapshot
from offloadtrain_tui.reading.runs import open_run
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.bars import Tier

from benchmarks.generated_runs import generate
from offloadtrain.events import schema
from offloadtrain.events.memory_ring import MemoryPoint, RingWriter
from offloadtrain.hardware.memory_sampler import MemorySampler
from offloadtrain.runtime.device_memory import AllocatorCounters
from tests.runtime.fake_allocator import FakeAllocator
from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, GIB, Timed, lines, write

FIXED = 24 * GIB + GIB // 8
"""What the Ledger of a recording holds on the device."""


def shown(
    *histories: History, machine: schema.System | None = None, here: bool = False
) -> ViewState:
    views = tuple(View.at(history) for history in histories)
    snapshot = Snapshot("run", Path("run"), views, "running", lives_here=here)
    return ViewState(snapshot, now_s=histories[0].last_time_s, machine=machine)


def live(allocated: int, *, reserved: int = 0, free: int = 0, rss: int = 0) -> schema.LiveMemory:
    return schema.LiveMemory(
        step=1,
        allocated_kib=(allocated >> 10,),
        reserved_kib=(max(reserved, allocated) >> 10,),
        free_kib=(free >> 10,),
        rss_kib=(rss >> 10,),
    )


def told(*events: schema.Event, rank: int = 0, **start: object) -> History:
    begun: list[Timed] = [(BEGIN_S, recordings.start(**start)), (BEGIN_S, recordings.memory(0))]
    later = [(BEGIN_S + 1 + second, event) for second, event in enumerate(events)]
    return fold(lines([*begun, *later], rank), rank)


def system(**changed: object) -> schema.System:
    return replace(recordings.system(random.Random(0)), **changed)  # type: ignore[arg-type]


def parts(tier: Tier) -> dict[str, int]:
    return {part.owner: part.nbytes for part in tier.parts}


# ---- one bar


def test_a_bar_adds_up_to_the_card() -> None:
    """Owners, activations, the allocator's cache, others and what the driver calls free."""
    seen = live(27 * GIB, reserved=29 * GIB, free=2 * GIB)
    (bar,) = memory.devices(shown(told(system(), seen)))
    assert parts(bar)[memory.ACTIVATIONS] == 27 * GIB - FIXED
    assert (bar.used, bar.cache, bar.other, bar.free) == (27 * GIB, 2 * GIB, GIB, 2 * GIB)
    assert bar.total == 32 * GIB


def test_a_peak_inside_a_step_reaches_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the allocator through the sampler and the log: the peak was gone before any sample."""
    gpu = FakeAllocator(32 * GIB)
    gpu.install(monkeypatch)
    gpu.take(FIXED)
    counters = AllocatorCounters(torch.device("cuda", 0), gpu.free)
    records: list[schema.Event] = []
    gpu.take(6 * GIB)
    gpu.take(-6 * GIB)
    sampler = MemorySampler(records.append, read_device=counters.read, interval_s=60.0)
    sampler.close()
    (bar,) = memory.devices(shown(told(system(), *records)))
    assert bar.peak == FIXED + 6 * GIB and bar.used == FIXED
    step = replace(
        recordings.step(1, random.Random(0)), device_peak_bytes=counters.end_step() + GIB
    )
    (bar,) = memory.devices(shown(told(system(), step)))
    assert bar.peak == FIXED + 7 * GIB


@pytest.mark.slow
def test_the_plan_stands_beside(tmp_path: Path) -> None:
    plan = {
        "device": "cuda:0",
        "memory": {"device": {"working weights": 24 * GIB}, "host": {"exp_avg": 3 * GIB}},
        "activations": {"activations": 2 * GIB, "logits and loss": GIB},
        "process_bytes": GIB,
    }
    device, host = memory.bars(shown(told(system(), plan=plan)))
    assert (device.planned, host.planned) == (27 * GIB, 4 * GIB)
    planned = {row.owner: row.planned for row in memory.rows(shown(told(plan=plan)).view)}
    assert planned[memory.ACTIVATIONS] == 3 * GIB


@pytest.mark.slow
def test_owners_have_words_for_people() -> None:
    _, host = memory.bars(shown(told(system())))
    assert {"Adam m", "Adam v"} < parts(host).keys()
    assert not {"exp_avg", "exp_avg_sq", "unattributed"} & parts(host).keys()


# ---- several ranks


def ranks(count: int, hosts: Callable[[int], str] = lambda rank: "box") -> list[History]:
    found = []
    for rank in range(count):
        sample = recordings.system(random.Random(0), gpus=count)
        plan = {"device": f"cuda:{rank}", "gpu_uuid": f"GPU-{rank + 1}"}
        seen = live((25 + rank) * GIB, free=GIB, rss=150 * GIB)
        machine = {"host": hosts(rank)}
        found.append(told(sample, seen, rank=rank, plan=plan, machine=machine))
    return found


def test_every_rank_has_its_gpu_and_the_host_is_of_all() -> None:
    *devices, host = memory.bars(shown(*ranks(4)))
    assert [bar.title for bar in devices] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert [bar.used for bar in devices] == [(25 + rank) * GIB for rank in range(4)]
    assert parts(host)["master weights"] == 4 * 48 * GIB
    assert host.used == 4 * 150 * GIB and "4 ranks" in host.note


@pytest.mark.slow
def test_ranks_of_another_host_are_not_in_its_bar() -> None:
    host = memory.bars(shown(*ranks(4, lambda rank: f"box{rank // 2}")))[-1]
    assert parts(host)["master weights"] == 2 * 48 * GIB


# ---- the right machine


def here(uuid: str, used: int) -> schema.System:
    """A sample by the monitor of the machine it runs on."""
    gpu = replace(recordings.system(random.Random(0)).gpus[0], uuid=uuid, memory_used_bytes=used)
    return system(gpus=(replace(gpu, power_w=77.0),))


@pytest.mark.parametrize(
    ("uuid", "lives_here", "is_its"),
    [("GPU-1", True, True), ("GPU-9", True, False), ("GPU-1", False, False)],
)
def test_only_the_runs_own_gpu_is_asked(uuid: str, lives_here: bool, is_its: bool) -> None:
    """Not another GPU, and not this machine for a run that has ended or lives elsewhere."""
    history = told(system())
    (bar,) = memory.devices(shown(history, machine=here(uuid, GIB), here=lives_here))
    assert ("77 W" in bar.note) == is_its and ("280 W" in bar.note) == (not is_its)


@pytest.mark.slow
def test_a_run_without_nvml_in_a_container_has_the_figures_of_its_log() -> None:
    blind = system(gpus=(), gpu_state="no NVIDIA driver on this machine")
    state = shown(told(system()), machine=blind, here=True)
    (bar,) = memory.devices(state)
    assert bar.total == 32 * GIB and "280 W" in bar.note and "driver" not in bar.note
    late = replace(state, now_s=state.now_s + 90)
    assert "as of 1m30s ago" in memory.devices(late)[0].note


@pytest.mark.parametrize("state", ["cpu", "cuda:0"])
def test_a_run_on_a_cpu_is_not_told_that_it_lacks_a_driver(state: str) -> None:
    """It reads as an error, in every frame; where a GPU computes it is one."""
    sample = system(gpus=(), gpu_state="no NVIDIA driver")
    bars = memory.bars(shown(told(sample, plan={"device": state})))
    notes = " ".join(bar.note for bar in bars)
    assert ("no NVIDIA driver" in notes) == (state != "cpu")
    assert ("working weights" in parts(bars[-1])) == (state == "cpu")


@pytest.mark.slow
def test_without_a_run_this_machine_is_shown() -> None:
    bars = memory.bars(shown(History(), machine=here("GPU-9", 3 * GIB)))
    assert [bar.title for bar in bars] == ["GPU 0", "HOST"]
    assert bars[0].other == 3 * GIB


# ---- over time


@pytest.mark.slow
def test_history_shows_what_was_held_at_each_time() -> None:
    seen = [live((25 + n % 5) * GIB, reserved=30 * GIB, free=GIB) for n in range(50)]
    history = told(system(), *seen)
    state = shown(history)
    (bar,) = memory.devices(state)
    area = memory.device_history(state.view, bar)
    columns = [column for column in area.columns if column]
    assert area.limit == 32 * GIB and len(columns) == len(area.columns)
    for *owners, cache, others in columns:
        assert sum(owners) + cache == 30 * GIB and others == GIB
        assert (sum(owners) - FIXED) % GIB == 25 * GIB - FIXED
    assert max(sum(column[:-2]) for column in columns) == 29 * GIB
    then = memory.device_history(View.at(history, BEGIN_S + 10), bar)
    assert sum(bool(column) for column in then.columns) and then.axis != area.axis


@pytest.mark.slow
def test_a_long_log_keeps_its_extremes_in_little_memory() -> None:
    kept = LiveMemory()
    for number in range(3 * MOST):
        size = 900 if number == 5000 else 100 + number % 7
        assert kept.add({"t": float(number), "allocated_kib": [size]})
    found = list(kept.stretches(math.inf, 50))
    most = [one.most("allocated") or 0 for one in found if one]
    assert max(most) == 900 << 10 and len(most) == 50
    assert max(most[20:]) == 106 << 10
    newest = kept.at(math.inf)
    assert newest is not None and newest.time_s == 3 * MOST - 1
    assert len(kept._columns.times) <= MOST


def test_odd_sizes_are_not_known() -> None:
    for values in (None, "x", [], [1, 2], [-1], [1.5], ["a"] * 3, [1 << 80], [True], [None] * 3):
        kept = LiveMemory()
        assert kept.add({"t": 1.0, "allocated_kib": values, "rss_kib": [7]})
        found = kept.at(math.inf)
        assert found is not None and found.now("allocated") is None
        assert found.now("rss") == 7 << 10
        assert not kept.add({"t": "nan", "rss_kib": [7]}) and not kept.add({"rss_kib": [7]})


@pytest.mark.slow
def test_the_ring_is_newer_than_the_log(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [(BEGIN_S, recordings.start()), (BEGIN_S + 1, live(GIB))])
    reader = RunReader(open_run(folder))
    reader.read()
    ring = RingWriter(folder / "events/rank000.ring")
    ring.write(MemoryPoint(BEGIN_S + 2, 1, allocated=5 * GIB))
    reader.read()
    found = reader.snapshot(BEGIN_S + 2).first.live
    assert found is not None and found.now("allocated") == 5 * GIB
    earlier = reader.snapshot(BEGIN_S + 2, at_s=BEGIN_S + 1.5).first.live
    assert earlier is not None and earlier.now("allocated") == GIB
    (folder / "events/rank000.ring").write_bytes(b"x" * (1 << 20))
    reader.read()  # what is no ring is not read
    reader.close()


@pytest.mark.slow
def test_memory_within_a_step_follows_the_zoom(tmp_path: Path) -> None:
    folder = generate(tmp_path / "run", steps=3)
    view = View.at(fold((folder / "events/rank000.jsonl").read_bytes().splitlines()))
    curve = view.curve
    assert curve is not None
    whole = memory.within_step(view, 0.0, curve.at_ms[-1])
    assert whole.base + max(c[0] for c in whole.columns if c) == 1024 * max(curve.kib)
    part = memory.within_step(view, curve.at_ms[10], curve.at_ms[12])
    assert {c[0] + part.base for c in part.columns if c} == {1024 * k for k in curve.kib[11:13]}
