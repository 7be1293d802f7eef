"""Seconds of a program: by hand where it is small, by what must hold where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offloadtrain.step.program.operations import (
    Event,
    HostWait,
    Kind,
    Lane,
    Launch,
    Operation,
    Record,
    Wait,
)
from offloadtrain.step.proof.simulate import Seconds, simulated, steady, timed
from tests.step.specs import chain

COSTS = {
    Kind.FORWARD: 2.0,
    Kind.BACKWARD: 4.0,
    Kind.GRAD_DOWN: 1.0,
    Kind.NORM: 1.0,
    Kind.ACCUMULATE: 1.0,
    Kind.ADAM: 3.0,
    Kind.WEIGHTS_UP: 1.0,
    Kind.LOAD: 1.0,
}


def costing(costs: Mapping[Kind, float]) -> Seconds:
    return lambda op: costs.get(op.kind, 0.0)


def launch(lane: Lane, seconds: int) -> Launch:
    """Its owner says how long it takes."""
    return Launch(Kind.ADD, lane, str(seconds))


def when(*operations: Operation) -> list[float]:
    return [end for end, _ in simulated(timed(operations), lambda op: float(op.owner))]


# ---- by hand


def test_a_lane_waits_for_what_the_event_stands_for() -> None:
    event = Event(Lane.D2H, ())
    timing = when(
        launch(Lane.D2H, 2),
        launch(Lane.D2H, 3),
        Record(event),
        launch(Lane.D2H, 10),
        launch(Lane.HOST, 1),
        Wait(Lane.HOST, event, ""),
        launch(Lane.HOST, 1),
        launch(Lane.HOST, 1),
        launch(Lane.H2D, 1),
    )
    assert timing == [2, 5, 15, 1, 6, 7, 1]


def test_nothing_is_launched_before_the_compute_in_front_of_it_is_done() -> None:
    assert when(launch(Lane.COMPUTE, 3), launch(Lane.HOST, 1), launch(Lane.COMPUTE, 2)) == [3, 4, 5]


def test_the_thread_holds_every_lane_up() -> None:
    event = Event(Lane.HOST, ())
    timing = when(
        launch(Lane.HOST, 3),
        Record(event),
        HostWait(event, ""),
        launch(Lane.H2D, 1),
        launch(Lane.COMPUTE, 1),
    )
    assert timing == [3, 4, 4]


def test_exact_with_two_blocks_hides_what_there_is_work_beside() -> None:
    """From the last norm on: down 1, Adam 4, up 5, forward 7; the other's Adam 7, up 8, forward 10;
    backward 14, norm 15; backward 19, norm 20."""
    timing = steady(chain(2), costing(COSTS))
    assert timing.seconds == 20
    assert timing.exposed == {"host": 3, "h2d": 1 + 1, "d2h": 1}


def test_delayed_is_timed_behind_its_warm_up() -> None:
    late = chain(1, "delayed", warmup_steps=100)
    assert steady(late, costing(COSTS)) == steady(chain(1, "delayed"), costing(COSTS))


def test_a_streamed_block_is_loaded_beside_the_one_before() -> None:
    """All but the first load, which waits for the first block's update as everything does."""
    keys: dict[str, Any] = {"working": "host", "device_slots": 2}
    timing = steady(chain(4, **keys), costing(COSTS | {Kind.ADAM: 0.0}))
    assert timing.exposed == {"load": 1, "d2h": 1}
    item = steady(chain(4, **keys | {"device_slots": 1}), costing(COSTS | {Kind.ADAM: 0.0}))
    assert item.exposed == {"load": 7, "d2h": 1}


# ---- what must hold
