"""Each rule: raised once, on time, and cleared; nothing from an ordinary run."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from offloadtrain.events.alerts import STALL_S, Alerts
from offloadtrain.events.schema import Alert, GpuSample, Step, System

GIB = 1 << 30
SYSTEM = System(
    cpu_percent=100.0,
    rss_bytes=GIB,
    host_available_bytes=50 * GIB,
    host_total_bytes=100 * GIB,
    swap_used_bytes=GIB,
)
GPU = GpuSample(
    index=0,
    name="V100",
    uuid="GPU-1",
    utilization_percent=97.0,
    pcie_generation=3,
    pcie_generation_max=3,
    pcie_width=16,
    pcie_width_max=16,
)


class Watched:
    """The rules, a clock, and what they said."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.told: list[Alert] = []
        self.alerts = Alerts(self.told.append, lambda: self.now_s)
        self.number = 0
        self.draw = random.Random(0)

    def steps(self, count: int, **changed: object) -> None:
        for _ in range(count):
            self.number += 1
            self.now_s += 1.0
            noise = self.draw.uniform(0.97, 1.03)
            step = Step(
                step=self.number,
                loss=2.0 * noise,
                lr=1e-3,
                tokens=1,
                grad_norm=1.0,
                tokens_per_s=1000.0 * noise,
                step_ms=1000.0,
            )
            self.alerts.step(replace(step, **changed))  # type: ignore[arg-type]

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(alert.code, alert.state) for alert in self.told]


def test_an_ordinary_run_is_quiet() -> None:
    run = Watched()
    for _ in range(40):
        run.steps(25)
        run.alerts.system(replace(SYSTEM, gpus=(GPU,)), 10 * GIB)
    assert run.said == []


def test_a_loss_that_is_no_number_is_one_alert() -> None:
    run = Watched()
    run.steps(5)
    run.steps(3, loss=math.nan)
    assert run.said == [("not-finite", "raised")]
    assert "loss of step 6 is nan" in run.told[0].message and run.told[0].level == "error"
    run.steps(9)
    assert len(run.said) == 1
    run.steps(1)
    assert run.said[-1] == ("not-finite", "cleared")


def test_a_spike_against_the_spread_of_the_losses() -> None:
    run = Watched()
    run.steps(50)
    run.steps(1, loss=2.2)
    assert run.said == []
    run.steps(1, loss=9.0)
    assert run.said == [("loss-spike", "raised")]
    run.steps(20)
    assert run.said[-1] == ("loss-spike", "cleared")


def test_a_loss_that_falls_is_no_spike_and_no_number_no_measure_of_later_ones() -> None:
    run = Watched()
    run.steps(50)
    run.steps(1, loss=0.1)
    assert run.said == []
    run.steps(40, loss=math.nan)
    run.steps(3)
    assert "loss-spike" not in [code for code, _ in run.said]
    run.steps(1, loss=9.0)
    assert run.said[-1] == ("loss-spike", "raised")


def test_skips_in_a_row() -> None:
    run = Watched()
    run.steps(3, skipped=True)
    assert run.said == []
    run.steps(2, skipped=True)
    assert run.said == [("skips", "raised")]
    run.steps(1)
    assert run.said[-1] == ("skips", "cleared")


def test_the_floor_of_the_loss_scale() -> None:
    run = Watched()
    run.steps(2, loss_scale=2.0)
    run.steps(2, loss_scale=1.0)
    assert run.said == [("loss-scale-floor", "raised")]


def test_a_slower_run_and_no_flutter() -> None:
    run = Watched()
    run.steps(100)
    run.steps(10, tokens_per_s=700.0)
    assert run.said == [("slower", "raised")]
    run.steps(30, tokens_per_s=850.0)
    assert run.said == [("slower", "raised")], "better, and not well yet"
    run.steps(40, tokens_per_s=1000.0)
    assert run.said[-1] == ("slower", "cleared")


@pytest.mark.parametrize("step_ms", [1000.0, 60_000.0])
def test_a_stall_is_relative_to_the_steps(step_ms: float) -> None:
    run = Watched()
    run.steps(10, step_ms=step_ms)
    patience_s = max(STALL_S, 4 * step_ms / 1e3)
    run.now_s += patience_s - 1
    run.alerts.system(SYSTEM)
    assert run.said == []
    run.now_s += 2
    run.alerts.system(SYSTEM)
    run.alerts.system(SYSTEM)
    assert run.said == [("stall", "raised")]
    run.steps(1)
    assert run.said[-1] == ("stall", "cleared")


def test_before_the_first_step_nothing_stalls() -> None:
    run = Watched()
    run.now_s = 1e6
    run.alerts.system(SYSTEM)
    assert run.said == []


