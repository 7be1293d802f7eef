"""The numbers of a chart as CSV, and the chart as SVG: this run's, and those of overlaid runs."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Iterable, Sequence

from offloadtrain_tui.history import View
from offloadtrain_tui.plots import KINDS
from offloadtrain_tui.text import clean, short
from offloadtrain_tui.view_state import ViewState

_WIDTH, _HEIGHT, _LEFT, _TOP = 800, 400, 80, 40
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of Okabe and Ito (2008), readable on white."""

Column = tuple[str, dict[int, float]]
"""A curve's label, and its finite values by step; of a step tried twice the last."""


def columns(name: str, shown: ViewState) -> list[Column]:
    """Return every curve of a chart, whole; `name` is one of `KINDS`."""
    fields = [field for field, *_ in KINDS[name].fields]
    found = [(field, _by_step(shown.newest, field)) for field in fields]
    for other in shown.others:
        label = f"{fields[0]} of {clean(other.name)}"
        found.append((label, _by_step(other.first, fields[0])))
    return found


def as_csv(name: str, shown: ViewState) -> str:
    """Return a line per step; a value that a run does not have is empty."""
    found = columns(name, shown)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["step", *(label for label, _ in found)])
    for step in sorted({step for _, values in found for step in values}):
        writer.writerow([step, *(values.get(step, "") for _, values in found)])
    return out.getvalue()


def as_svg(name: str, shown: ViewState) -> str:
    """Return the curves on white; with a logarithmic axis where the screen has one."""
    kind, found = KINDS[name], columns(name, shown)
    log = shown.log and kind.log
    curves = [(label, _scaled(values, log=log)) for label, values in found]
    points = [point for _, curve in curves for point in curve]
    lines = [_text(_LEFT, 20, f"{kind.title}{' (log)' if log else ''}", "bold")]
    if points:
        left, right = _ends(step for step, _ in points)
        low, high = _ends(value for _, value in points)
        for number, (label, curve) in enumerate(curves):
            color = _COLORS[number % len(_COLORS)]
            placed = " ".join(
                f"{_LEFT + (step - left) / (right - left) * (_WIDTH - _LEFT - 10):.1f},"
                f"{_TOP + (high - value) / (high - low) * (_HEIGHT - 2 * _TOP):.1f}"
                for step, value in curve
            )
            lines.append(f'<polyline fill="none" stroke="{color}" points="{placed}"/>')
            lines.append(_text(_LEFT + 150 + 180 * number, 20, label, color=color))
        for value, y in ((high, _TOP + 4), (low, _HEIGHT - _TOP + 4)):
            lines.append(_text(4, y, kind.form(10**value if log else value) + kind.unit))
        lines += [_text(_LEFT, _HEIGHT - 12, f"step {short(left)}")]
        lines += [_text(_WIDTH - 60, _HEIGHT - 12, short(right))]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *lines, "</svg>\n"])


def _by_step(view: View, field: str) -> dict[int, float]:
    steps, values = view.history.steps.values, view.history.series[field].values
    pairs = zip(steps[: view.length], values[: view.length], strict=False)
    return {step: value for step, value in pairs if math.isfinite(value)}


def _scaled(values: dict[int, float], *, log: bool) -> Sequence[tuple[int, float]]:
    """Return the points; a logarithm leaves out what is not positive."""
    if not log:
        return sorted(values.items())
    return [(step, math.log10(value)) for step, value in sorted(values.items()) if value > 0]


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """Return the least and the greatest, at least a little apart."""
    found = list(values)
    low, high = min(found), max(found)
    return low, high if high > low else low + max(abs(low), 1.0) * 1e-3


def _text(x: float, y: float, text: str, weight: str = "normal", color: str = "#222") -> str:
    style = f'font-family="sans-serif" font-size="13" font-weight="{weight}" fill="{color}"'
    return f'<text x="{x}" y="{y}" {style}>{html.escape(text)}</text>'
