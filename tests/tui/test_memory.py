"""Memory on the screen: its owners, its machine, and its peaks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from offloadtrain_tui import memory, this_machine
from offloadtrain_tui.reading.columns import MOST, LiveMemory
from offloadtrain_tui.reading.history import History, fold
from offloadtrain_tui.reading.log_reader import Snapshot
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.bars import Tier
from offloadtrain_tui.widgets.drawn import FILLS, OWNER_COLORS

from benchmarks.generated_runs import generate
from offloadtrain.events import schema
from offloadtrain.hardware import cgroup
from offloadtrain.hardware.memory_sampler import MemorySampler
from offloadtrain.hardware.nvml import Nvml
from offloadtrain.runtime.device_memory import AllocatorCounters
from tests.runtime.fake_allocator import FakeAllocator
from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, GIB, Timed, lines

FIXED = 24 * GIB + GIB // 8
"""Bytes of a recording's Ledger on the device."""


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


def history_of(*events: schema.Event, rank: int = 0, **start: object) -> History:
    begun: list[Timed] = [(BEGIN_S, recordings.start(**start)), (BEGIN_S, recordings.memory(0))]
    later = [(BEGIN_S + 1 + second, event) for second, event in enumerate(events)]
    return fold(lines([*begun, *later], rank), rank)


def system(**changed: object) -> schema.System:
    return replace(recordings.system(random.Random(0)), **changed)  # type: ignore[arg-type]


def parts(tier: Tier) -> dict[str, int]:
    return {part.owner: part.nbytes for part in tier.parts}


def test_without_a_run_the_bar_of_the_host_is_that_of_the_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def limits() -> list[cgroup.MemoryLimit]:
        """Of the container, and of a group in it that is full but for page cache."""
        sizes = ((512 << 20, 100 << 20), (1 << 30, 90 << 20))
        return [cgroup.MemoryLimit(Path("memory.max"), *size) for size in sizes]

    monkeypatch.setattr(cgroup, "memory_limits", limits)
    history = History(0)
    bar = memory.host(replace(shown(history), machine=this_machine.sample(Nvml())))
    assert (bar.total, bar.parts[0].nbytes) == (512 << 20, 422 << 20)


def test_an_owner_has_one_color_in_all_bars() -> None:
    """Of twelve owners no two look alike; and the same one does on device and host."""
    rows = tuple(
        schema.MemoryRow(owner=f"owner {n}", tier=tier, num_bytes=(20 - n) * GIB, peak_bytes=0)
        for tier, numbers in (("device", range(3)), ("host", range(12, 0, -1)))
        for n in numbers
    )
    bars = memory.bars(shown(history_of(system(), schema.Memory(step=1, rows=rows))))
    looks: dict[str, set[tuple[str, str]]] = {}
    for part in (part for bar in bars for part in bar.parts):
        look = (FILLS[part.color % len(FILLS)], OWNER_COLORS[part.color % len(OWNER_COLORS)])
        looks.setdefault(part.owner, set()).add(look)
    assert len(looks) >= 13 and all(len(look) == 1 for look in looks.values())
    assert len({next(iter(look)) for look in looks.values()}) == len(looks)


