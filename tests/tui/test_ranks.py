"""The table of ranks of a divided model: stages, their bubbles, parts and groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from offloadtrain_tui.panels.ranks import RANKS, bubble, rank_table, slow_stage
from offloadtrain_tui.reading.history import fold
from offloadtrain_tui.reading.view import View

from offloadtrain.events import schema
from tests.tui.recordings import divided, lines


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
    assert columns == (*RANKS, "bubble", "stage", "group", "holds")
    stages = ("stage 1 of 2 (layers 0 to 1)", "stage 2 of 2 (layers 2 to 3)")
    assert rows[0][-4:] == ("30%", stages[0], "group 0", "part 1 of 2")
    assert rows[3][-4:] == ("5.0%", stages[1], "group 1", "part 2 of 2")
    assert f"rank 3, {stages[1]}, sets the pace: bubble 5.0%, of others up to 30%" in slow_stage(
        [first, last]
    )
