"""The answers of the first screen: what bounds a step, the plan, the end; and axes to judge by."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from offloadtrain_tui.panels.ranks import RANKS, bubble, rank_table, slow_stage
from offloadtrain_tui.reading.columns import Series
from offloadtrain_tui.reading.history import fold
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.verdict import against_plan, bound_by, is_calm, right_guesses, time_left_s
from offloadtrain_tui.widgets.chart import Curve, Kind, Plot

from offloadtrain.events import schema
from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, divided, lines


def view_of(*extra: schema.Event, planned_s: float = 1.0, **changed: object) -> View:
    """Thirty steps of about a second, with these fields."""
    draw = random.Random(0)
    plan = recordings.start().plan | {"step": {"seconds": planned_s}}
    events: list[recordings.Timed] = [(BEGIN_S, recordings.start(plan=plan))]
    for number in range(1, 31):
        step = replace(recordings.step(number, draw), step_ms=1000.0, **changed)  # type: ignore[arg-type]
        events.append((BEGIN_S + number, step))
    return View.at(fold(lines([*events, *((BEGIN_S + 30, event) for event in extra)])))


def guessing(guesses: list[bool | None]) -> View:
    """Steps of mode "speculative", with whether the guess of each was right."""
    draw, events = random.Random(0), [(BEGIN_S, recordings.start())]
    for number, hit in enumerate(guesses, 1):
        events.append(
            (BEGIN_S + number, replace(recordings.step(number, draw), speculation_hit=hit))
        )
    return View.at(fold(lines(events)))


def wait(lane: str, spent_ms: float) -> schema.LaneSpan:
    return schema.LaneSpan(step=30, lane=schema.WAIT, name=lane, start_ms=0.0, duration_ms=spent_ms)


def test_a_step_is_compared_with_its_bound_and_its_plan() -> None:
    busy = {"compute": 970.0, "host": 300.0, "d2h": 200.0}
    compute = view_of(busy_ms=busy, exposed_ms=4.0, data_ms=0.0)
    assert bound_by(compute) == "bound by COMPUTE 97%, waits 0.4% (CPU Adam)"
    copies = view_of(
        wait("d2h", 600.0), wait("host", 100.0), busy_ms={"compute": 300.0}, exposed_ms=700.0
    )
    assert bound_by(copies) == "bound by GPU→CPU 60%: compute waits, and works 30%"
    assert bound_by(view_of(busy_ms={}, exposed_ms=0.0)) == ""
    lion = recordings.start(plan={"update_rule": "Lion"})
    slow = view_of(replace(lion), busy_ms={"compute": 200.0, "host": 700.0}, exposed_ms=700.0)
    assert bound_by(slow).startswith("bound by CPU LION 70%")
    assert against_plan(view_of(planned_s=1.01)) == "101% of plan"
    assert against_plan(view_of(planned_s=0.01)) == "100x slower than plan"


def test_the_share_of_right_guesses_is_that_of_the_last_steps() -> None:
    guesses = [None] * 12 + [False] * 3 + [True, False, None] * 5
    assert right_guesses(guessing(guesses)) == pytest.approx(5 / 13)
    assert right_guesses(guessing([None] * 30)) is None


def test_a_slow_run_on_a_busy_or_unmeasured_host_is_no_defect() -> None:
    """Two ranks use 30 % of two CPUs and other programs 60 %, or hardly any."""
    sample = replace(recordings.system(random.Random(0)), cpu_percent=30.0, host_cpus=2)
    busy, quiet = (replace(sample, host_cpu_percent=percent) for percent in (180.0, 70.0))
    unmeasured = {"device": "cpu", "machine": "this machine (rates of cpu2 per core)"}
    cases = [
        ({}, 0.05, busy, "20x slower than plan, other programs use 60% of the CPU"),
        ({}, 0.05, quiet, "20x slower than plan"),
        ({}, 0.9, busy, "90% of plan"),
        (unmeasured, 0.05, busy, "other programs use 60% of the CPU"),
        (unmeasured, 0.05, quiet, ""),
        (unmeasured | {"machine": "mine.toml"}, 0.05, quiet, "20x slower than plan"),
    ]
    for changed, planned_s, system, words in cases:
        plan = recordings.start().plan | {"step": {"seconds": planned_s}} | changed
        start = recordings.start(plan=plan, world_size=2)
        assert against_plan(view_of(start, system)) == words


def test_waits_and_norms_that_change_get_the_room_of_memory() -> None:
    busy = {"compute": 970.0, "host": 300.0}
    calm = view_of(busy_ms=busy, exposed_ms=4.0, data_ms=0.0)
    assert is_calm(calm)
    assert not is_calm(view_of(busy_ms=busy, exposed_ms=100.0, data_ms=0.0)), "it waits"
    for norm in (100.0, math.nan):
        step = replace(recordings.step(31, random.Random(0)), grad_norm=norm, busy_ms=busy)
        assert not is_calm(view_of(step, busy_ms=busy, exposed_ms=4.0, data_ms=0.0))


def test_a_time_limit_ends_before_the_last_step() -> None:
    """After 30 s of steps of 1 s, of a run of 300 steps and 45 s."""
    start = recordings.start(config={"train": {"steps": 300, "max_s": 45.0}})
    view = View.at(
        fold(
            lines(
                [(BEGIN_S, start)]
                + [
                    (BEGIN_S + n, replace(recordings.step(n, random.Random(0)), step_ms=1000.0))
                    for n in range(1, 31)
                ]
            )
        )
    )
    assert time_left_s(view) == pytest.approx(15.0)


def test_the_end_counts_evaluations_and_checkpoints() -> None:
    """Steps of a second, of which one was slow; after every tenth 5 s of evaluation and 3 s of
    saving."""
    config = {"train": {"steps": 50, "eval_every": 10, "checkpoint_every": 10}}
    events: list[recordings.Timed] = [(BEGIN_S, recordings.start(config=config))]
    now_s = BEGIN_S
    for number in range(1, 26):
        step = replace(recordings.step(number, random.Random(0)), step_ms=1000.0)
        now_s += 1.0
        events.append((now_s, replace(step, step_ms=1e6) if number == 15 else step))
        if number % 10 == 0:
            now_s += 5.0
            events.append((now_s, schema.Eval(step=number, val_loss=2.0, duration_ms=5000.0)))
            now_s += 3.0
    assert time_left_s(View.at(fold(lines(events)))) == pytest.approx(25.0 + 3 * 8.0)


def test_noise_is_flat_on_an_axis_and_mirrored_curves_have_a_zero() -> None:
    steady = Plot(Kind("tokens/s", least_range=0.2))
    low, high = steady.range_of(99.0, 101.0)
    assert (101.0 - 99.0) / (high - low) < 0.12 and low < 99.0 < 101.0 < high
    assert steady.range_of(50.0, 101.0) == (50.0, 101.0), "no noise"
    assert Plot(Kind("waits", from_zero=True)).range_of(0.03, 0.05) == (0.0, 0.05)
    both = Plot(Kind("bus"), curves=(Curve("down", Series(), 0, mirrored=True),))
    assert both.range_of(-11.0, 7.0) == (-11.0, 11.0)
    assert Plot(Kind("busy", from_zero=True)).range_of(97.0, 97.0) == (0.0, 97.0), "no 102 %"
    low, high = Plot(Kind("heat")).range_of(61.0, 61.0)
    assert low < 61.0 < high, "a level curve is in the middle"
    assert Plot(Kind("lr")).range_of(0.0, 0.0) == (-0.5, 0.5)


# ---- the table of ranks of a divided model: stages, their bubbles, parts and groups


def views(*compute_ms: float) -> list[View]:
    """Thirty steps of a second: 50 ms for data, 100 ms of waits, and this compute of each rank."""
    views_of: list[View] = []
    for rank, (spent_ms, log) in enumerate(zip(compute_ms, divided(), strict=False)):
        times = {"step_ms": 1000.0, "exposed_ms": 100.0, "data_ms": 50.0}
        changed = [
            (at_s, replace(event, **times, busy_ms=event.busy_ms | {"compute": spent_ms}))
            if isinstance(event, schema.Step)
            else (at_s, event)
            for at_s, event in log
        ]
        views_of.append(View.at(fold(lines(changed, rank), rank)))
    return views_of


def test_stages_parts_and_groups_are_columns_and_the_slow_stage_is_named() -> None:
    """A bubble is the time of neither compute nor own waits nor data."""
    first, *_, last = ranks = views(550.0, 550.0, 550.0, 800.0)
    assert bubble(first) == pytest.approx(0.3)
    assert bubble(views(2000.0)[0]) == 0.0 and bubble(View.at(fold([]))) is None
    columns, rows = rank_table(ranks)
    assert columns == (*RANKS, "CPU Adam", "memory", "loss", "bubble", "stage", "group", "holds")
    stages = ("stage 1 of 2 (layers 0 to 1)", "stage 2 of 2 (layers 2 to 3)")
    assert rows[0][-4:] == ("30%", stages[0], "group 0", "part 1 of 2")
    assert rows[3][-4:] == ("5.0%", stages[1], "group 1", "part 2 of 2")
    assert f"rank 3, {stages[1]}, sets the pace: bubble 5.0%, of others up to 30%" in slow_stage(
        [first, last]
    )
