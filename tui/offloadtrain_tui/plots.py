"""Builds charts from the view state, and exports their numbers as CSV."""

from __future__ import annotations

import csv
import io
import math
from functools import partial

from offloadtrain.config import units
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, lane_word, milliseconds
from offloadtrain_tui.view_state import ViewState, marks
from offloadtrain_tui.widgets.chart import Curve, Kind, Plot
from offloadtrain_tui.widgets.drawn import RUN_COLORS

STEADY = 0.2
"""Minimum range of an axis, as a fraction of the value, so that noise of 1 % looks flat."""


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def single_curve(field: str, color: str = "primary") -> tuple[tuple[str, str, str, bool], ...]:
    return ((field, "", color, False),)


KINDS: dict[str, Kind] = {
    "loss": Kind(
        "loss",
        (("loss", "", "primary", False), ("val_loss", "val", "warning", False)),
        log=True,
        smoothed=True,
        least_range=0.02,
    ),
    "grad_norm": Kind("gradient norm", single_curve("grad_norm", "accent"), log=True),
    "lr": Kind("learning rate", single_curve("lr"), log=True),
    "loss_scale": Kind("loss scale", single_curve("loss_scale", "warning"), log=True),
    "tokens_per_s": Kind(
        "tokens/s", single_curve("tokens_per_s", "success"), smoothed=True, least_range=STEADY
    ),
    "mfu": Kind("MFU", single_curve("mfu", "success"), form=_percent, least_range=STEADY),
    "step_ms": Kind("step time", single_curve("step_ms"), form=milliseconds, least_range=STEADY),
    "phases": Kind(
        "",
        (
            ("forward_ms", "forward", "success", False),
            ("backward_ms", "backward", "primary", False),
            ("optimizer_ms", "optimizer", "warning", False),
            ("data_ms", "data", "foreground", False),
        ),
        form=milliseconds,
        from_zero=True,
    ),
    "bus": Kind(
        "",
        (("h2d_gbps", "h2d", "primary", False), ("d2h_gbps", "d2h", "warning", True)),
        unit=" GB/s",
        form=lambda value: f"{value:.3g}",
    ),
    "bytes": Kind(
        "moved",
        (("h2d_bytes", "h2d", "primary", False), ("d2h_bytes", "d2h", "warning", True)),
        form=units.format_bytes,
    ),
    "host_ms": Kind(
        "",
        (("host_ms", "host", "foreground", False),),
        form=milliseconds,
        least_range=STEADY,
    ),
    "exposed": Kind(
        "waits, share of a step",
        single_curve("exposed_share", "warning"),
        form=_percent,
        from_zero=True,
    ),
}


def plot(name: str, shown: ViewState) -> Plot:
    """Return a chart of the steps of rank 0."""
    kind, view = KINDS[name], shown.newest
    series, word = view.history.series, partial(lane_word, start=view.start)
    curves = [
        Curve(word(label), series[field], series[field].shown(view.length), color, mirrored)
        for field, label, color, mirrored in kind.fields
    ]
    if kind.smoothed and shown.span:
        field, _, color, _ = kind.fields[0]
        curves[0] = Curve("step", series[field], view.length, "foreground")
        curves.insert(
            0, Curve("mean", view.history.smoothed(field, shown.span), view.length, color)
        )
    curves += _of_others(kind, shown)
    steps, window = view.history.steps.values, shown.window
    return Plot(
        kind,
        tuple(curves),
        window=window,
        marks=tuple(marks(view, window)),
        cursor=shown.cursor,
        log=shown.log and kind.log,
        axis=(f"step {steps[window.lo]}", f"{steps[window.hi - 1]}") if view.length else ("", ""),
    )


def _of_others(kind: Kind, shown: ViewState) -> list[Curve]:
    """Return the same series of other runs, aligned by position; averaged if this run's is."""
    field, curves = kind.fields[0][0], []
    span = shown.span if kind.smoothed else 0
    for number, other in enumerate(shown.other_runs):
        view = other.first
        color = RUN_COLORS[number % len(RUN_COLORS)]
        series = view.history.smoothed(field, span) if span else view.history.series[field]
        curves.append(Curve("mean" if span else "", series, view.length, color))
    return curves


# ---- as CSV


def as_csv(name: str, shown: ViewState) -> str:
    """Return a line per step with the values of all curves of a chart; missing values are empty."""
    fields = [field for field, *_ in KINDS[name].fields]
    curves = [(field, _by_step(shown.newest, field)) for field in fields]
    for other in shown.other_runs:
        curves.append((f"{fields[0]} of {clean(other.name)}", _by_step(other.first, fields[0])))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", *(label for label, _ in curves)])
    for step in sorted({step for _, values in curves for step in values}):
        writer.writerow([step, *(values.get(step, "") for _, values in curves)])
    return out.getvalue()


def _by_step(view: View, field: str) -> dict[int, float]:
    steps, known = view.history.steps.values, view.history.series[field].known(view.length)
    return {steps[position]: value for position, value in known if math.isfinite(value)}
