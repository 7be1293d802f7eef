"""Each rule: raised once, on time, and cleared; nothing from an ordinary run."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from offloadtrain.events.alerts import STALL_S, Alerts
from offloadtrain.events.schema import Alert, GpuSample, Step, System
from offloadtrain.events.time_left import Pause, seconds_left

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


class Run:
    """The rules, a clock, and the alerts that they sent."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sent: list[Alert] = []
        self.alerts = Alerts(self.sent.append, lambda: self.now_s)
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

    def systems(self, count: int, system: System) -> None:
        for _ in range(count):
            self.alerts.system(system)

    @property
    def codes(self) -> list[str]:
        return [f"{alert.code} {alert.state}" for alert in self.sent]


def available(gib: int) -> System:
    return replace(SYSTEM, host_available_bytes=gib * GIB)


def with_gpu(**changed: object) -> System:
    return replace(SYSTEM, gpus=(replace(GPU, **changed),))  # type: ignore[arg-type]


def ranks(*times_ms: float) -> dict[str, object]:
    return {"ranks_ms": times_ms}


Stage = tuple[int, "dict[str, object] | System", list[str]]
"""So many steps with these fields, or samples of the machine; and the alerts that they add."""

SCENARIOS: dict[str, list[Stage]] = {
    "not-finite": [
        (5, {}, []),
        (3, {"loss": math.nan}, ["not-finite raised"]),
        (9, {}, []),
        (1, {}, ["not-finite cleared"]),
    ],
    "a spike against the spread of the losses": [
        (50, {}, []),
        (1, {"loss": 2.2}, []),
        (1, {"loss": 9.0}, ["loss-spike raised"]),
        (20, {}, ["loss-spike cleared"]),
    ],
    "a loss that falls is no spike, and nan does not change the spread": [
        (50, {}, []),
        (1, {"loss": 0.1}, []),
        (40, {"loss": math.nan}, ["not-finite raised"]),
        (3, {}, []),
        (1, {"loss": 9.0}, ["loss-spike raised"]),
    ],
    "skips in a row": [
        (3, {"skipped": True}, []),
        (2, {"skipped": True}, ["skips raised"]),
        (1, {}, ["skips cleared"]),
    ],
    "the floor of the loss scale": [
        (2, {"loss_scale": 2.0}, []),
        (2, {"loss_scale": 1.0}, ["loss-scale-floor raised"]),
    ],
    "a slower run, without flutter": [
        (100, {}, []),
        (10, {"tokens_per_s": 700.0}, ["slower raised"]),
        (30, {"tokens_per_s": 850.0}, []),
        (40, {"tokens_per_s": 1000.0}, ["slower cleared"]),
    ],
    "host memory with hysteresis": [
        (1, available(6), []),
        (1, available(4), ["host-memory raised"]),
        (1, available(6), []),
        (1, available(9), ["host-memory cleared"]),
        (1, available(6), []),
        (1, available(4), ["host-memory raised"]),
    ],
    "swap that grows": [
        (1, SYSTEM, []),
        (1, replace(SYSTEM, swap_used_bytes=GIB + (32 << 20)), []),
        (1, replace(SYSTEM, swap_used_bytes=2 * GIB), ["swap raised"]),
    ],
    "a link that is narrow while it is busy": [
        (5, with_gpu(pcie_width=8, utilization_percent=3.0), []),
        (3, with_gpu(pcie_width=8), ["link-gpu0 raised"]),
        (3, with_gpu(), ["link-gpu0 cleared"]),
    ],
    "throttled clocks": [(3, with_gpu(throttle="power brake"), ["throttle-gpu0 raised"])],
    "a slow rank": [
        (40, ranks(100.0, 104.0, 98.0, 101.0), []),
        (19, ranks(100.0, 104.0, 130.0, 101.0), ["rank-skew raised"]),
        (40, ranks(100.0, 104.0, 98.0, 101.0), ["rank-skew cleared"]),
    ],
    "two ranks": [(30, ranks(100.0, 120.0), ["rank-skew raised"])],
    "two ranks of short steps": [(30, ranks(73.0, 86.0), [])],
    "few slow steps of a rank": [
        (30, ranks(100.0, 100.0), []),
        (5, ranks(100.0, 400.0), []),
        (30, ranks(100.0, 100.0), []),
    ],
}


