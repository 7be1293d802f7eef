"""The numbers of a chart as CSV, and the chart as SVG or PNG: this run's, and those of overlaid
runs."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from offloadtrain_tui.plots import KINDS
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, short
from offloadtrain_tui.view_state import ViewState

_WIDTH, _HEIGHT, _LEFT, _TOP = 800, 400, 80, 40
_SCALE, _FONT, _INK = 2, 13, "#222"
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colors of Okabe and Ito (2008), readable on white."""

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


@dataclass(frozen=True, slots=True)
class Label:
    """Text whose left end of the baseline is at a point."""

    x: float
    y: float
    text: str
    bold: bool = False
    color: str = _INK


@dataclass(frozen=True, slots=True)
class Line:
    """A curve through points of the picture."""

    points: tuple[tuple[float, float], ...]
    color: str


def drawing(name: str, shown: ViewState) -> Iterator[Label | Line]:
    """Yield the curves and the labels of a chart; with a logarithmic axis where the screen has
    one."""
    kind, unscaled = KINDS[name], columns(name, shown)
    log = shown.log and kind.log
    curves = [(label, _scaled(values, log=log)) for label, values in unscaled]
    points = [point for _, curve in curves for point in curve]
    yield Label(_LEFT, 20, f"{kind.title}{' (log)' if log else ''}", bold=True)
    if not points:
        return
    left, right = _ends(step for step, _ in points)
    low, high = _ends(value for _, value in points)
    for number, (label, curve) in enumerate(curves):
        color = _COLORS[number % len(_COLORS)]
        placed = (
            (
                _LEFT + (step - left) / (right - left) * (_WIDTH - _LEFT - 10),
                _TOP + (high - value) / (high - low) * (_HEIGHT - 2 * _TOP),
            )
            for step, value in curve
        )
        yield Line(tuple(placed), color)
        yield Label(_LEFT + 150 + 180 * number, 20, label, color=color)
    for value, y in ((high, _TOP + 4), (low, _HEIGHT - _TOP + 4)):
        yield Label(4, y, kind.form(10**value if log else value) + kind.unit)
    yield Label(_LEFT, _HEIGHT - 12, f"step {short(left)}")
    yield Label(_WIDTH - 60, _HEIGHT - 12, short(right))


def as_svg(name: str, shown: ViewState) -> str:
    """Return the chart on white."""
    lines = [_svg(part) for part in drawing(name, shown)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *lines, "</svg>\n"])


def _svg(part: Label | Line) -> str:
    if isinstance(part, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in part.points)
        return f'<polyline fill="none" stroke="{part.color}" points="{points}"/>'
    weight = "bold" if part.bold else "normal"
    style = f'font-family="sans-serif" font-size="{_FONT}" font-weight="{weight}"'
    place = f'x="{part.x}" y="{part.y}" fill="{part.color}"'
    return f"<text {place} {style}>{html.escape(part.text)}</text>"


def as_png(name: str, shown: ViewState) -> bytes:
    """Return the chart on white, with two pixels for each of the SVG's.

    Raises:
        ImportError: Pillow is not installed.
    """
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (_SCALE * _WIDTH, _SCALE * _HEIGHT), "#fff")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_SCALE * _FONT)
    for part in drawing(name, shown):
        if isinstance(part, Line):
            points = [(_SCALE * x, _SCALE * y) for x, y in part.points]
            draw.line(points, part.color, width=_SCALE, joint="curve")
        else:
            place, stroke = (_SCALE * part.x, _SCALE * part.y), int(part.bold)
            draw.text(place, part.text, part.color, font, "ls", stroke_width=stroke)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _by_step(view: View, field: str) -> dict[int, float]:
    steps, known = view.history.steps.values, view.history.series[field].known(view.length)
    return {steps[position]: value for position, value in known if math.isfinite(value)}


def _scaled(values: dict[int, float], *, log: bool) -> Sequence[tuple[int, float]]:
    """Return the points; a logarithm leaves out what is not positive."""
    if not log:
        return sorted(values.items())
    return [(step, math.log10(value)) for step, value in sorted(values.items()) if value > 0]


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """Return the least and the greatest, at least a little apart."""
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    return low, high if high > low else low + max(abs(low), 1.0) * 1e-3
