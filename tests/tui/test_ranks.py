"""The ranks screen over a pipeline: stages, their bubbles, and who sets the pace; over tensor
parallel: the parts; over hybrid sharding: the groups."""

from __future__ import annotations

from dataclasses import replace

from offloadtrain_tui.panels.ranks import RANKS, bubble, rank_table, slow_stage
from offloadtrain_tui.reading.history import fold
from offloadtrain_tui.reading.view import View

from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, lines

STAGES = ("stage 1 of 2 (embedding, layers 0 to 1)", "stage 2 of 2 (layers 2 to 3, head)")


def rank(
    number: int, stage: str, compute_ms: float, exposed_ms: float = 100.0, **role: str
) -> View:
    """Thirty steps of a second; 50 ms of each for data."""
    plan = recordings.start().plan | ({"stage": stage} if stage else {})
    plan |= role
    told: list[recordings.Timed] = [(BEGIN_S, recordings.start(plan=plan))]
    logs = recordings.ranks(1, steps=30)[0]
    for time_s, event in logs:
        if isinstance(event, recordings.schema.Step):
            spent = {"step_ms": 1000.0, "exposed_ms": exposed_ms, "data_ms": 50.0}
            busy = event.busy_ms | {"compute": compute_ms}
            told.append((time_s, replace(event, **spent, busy_ms=busy)))
    return View.at(fold(lines(told, number), number))


def test_a_bubble_is_what_neither_compute_nor_own_waits_nor_data_take() -> None:
    view = rank(0, STAGES[0], 550.0)
    share = bubble(view)
    assert share is not None and abs(share - 0.3) < 1e-9
    assert bubble(rank(0, STAGES[0], 2000.0)) == 0.0
    assert bubble(View.at(fold([]))) is None


def test_stages_are_shown_and_the_slow_one_is_named() -> None:
    views = [rank(0, STAGES[0], 550.0), rank(1, STAGES[1], 800.0)]
    table = rank_table(views)
    assert table.columns == (*RANKS, "bubble", "stage")
    assert [row[-2:] for row in table.rows] == [("30%", STAGES[0]), ("5.0%", STAGES[1])]
    told = slow_stage(views)
    assert f"rank 1, {STAGES[1]}, sets the pace: bubble 5.0%, of others up to 30%" in told


def test_ranks_that_hold_the_whole_model_have_no_stages() -> None:
    views = [rank(0, "", 550.0), rank(1, "", 800.0)]
    assert rank_table(views).columns == RANKS and slow_stage(views) == ""


def test_parts_of_matrices_and_experts_are_shown() -> None:
    parts = ["part 1 of 2", "experts 4 to 7"]
    table = rank_table([rank(number, "", 550.0, part=part) for number, part in enumerate(parts)])
    assert table.columns == (*RANKS, "holds")
    assert [row[-1] for row in table.rows] == parts
    of_stage = rank_table([rank(3, STAGES[1], 550.0, part="part 2 of 2")])
    assert of_stage.columns == (*RANKS, "bubble", "stage", "holds")
    assert of_stage.rows[0][-2:] == (STAGES[1], "part 2 of 2")


def test_groups_that_share_a_copy_of_the_state_are_shown() -> None:
    groups = [f"group {number} of 2" for number in (1, 2)]
    found = [rank(number, "", 550.0, group=group) for number, group in enumerate(groups)]
    table = rank_table(found)
    assert table.columns == (*RANKS, "group") and [row[-1] for row in table.rows] == groups
    both = [rank(number, STAGES[0], 550.0, group=groups[number]) for number in (0, 1)]
    assert rank_table(both).columns == (*RANKS, "bubble", "stage", "group")
