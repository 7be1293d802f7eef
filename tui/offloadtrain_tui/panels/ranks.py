"""6: the ranks: lag, relative speed, pipeline stages, groups that share a copy of the state, and
parts of matrices."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from offloadtrain.config import units
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, lane_word, milliseconds, percent, short
from offloadtrain_tui.verdict import RECENT_STEPS
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.table import fill, tell

_UNEVEN = 0.01
"""Excess of a rank's own step time over their median from which it is named, as a fraction."""
RANKS = ("rank", "step", "lag", "time", "own", "skew", "waits")


class Ranks(Panel):
    """A row per rank."""

    def compose(self) -> ComposeResult:
        yield Static(id="ranks-text", markup=False)
        yield DataTable(id="ranks-rows", cursor_type="none", zebra_stripes=True)

    def display_state(self, shown: ViewState) -> None:
        views = shown.views
        text = slow_stage(views) or skew(views)
        if len(views) > 1:
            text += "\n own: the step without waiting for other ranks; skew: own against the median"
        tell(self.query_one("#ranks-text", Static), text)
        fill(self.query_one(DataTable), *rank_table(views))


def rank_table(views: Sequence[View]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns, and a row per rank. Divisions of the model add columns: stage and bubble for
    a pipeline, the group that shares the state for hybrid sharding, the part of every matrix for
    tensor parallelism, and the experts for expert parallelism."""
    heads: tuple[str, ...] = (*RANKS, lane_word("host", views[0].start), "memory", "loss")
    newest = max((view.step for view in views), default=0)
    middle = _middle(views)
    rows: list[tuple[str, ...]] = []
    for view in views:
        own_ms = view.median_own_ms()
        apart = 100 * (own_ms / middle - 1) if own_ms and middle else math.nan
        lag = newest - view.step
        tiers = ("device", "host") if view.on_cpu else ("device",)
        used_bytes = sum(row.num_bytes for row in view.memory if row.tier in tiers)
        rows.append(
            (
                str(view.history.rank),
                str(view.step),
                f"{lag} steps" if lag else "",
                milliseconds(view.median_step_ms()),
                milliseconds(own_ms),
                "-" if math.isnan(apart) else f"{round(apart, 1) + 0.0:+.1f}%",  # no "-0.0%"
                milliseconds(view.last("exposed_ms")),
                milliseconds(view.busy_ms("host")),
                units.format_bytes(used_bytes),
                short(view.last("loss")),
            )
        )
    for names, cells_of in _COLUMNS:
        added = [cells_of(view) for view in views]
        if any(cells[-1] for cells in added):
            heads += names
            rows = [(*row, *cells) for row, cells in zip(rows, added, strict=True)]
    return heads, rows


def of_plan(view: View, key: str, most: int) -> str:
    """Return the plan's description of a rank's share of the model; "" if it holds everything.

    Args:
        key: "stage", such as "stage 1 of 2 (embedding, layers 0 to 1)"; "part", such as "part 1 of
            2" of every matrix, or "experts 0 to 3", or both; "group", such as "group 1 of 2", the
            ranks that share a copy of the state.
    """
    share = view.plan.get(key)
    return clean(share, most) if isinstance(share, str) else ""


def stage_of(view: View) -> str:
    return of_plan(view, "stage", 60)


def bubble(view: View) -> float | None:
    """Return the fraction of recent steps in which the rank waited for other stages: it neither
    computed nor waited for its own lanes or data."""
    series, length = view.history.series, view.length
    recent = slice(max(length - RECENT_STEPS, 0), length)
    step_ms = math.fsum(series["step_ms"].values[recent])
    columns = (view.history.busy["compute"], series["exposed_ms"], series["data_ms"])
    own_ms = math.fsum(x for column in columns for x in column.values[recent] if math.isfinite(x))
    known = math.isfinite(step_ms) and step_ms > 0 and own_ms > 0
    return max(1.0 - own_ms / step_ms, 0.0) if known else None


def slow_stage(views: Sequence[View]) -> str:
    """Return text about the stage that other stages wait for, which has the smallest bubble."""
    known = [
        (share, view) for view in views if stage_of(view) and (share := bubble(view)) is not None
    ]
    if len(known) < 2:
        return ""
    share, view = min(known, key=lambda pair: pair[0])
    most = max(share for share, _ in known)
    slowest = f"rank {view.history.rank}, {stage_of(view)}, sets the pace: bubble {percent(share)}"
    return f" {len(views)} ranks in a pipeline; {slowest}, of others up to {percent(most)}"


_COLUMNS: tuple[tuple[tuple[str, ...], Callable[[View], tuple[str, ...]]], ...] = (
    (
        ("bubble", "stage"),
        lambda view: ("-" if (share := bubble(view)) is None else percent(share), stage_of(view)),
    ),
    (("group",), lambda view: (of_plan(view, "group", 30),)),
    (("holds",), lambda view: (of_plan(view, "part", 40),)),
)
"""Columns for divisions of the model: names, and a function that returns a rank's cells. The last
cell of every rank is "" without that division."""


def skew(views: Sequence[View]) -> str:
    """Return a line that compares the slowest rank with the median."""
    middle = _middle(views)
    if len(views) < 2 or not middle:
        return " one rank"
    slowest = max(views, key=lambda view: view.median_own_ms() or 0.0)
    over = (slowest.median_own_ms() or 0.0) / middle - 1
    slow = f"; the slowest is rank {slowest.history.rank}, {percent(over)} over"
    return f" {len(views)} ranks{slow if over >= _UNEVEN else ', even'}"


def _middle(views: Sequence[View]) -> float:
    known = [own_ms for view in views if (own_ms := view.median_own_ms()) is not None]
    return statistics.median(known) if known else 0.0
