"""Where the time went: what each lane says it worked, held against the intervals it kept."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

import offloadtrain as ot
from offloadtrain.runtime.lanes import (
    Lane,
    Lanes,
    SequentialLanes,
    on_lanes,
)
from offloadtrain.runtime.lanes.threads import ThreadLanes
from tests.numerics.models import Chain, batches, loss_of

PLACEMENTS: list[dict[str, Any]] = [{}, {"working": "host", "activation": "offload"}]


@pytest.mark.parametrize("options", PLACEMENTS, ids=["device", "streamed"])
def test_a_step_s_busy_times_are_the_sums_of_its_intervals(options: dict[str, Any]) -> None:
    model = Chain(4)
    with on_lanes(SequentialLanes()):
        optimizer = ot.offload(model, device="cpu", clip_norm=0.5, **options)
    optimizer.backward(loss_of(model, batches(1)[0]))
    optimizer.step()  # what was launched before it counts in it
    for tokens in batches(3):
        began = time.perf_counter()
        optimizer.sample_timeline()
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
        report = optimizer.last_step
        assert report is not None
        wall_ms = 1e3 * (time.perf_counter() - began)
        in_timeline: Counter[str] = Counter()
        for interval in report.timeline:
            in_timeline[interval.lane] += interval.duration_ms
        for lane in set(Lane) - {Lane.COMPUTE}:
            assert report.busy_ms[lane] == pytest.approx(in_timeline[lane], abs=1e-6)
        assert report.busy_ms["host"] > 0 and report.busy_ms["d2h"] > 0
        assert 0 < report.busy_ms["compute"] < wall_ms - report.exposed_ms


@pytest.mark.parametrize("lanes", [SequentialLanes, ThreadLanes])
@pytest.mark.parametrize("options", PLACEMENTS, ids=["device", "streamed"])
def test_the_waits_of_a_sampled_step_are_its_exposed_time(
    lanes: type[Lanes], options: dict[str, Any]
) -> None:
    model = Chain(4)
    with on_lanes(lanes()):
        optimizer = ot.offload(model, device="cpu", clip_norm=0.5, **options)
    for tokens in batches(3):
        optimizer.synchronize()
        optimizer.sample_timeline()
        before_ms = optimizer._engine.lanes.read_totals().exposed_ms
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
        report = optimizer.last_step
        assert report is not None
        waits = [wait for wait in report.timeline if wait.lane == "wait"]
        assert {wait.name for wait in waits} <= {"d2h", "host", "h2d", "load"}
        waited_ms = sum(wait.duration_ms for wait in waits)
        assert sum(report.exposed_by_lane.values()) == pytest.approx(waited_ms)
        exposed_ms = optimizer._engine.lanes.read_totals().exposed_ms - before_ms
        assert waited_ms <= exposed_ms + 1e-6  # the rest is the wait at the end of the sampling
        if lanes is SequentialLanes:  # over threads all may be hidden
            assert waits and waited_ms == pytest.approx(exposed_ms)
    optimizer.close()


def test_a_sampled_step_waits_for_no_lane() -> None:
    """As in any step, its update runs beside what follows, and that of the step before beside it:
    only reading the timeline waits."""
    lanes, opened = ThreadLanes(), (threading.Event(), threading.Event())
    with on_lanes(lanes):
        optimizer = ot.offload(model := Chain(4), device="cpu", clip_norm=0.5)
    first, second = batches(2)
    optimizer.backward(loss_of(model, first))
    lanes.launch(Lane.HOST, "in front of the first update", opened[0].wait)
    optimizer.step()
    optimizer.sample_timeline()
    opened[0].set()
    optimizer.backward(loss_of(model, second))
    lanes.launch(Lane.HOST, "in front of the second update", opened[1].wait)
    optimizer.step()  # returns while the host lane is held
    report = optimizer.last_step
    assert report is not None and lanes.host_progress().ended < lanes.host_progress().launched
    opened[1].set()
    names = [item.name for item in report.timeline if item.lane == "host"]
    assert names.count("adam layers.0") == 2 and "in front of the first update" in names
    assert {item.lane for item in report.timeline} >= {"compute", "d2h", "host", "h2d"}
    optimizer.backward(loss_of(model, first))
    optimizer.step()
    assert optimizer.last_step is not None and optimizer.last_step.timeline == ()
    optimizer.close()