def test_host_memory_with_hysteresis() -> None:
    run = Watched()
    for gib, expected in ((6, 0), (4, 1), (6, 1), (9, 2), (6, 2), (4, 3)):
        run.alerts.system(replace(SYSTEM, host_available_bytes=gib * GIB))
        assert len(run.said) == expected, gib
    assert "the kernel may end the run" in run.told[0].message


def test_swap_that_grows() -> None:
    run = Watched()
    run.alerts.system(SYSTEM)
    run.alerts.system(replace(SYSTEM, swap_used_bytes=GIB + (32 << 20)))
    assert run.said == []
    run.alerts.system(replace(SYSTEM, swap_used_bytes=2 * GIB))
    assert run.said == [("swap", "raised")]


def test_a_disk_too_small_for_the_next_checkpoint() -> None:
    run = Watched()
    run.alerts.system(SYSTEM, free_disk_bytes=GIB)
    assert run.said == []
    run.alerts.checkpoint(10 * GIB)
    run.alerts.system(SYSTEM, free_disk_bytes=11 * GIB)
    assert run.said == [("disk", "raised")]
    run.alerts.system(SYSTEM, free_disk_bytes=13 * GIB)
    assert run.said[-1] == ("disk", "cleared")
    run.alerts.system(SYSTEM, None)


def test_a_link_that_is_narrow_only_while_it_works() -> None:
    run = Watched()
    narrow = replace(GPU, pcie_width=8)
    for _ in range(5):
        run.alerts.system(replace(SYSTEM, gpus=(replace(narrow, utilization_percent=3.0),)))
    assert run.said == []
    for _ in range(3):
        run.alerts.system(replace(SYSTEM, gpus=(narrow,)))
    assert run.said == [("link-gpu0", "raised")]
    assert "8 lanes of 16" in run.told[0].message
    for _ in range(3):
        run.alerts.system(replace(SYSTEM, gpus=(GPU,)))
    assert run.said[-1] == ("link-gpu0", "cleared")


def test_a_bus_below_what_was_measured() -> None:
    run = Watched()
    run.alerts.calibrated_gbps = {"h2d": 50.0, "d2h": 50.0}

    def at(gbps: float, count: int, gib: float = 1.0) -> None:
        moved = round(gib * GIB)
        busy_ms = moved / gbps / 1e6
        busy = {"h2d": busy_ms / 2, "load": busy_ms / 2, "d2h": moved / 45.0 / 1e6}
        run.steps(count, h2d_bytes=moved, d2h_bytes=moved, busy_ms=busy)

    at(45.0, 30)
    at(20.0, 40, gib=0.01)
    assert run.said == [], "small copies say nothing"
    at(30.0, 20)
    assert run.said == [("bus-h2d", "raised")]
    assert "30.0 GB/s, but 50.0 GB/s were measured" in run.told[0].message
    at(38.0, 40)
    assert len(run.said) == 1, "better, and not well yet"
    at(45.0, 20)
    assert run.said[-1] == ("bus-h2d", "cleared")


def test_what_stands_is_told_once() -> None:
    run = Watched()
    run.alerts.standing("not-pinned", "m")
    run.alerts.standing("not-pinned", "m")
    assert run.said == [("not-pinned", "raised")]


def test_clocks_that_are_held_back() -> None:
    run = Watched()
    for _ in range(3):
        run.alerts.system(replace(SYSTEM, gpus=(replace(GPU, throttle="power brake"),)))
    assert run.said == [("throttle-gpu0", "raised")]


def test_a_slow_rank_is_named_and_forgotten() -> None:
    run = Watched()
    run.steps(40, ranks_ms=(100.0, 104.0, 98.0, 101.0))
    run.steps(19, ranks_ms=(100.0, 104.0, 130.0, 101.0))
    assert run.said == [("rank-skew", "raised")]
    assert "rank 2 takes 130 ms per step and the others 101 ms" in run.told[0].message
    run.steps(40, ranks_ms=(100.0, 104.0, 98.0, 101.0))
    assert run.said[1:] == [("rank-skew", "cleared")]


def test_two_ranks_can_be_skewed_too() -> None:
    run = Watched()
    run.steps(30, ranks_ms=(100.0, 120.0))
    assert run.said == [("rank-skew", "raised")] and "rank 1" in run.told[0].message


def test_one_slow_step_of_a_rank_is_nothing() -> None:
    run = Watched()
    run.steps(30, ranks_ms=(100.0, 100.0))
    run.steps(5, ranks_ms=(100.0, 400.0))
    run.steps(30, ranks_ms=(100.0, 100.0))
    assert run.said == []
