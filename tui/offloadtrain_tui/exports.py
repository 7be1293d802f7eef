"""The numbers of a chart as CSV: this run's, and those of overlaid runs."""

from __future__ import annotations

import csv
import io
import math

from offloadtrain_tui.plots import KINDS
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean
from offloadtrain_tui.view_state import ViewState

Column = tuple[str, dict[int, float]]
"""A curve's label, and its finite values by step; the last value of a step tried twice."""


def columns(name: str, shown: ViewState) -> list[Column]:
    """Return every curve of a chart, whole; `name` is one of `KINDS`."""
    fields = [field for field, *_ in KINDS[name].fields]
    curves = [(field, _by_step(shown.newest, field)) for field in fields]
    for other in shown.other_runs:
        label = f"{fields[0]} of {clean(other.name)}"
        curves.append((label, _by_step(other.first, fields[0])))
    return curves


def as_csv(name: str, shown: ViewState) -> str:
    """Return a line per step; a value that a run does not have is empty."""
    curves = columns(name, shown)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", *(label for label, _ in curves)])
    for step in sorted({step for _, values in curves for step in values}):
        writer.writerow([step, *(values.get(step, "") for _, values in curves)])
    return out.getvalue()


def _by_step(view: View, field: str) -> dict[int, float]:
    steps, known = view.history.steps.values, view.history.series[field].known(view.length)
    return {steps[position]: value for position, value in known if math.isfinite(value)}