def test_an_ordinary_run_is_quiet() -> None:
    run = Run()
    for _ in range(40):
        run.steps(25)
        run.alerts.system(replace(SYSTEM, gpus=(GPU,)), 10 * GIB)
    assert run.codes == []


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_an_alert_is_raised_once_and_cleared(scenario: str) -> None:
    run = Run()
    for count, stage, added in SCENARIOS[scenario]:
        before = len(run.sent)
        if isinstance(stage, System):
            run.systems(count, stage)
        else:
            run.steps(count, **stage)
        assert run.codes[before:] == added


def test_messages_name_the_value_and_the_part() -> None:
    run = Run()
    run.steps(5)
    run.steps(1, loss=math.nan)
    run.systems(3, replace(available(4), gpus=(replace(GPU, pcie_width=8),)))
    run.steps(30, ranks_ms=(100.0, 104.0, 130.0, 101.0))
    messages = {alert.code: alert.message for alert in run.sent}
    assert "loss of step 6 is nan" in messages["not-finite"] and run.sent[0].level == "error"
    assert "the kernel may end the run" in messages["host-memory"]
    assert "8 lanes of 16" in messages["link-gpu0"]
    assert "rank 2 takes 130 ms per step and the others 101 ms" in messages["rank-skew"]
    run.alerts.standing("not-pinned", "m")
    run.alerts.standing("not-pinned", "m")
    assert run.codes.count("not-pinned raised") == 1


@pytest.mark.parametrize("step_ms", [1000.0, 60_000.0])
def test_a_stall_is_relative_to_the_steps(step_ms: float) -> None:
    run = Run()
    run.now_s = 1e6
    run.systems(1, SYSTEM)
    run.steps(10, step_ms=step_ms)
    run.now_s += max(STALL_S, 4 * step_ms / 1e3) - 1
    run.systems(1, SYSTEM)
    assert run.codes == [], "before the first step nothing stalls"
    run.now_s += 2
    run.systems(2, SYSTEM)
    assert run.codes == ["stall raised"]
    run.steps(1)
    assert run.codes[1:] == ["stall cleared"]


def test_a_bus_slower_than_measured() -> None:
    run = Run()
    run.alerts.calibrated_gbps = {"h2d": 50.0, "d2h": 50.0}

    def at(gbps: float, count: int, gib: float = 1.0) -> None:
        moved = round(gib * GIB)
        busy_ms = moved / gbps / 1e6
        busy = {"h2d": busy_ms / 2, "load": busy_ms / 2, "d2h": moved / 45.0 / 1e6}
        run.steps(count, h2d_bytes=moved, d2h_bytes=moved, busy_ms=busy)

    at(45.0, 30)
    at(20.0, 40, gib=0.01)
    assert run.codes == [], "small copies do not count"
    at(30.0, 20)
    assert run.codes == ["bus-h2d raised"]
    assert "30.0 GB/s, but 50.0 GB/s were measured" in run.sent[0].message
    at(38.0, 40)
    assert len(run.codes) == 1, "better, and not well yet"
    at(45.0, 20)
    assert run.codes[1:] == ["bus-h2d cleared"]


# ---- the end of a run is as far away as a simulation of it takes


def walked(step: int, steps: int, step_s: float, every: int, pause_s: float) -> float:
    """Step by step, as the trainer goes: a pause after each multiple, and one at the end."""
    spent = 0.0
    for done in range(step + 1, steps + 1):
        spent += step_s
        spent += pause_s if done == steps or (every and done % every == 0) else 0.0
    return spent


def test_the_time_left_is_the_sum_of_steps_and_pauses() -> None:
    for steps in (1, 7, 20, 21):
        for step in range(steps + 1):
            for every in (1, 2, 5, 20, 30):
                left_s = seconds_left(step, steps, 3.0, [Pause(every, 10.0)])
                assert left_s == pytest.approx(walked(step, steps, 3.0, every, 10.0))
    assert seconds_left(3, 10, 2.0, [Pause(0, 99.0)]) == 14.0
