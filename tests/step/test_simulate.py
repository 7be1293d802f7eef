"""Seconds of a program: by hand where it is small, by what must hold where it is not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.step.layout.step_spec import StepSpec
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
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.simulate import Seconds, Steady, simulated, steady, timed
from tests import levels
from tests.step.specs import Case, cases, chain, staging_of

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


def by_long_run(spec: StepSpec, seconds: Seconds) -> float:
    """Of a step among many."""
    warm = replace(spec, config=spec.config.replace(warmup_steps=0))
    program = timed(steps(Program(warm), 20))
    timing = [end for end, _ in simulated(program, seconds)]
    decided = [timing[i] for i, item in enumerate(program) if item.op.kind is Kind.DECIDE]
    return (decided[-1] - decided[7]) / 12


def drawn(seed: int) -> Seconds:
    draw = random.Random(seed)
    return costing({kind: draw.random() * draw.choice([0, 0.1, 1, 10]) for kind in Kind})


def check(timing: Steady) -> None:
    assert timing.seconds >= max(timing.busy.values()) * (1 - 1e-9)
    # Compute works, or waits for somebody who does.
    working = timing.busy["compute"] + sum(timing.exposed.values())
    assert timing.seconds == pytest.approx(working, abs=1e-9)
    for lane, exposed in timing.exposed.items():
        assert lane != "compute" and 0 <= exposed <= timing.busy[lane] * (1 + 1e-9)


@levels.examples(60)
@given(case=cases(most_blocks=3), seed=st.integers(0, 2**32))
def test_a_step_in_the_long_run(case: Case, seed: int) -> None:
    with staging_of(case.staging):
        timing = steady(case.spec, drawn(seed))
        check(timing)
        assert timing.seconds == pytest.approx(by_long_run(case.spec, drawn(seed)), abs=1e-9)


@levels.examples(30)
@given(
    mode=st.sampled_from(["exact", "early", "speculative", "delayed"]),
    blocks=st.integers(1, 5),
    accum=st.integers(1, 2),
    ranks=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
def test_more_slots_are_never_slower(
    mode: str, blocks: int, accum: int, ranks: int, seed: int
) -> None:
    keys: dict[str, Any] = {"working": "host", "zero_stage": 3, "grad_accum_steps": accum}
    timing = [
        steady(chain(blocks, mode, ranks, device_slots=slots, **keys), drawn(seed)).seconds
        for slots in (1, 2, 3, blocks + 1)
    ]
    assert all(a * (1 + 1e-9) >= b for a, b in itertools.pairwise(timing))


@levels.each("mode", ["early", "speculative", "delayed"])
def test_other_modes_are_never_slower_than_exact(mode: str) -> None:
    """Where all guesses are right."""
    for blocks in range(1, 5):
        for seed in range(3):
            exact = steady(chain(blocks), drawn(seed)).seconds
            assert steady(chain(blocks, mode), drawn(seed)).seconds <= exact * (1 + 1e-9)