def test_a_peak_inside_a_step_reaches_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the allocator through the sampler and the log: the peak was gone before any sample."""
    gpu = FakeAllocator(32 * GIB)
    gpu.install(monkeypatch)
    gpu.take(FIXED)
    counters = AllocatorCounters(torch.device("cuda", 0), gpu.free)
    records: list[schema.Event] = []
    gpu.take(6 * GIB)
    gpu.take(-6 * GIB)
    sampler = MemorySampler(records.append, interval_s=60.0)
    sampler.begin(read_device=counters.read)
    sampler.close()
    (bar,) = memory.devices(shown(history_of(system(), *records)))
    assert bar.peak == FIXED + 6 * GIB and bar.used == FIXED
    step = replace(
        recordings.step(1, random.Random(0)), device_peak_bytes=counters.end_step() + GIB
    )
    (bar,) = memory.devices(shown(history_of(system(), step)))
    assert bar.peak == FIXED + 7 * GIB


def test_the_bar_of_the_host_is_of_its_own_ranks() -> None:
    histories = [
        history_of(live(25 * GIB, rss=150 * GIB), rank=rank, machine={"host": f"box{rank // 2}"})
        for rank in range(4)
    ]
    host = memory.bars(shown(*histories))[-1]
    assert parts(host)["master weights"] == 2 * 48 * GIB and host.used == 2 * 150 * GIB


def here(uuid: str, used: int) -> schema.System:
    """A sample by the monitor of the machine it runs on."""
    gpu = replace(recordings.system(random.Random(0)).gpus[0], uuid=uuid, memory_used_bytes=used)
    return system(gpus=(replace(gpu, power_w=77.0),))


def test_only_the_gpu_of_the_run_is_read() -> None:
    """Not another GPU, and not this machine for a run that has ended or is on another host."""
    for uuid, lives_here in (("GPU-1", True), ("GPU-9", True), ("GPU-1", False)):
        machine = here(uuid, GIB)
        (bar,) = memory.devices(shown(history_of(system()), machine=machine, here=lives_here))
        is_read = uuid == "GPU-1" and lives_here
        assert ("77 W" in bar.note) == is_read and ("280 W" in bar.note) == (not is_read)
    bars = memory.bars(shown(History(), machine=here("GPU-9", 3 * GIB)))
    assert [bar.title for bar in bars] == ["GPU 0", "HOST"], "without a run this machine is shown"
    assert bars[0].other == 3 * GIB


def test_a_run_without_nvml_in_a_container_has_the_figures_of_its_log() -> None:
    blind = system(gpus=(), gpu_state="no NVIDIA driver on this machine")
    state = shown(history_of(system()), machine=blind, here=True)
    (bar,) = memory.devices(state)
    assert bar.total == 32 * GIB and "280 W" in bar.note and "driver" not in bar.note
    late = replace(state, now_s=state.now_s + 90)
    assert "as of 1m30s ago" in memory.devices(late)[0].note


def test_a_missing_driver_is_reported_only_for_a_run_on_a_gpu() -> None:
    for device in ("cpu", "cuda:0"):
        sample = system(gpus=(), gpu_state="no NVIDIA driver")
        bars = memory.bars(shown(history_of(sample, plan={"device": device})))
        notes = " ".join(bar.note for bar in bars)
        assert ("no NVIDIA driver" in notes) == (device != "cpu")
        assert ("working weights" in parts(bars[-1])) == (device == "cpu")


@pytest.mark.slow
def test_a_long_log_has_its_extremes_in_little_memory() -> None:
    log = LiveMemory()
    for number in range(3 * MOST):
        size = 900 if number == 5000 else 100 + number % 7
        assert log.add({"t": float(number), "allocated_kib": [size]})
    stretches = [stretch for stretch in log.stretches(math.inf, 50) if stretch]
    most = [stretch.most("allocated") or 0 for stretch in stretches]
    assert max(most) == 900 << 10 and len(most) == 50
    assert max(most[20:]) == 106 << 10
    newest = log.at(math.inf)
    assert newest is not None and newest.time_s == 3 * MOST - 1
    assert len(log.rows) <= MOST


def test_odd_sizes_are_unknown() -> None:
    for values in (None, "x", [], [1, 2], [-1], [1.5], ["a"] * 3, [1 << 80], [True], [None] * 3):
        log = LiveMemory()
        assert log.add({"t": 1.0, "allocated_kib": values, "rss_kib": [7]})
        sample = log.at(math.inf)
        assert sample is not None and sample.now("allocated") is None
        assert sample.now("rss") == 7 << 10
        assert not log.add({"t": "nan", "rss_kib": [7]}) and not log.add({"rss_kib": [7]})


@pytest.mark.slow
def test_memory_within_a_step_follows_the_zoom(tmp_path: Path) -> None:
    folder = generate(tmp_path / "run", steps=3)
    view = View.at(fold((folder / "events/rank000.jsonl").read_bytes().splitlines()))
    curve = view.newest(schema.StepMemory)
    assert curve is not None
    complete = memory.within_step(view, 0.0, curve.at_ms[-1])
    assert complete.base + max(c[0] for c in complete.columns if c) == 1024 * max(curve.kib)
    part = memory.within_step(view, curve.at_ms[10], curve.at_ms[12])
    assert {c[0] + part.base for c in part.columns if c} == {1024 * k for k in curve.kib[11:13]}
