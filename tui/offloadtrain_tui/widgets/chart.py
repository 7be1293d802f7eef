"""A chart of curves over steps: braille through `render_line`, redrawn only on changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.events import Click
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from offloadtrain_tui.braille import Canvas, bounds, logarithmic
from offloadtrain_tui.series import NOTHING, Extent, Series, Smoothed, Window
from offloadtrain_tui.text import short
from offloadtrain_tui.widgets.styles import strip_of, styled

LABEL_WIDTH = 8
NO_WINDOW = Window(0, 0)


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart.

    Attributes:
        length: number of values of the series so far.
        color: a variable of the theme.
        mirrored: drawn below zero.
    """

    label: str
    series: Series
    length: int
    color: str = "primary"
    mirrored: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark at a position: a checkpoint, a resume, a skipped step."""

    position: int
    sign: str
    color: str


@dataclass(frozen=True, slots=True)
class Plot:
    """The contents of a chart; equal plots look the same.

    Attributes:
        window: displayed positions of the first curve.
        cursor: the position selected in all charts.
        axis: labels below the left and the right end.
    """

    title: str
    curves: tuple[Curve, ...] = ()
    window: Window = NO_WINDOW
    marks: tuple[Mark, ...] = ()
    cursor: int | None = None
    log: bool = False
    unit: str = ""
    axis: tuple[str, str] = ("", "")
    form: Callable[[float | None], str] = short


class Chart(Widget):
    """A widget that draws a `Plot`."""

    class Picked(Message):
        """A position of the plot was clicked."""

        def __init__(self, position: int) -> None:
            super().__init__()
            self.position = position

    DEFAULT_CSS = "Chart { height: 1fr; min-height: 4; }"

    def __init__(self, plot: Plot, *, id: str | None = None, pickable: bool = True) -> None:
        """`pickable`: positions are steps, which can be selected."""
        super().__init__(id=id)
        self._pickable = pickable
        self._plot = plot
        self._strips: list[Strip] = []
        self._colors: dict[str, str] = {}
        self._drawn: tuple[object, ...] = ()

    @property
    def plot(self) -> Plot:
        return self._plot

    def show(self, plot: Plot) -> None:
        """Redraw if the plot has changed; only changed lines go to the terminal."""
        if plot == self._plot:
            return
        self._plot = plot
        before = self._strips
        self._bring_up()
        width = self.size.width
        lines = [
            Region(0, y, width, 1)
            for y, strip in enumerate(self._strips)
            if y >= len(before) or strip != before[y]
        ]
        if lines:
            self.refresh(*lines)

    def on_click(self, event: Click) -> None:
        window, inner = self._plot.window, self.size.width - LABEL_WIDTH
        column = event.x - LABEL_WIDTH
        if self._pickable and window.size and 0 <= column < inner:
            last = max((curve.length for curve in self._plot.curves), default=0) - 1
            position = min(window.lo + column * window.size // inner, last)
            if position >= 0:
                self.post_message(self.Picked(position))

    def render_line(self, y: int) -> Strip:
        self._bring_up()
        return self._strips[y] if y < len(self._strips) else strip_of((), self.size.width)

    def _bring_up(self) -> None:
        """Draw if necessary."""
        width, height = self.size
        key = (id(self._plot), width, height, self.app.theme)
        if key != self._drawn:
            self._strips, self._drawn = self._draw(width, height), key

    def _draw(self, width: int, height: int) -> list[Strip]:
        self._colors = self.app.theme_variables
        inner, rows = width - LABEL_WIDTH, height - 2
        if inner < 8 or rows < 1:
            return [strip_of([Segment(self._plot.title[:width])], width)]
        extents = [_extents(curve, self._plot, inner * 2) for curve in self._plot.curves]
        low, high = bounds(extents)
        canvas = Canvas(inner, rows)
        for number in reversed(range(len(extents))):  # the first one on top
            canvas.draw(extents[number], low, high, number)
        body = [strip_of(self._row(canvas, y, rows, low, high), width) for y in range(rows)]
        title = strip_of(self._title(), width)
        return [title, *body, strip_of(self._axis(inner), width)]

    def _style(self, color: str, *, bold: bool = False, dim: bool = False) -> Style:
        return styled(self._colors.get(color, ""), bold, dim)

    def _title(self) -> list[Segment]:
        plot = self._plot
        found = [Segment(f" {plot.title}", self._style("foreground", bold=True))]
        at = plot.window.hi if plot.cursor is None else plot.cursor + 1
        for curve in plot.curves:
            value = curve.series.last(min(at, curve.length))
            label = f" {curve.label}" if curve.label else ""
            found.append(
                Segment(f"{label} {plot.form(value)}{plot.unit}", self._style(curve.color))
            )
        if plot.log:
            found.append(Segment(" log", self._style("foreground", dim=True)))
        return found

    def _row(self, canvas: Canvas, y: int, rows: int, low: float, high: float) -> list[Segment]:
        value = high - (high - low) * y / max(rows - 1, 1)
        labelled = y in (0, rows - 1) or (rows > 4 and y == rows // 2)
        shown = 10**value if self._plot.log else value
        if any(curve.mirrored for curve in self._plot.curves):
            shown = abs(shown)
        text = self._plot.form(shown) if labelled else ""
        label = f"{text[: LABEL_WIDTH - 1]:>{LABEL_WIDTH - 1}}│"
        segments = [Segment(label, self._style("foreground", dim=True))]
        colors = [curve.color for curve in self._plot.curves]
        for run, curve in canvas.row(y):
            segments.append(Segment(run, self._style(colors[curve]) if curve >= 0 else None))
        return self._with_signs(segments, y, canvas.width)

    def _with_signs(self, segments: list[Segment], y: int, inner: int) -> list[Segment]:
        """Draw marks in the top row, and the cursor through all rows."""
        signs: dict[int, tuple[str, Style]] = {}
        if y == 0:
            for mark in self._plot.marks:
                if (column := self._column(mark.position, inner)) is not None:
                    signs[column] = (mark.sign, self._style(mark.color, bold=True))
        if self._plot.cursor is not None:
            column = self._column(self._plot.cursor, inner)
            if column is not None:
                signs.setdefault(column, ("│", self._style("accent")))
        if not signs:
            return segments
        text = [(character, segment.style) for segment in segments for character in segment.text]
        for column, sign in signs.items():
            text[LABEL_WIDTH + column] = sign
        return [Segment(character, style) for character, style in text]

    def _column(self, position: int, inner: int) -> int | None:
        window = self._plot.window
        inside = window.lo <= position < window.hi
        return (position - window.lo) * inner // window.size if inside else None

    def _axis(self, inner: int) -> list[Segment]:
        left, right = self._plot.axis
        text = f"{left}{right:>{max(inner - len(left), 1)}}" if inner > 20 else right
        return [Segment(" " * LABEL_WIDTH + text[:inner], self._style("foreground", dim=True))]


def _extents(curve: Curve, plot: Plot, count: int) -> list[Extent]:
    if isinstance(curve.series, Smoothed):
        curve.series.catch_up(curve.length)
    found = [
        curve.series.extent(lo, min(hi, curve.length)) for lo, hi in plot.window.columns(count)
    ]
    if curve.mirrored:
        found = [(-high, -low) if low <= high else NOTHING for low, high in found]
    return [logarithmic(extent) for extent in found] if plot.log else found
