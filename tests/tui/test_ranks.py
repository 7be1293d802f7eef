"""The ranks screen over a pipeline: stages, their bubbles, and who sets the pace; over tensor
parallel: the parts; over hybrid sharding: the groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
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
    events: list[recordings.Timed] = [(BEGIN_S, recordings.start(plan=plan))]
    logs = recordings.ranks(1, steps=30)[0]
    for time_s, event in logs:
        if isinstance(event, recordings.schema.Step):
            spent = {"step_ms": 1000.0, "exposed_ms": exposed_ms, "data_ms": 50.0}
            busy = event.busy_ms | {"compute": compute_ms}
            events.append((time_s, replace(event, **spent, busy_ms=busy)))
    return View.at(fold(lines(events, number), number))


def test_stages_are_shown_with_their_bubbles_and_the_slow_one_is_named() -> None:
    """A bubble is the time of neither compute nor own waits nor data."""
    views = [rank(0, STAGES[0], 550.0), rank(1, STAGES[1], 800.0)]
    assert bubble(views[0]) == pytest.approx(0.3)
    assert bubble(rank(0, STAGES[0], 2000.0)) == 0.0 and bubble(View.at(fold([]))) is None
    table = rank_table(views)
    assert table.columns == (*RANKS, "bubble", "stage")
    assert [row[-2:] for row in table.rows] == [("30%", STAGES[0]), ("5.0%", STAGES[1])]
    sentence = f"rank 1, {STAGES[1]}, sets the pace: bubble 5.0%, of others up to 30%"
    assert sentence in slow_stage(views)
    alike = [rank(0, "", 550.0), rank(1, "", 800.0)]
    assert rank_table(alike).columns == RANKS and slow_stage(alike) == ""


@pytest.mark.parametrize(
    ("stage", "role", "columns"),
    [
        ("", {"part": "experts 4 to 7"}, {"holds": "experts 4 to 7"}),
        ("", {"group": "group 1 of 2"}, {"group": "group 1 of 2"}),
        (STAGES[1], {"part": "part 2 of 2"}, {"stage": STAGES[1], "holds": "part 2 of 2"}),
        (STAGES[0], {"group": "group 2 of 2"}, {"stage": STAGES[0], "group": "group 2 of 2"}),
    ],
)
def test_parts_and_groups_have_columns(
    stage: str, role: dict[str, str], columns: dict[str, str]
) -> None:
    table = rank_table([rank(0, stage, 550.0, **role)])
    assert table.columns == (*RANKS, *(["bubble"] if stage else []), *columns)
    assert table.rows[0][-len(columns) :] == tuple(columns.values())
