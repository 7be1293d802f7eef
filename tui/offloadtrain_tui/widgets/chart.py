"""A chart of curves over steps: braille through `render_line`, redrawn only on changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from offloadtrain_tui.widgets.styles import PLAIN, strip_of, styled

_GUTTER = 8
"""Least width of the labels and their line."""

_HIGH = 7
"""Lines of a chart that has a line for its marks."""

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
        least_range: the axis spans at least this share of the largest value, so that noise is flat.
        from_zero: the axis begins at zero.
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
    least_range: float = 0.0
    from_zero: bool = False

    @property
    def is_mirrored(self) -> bool:
        return any(curve.mirrored for curve in self.curves)

    def range_of(self, low: float, high: float) -> Extent:
        """Return the ends of the axis for values from `low` to `high`: noise is flat, and mirrored
        halves have one scale."""
        if self.is_mirrored:
            most = max(abs(low), abs(high))
            return -most, most
        if self.log:
            return low, high
        if self.from_zero:
            low = min(low, 0.0)
        missing = self.least_range * max(abs(low), abs(high)) - (high - low)
        if missing > 0:
            low, high = low - missing / 2, high + missing / 2
        return low, high


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
        self._base = PLAIN
        self._gutter = _GUTTER
        self._drawn: tuple[object, ...] = ()
        self._width = self._height = 0  # of what is drawn: a widget computes its size anew

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
        window, inner = self._plot.window, self.size.width - self._gutter
        column = event.x - self._gutter
        if self._pickable and window.size and 0 <= column < inner:
            last = max((curve.length for curve in self._plot.curves), default=0) - 1
            position = min(window.lo + column * window.size // inner, last)
            if position >= 0:
                self.post_message(self.Picked(position))

    def render_line(self, y: int) -> Strip:
        self._bring_up()
        return self._strips[y] if y < len(self._strips) else self._strip(())

    def on_show(self) -> None:
        """Draw every line: those that changed while the chart was hidden were not drawn then."""
        self.refresh()

    def _strip(self, segments: Iterable[Segment]) -> Strip:
        return strip_of(segments, self._width, self._base)

    def _bring_up(self) -> None:
        """Draw if necessary."""
        width, height = self.size
        key = (self._plot, width, height, self.app.theme)
        if key != self._drawn:
            self._width, self._height = width, height
            self._strips, self._drawn = self._draw(width, height), key

    def _draw(self, width: int, height: int) -> list[Strip]:
        self._colors, self._base = self.app.theme_variables, self.rich_style
        rows = height - 2 - self._has_mark_row(height)
        columns = 2 * width if self._plot.log else 1  # a logarithm leaves out what is not positive
        found = bounds([_extents(curve, self._plot, columns) for curve in self._plot.curves])
        if found is None or rows < 1 or width < 2 * _GUTTER:
            empty = self._strip([Segment(" nothing yet", self._style("foreground", dim=True))])
            return [self._strip(self._title()), *([] if found else [empty])]
        low, high = self._plot.range_of(*found)
        labels = self._labels(low, high, rows)
        self._gutter = max(_GUTTER, *(len(label) + 1 for label in labels))
        inner = width - self._gutter
        extents = [_extents(curve, self._plot, inner * 2) for curve in self._plot.curves]
        canvas = Canvas(inner, rows)
        for number in reversed(range(len(extents))):  # the first one on top
            canvas.draw(extents[number], low, high, number)
        zero = rows // 2 if self._plot.is_mirrored else None
        body = [self._row(canvas, y, labels[y], is_zero=y == zero) for y in range(rows)]
        marks = [self._mark_row(inner)] if self._has_mark_row(height) else []
        lines = [self._title(), *marks, *body, self._axis(inner)]
        return [self._strip(line) for line in lines]

    def _has_mark_row(self, height: int) -> bool:
        """A low chart has its marks in the first row of the curve."""
        return height >= _HIGH and bool(self._plot.marks)

    def _labels(self, low: float, high: float, rows: int) -> list[str]:
        """Return the text of each line: at both ends, and in the middle of a high chart."""
        labels = [""] * rows
        middle = [(rows // 2)] if rows > 4 else []
        for y in (0, *middle, rows - 1):
            value = high - (high - low) * y / max(rows - 1, 1)
            if self._plot.is_mirrored:
                value = 0.0 if y in middle else abs(value)
            labels[y] = self._plot.form(10**value if self._plot.log else value)
        return labels

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

    def _row(self, canvas: Canvas, y: int, label: str, *, is_zero: bool) -> list[Segment]:
        dim = self._style("foreground", dim=True)
        segments = [Segment(f"{label:>{self._gutter - 1}}│", dim)]
        colors = [curve.color for curve in self._plot.curves]
        for run, curve in canvas.row(y):
            if curve >= 0:
                segments.append(Segment(run, self._style(colors[curve])))
            else:
                segments.append(Segment("┈" * len(run) if is_zero else run, dim))
        on_top = y == 0 and not self._has_mark_row(self._height)
        return self._with_signs(segments, canvas.width, marks=on_top)

    def _mark_row(self, inner: int) -> list[Segment]:
        return self._with_signs([Segment(" " * (self._gutter + inner))], inner, marks=True)

    def _with_signs(self, segments: list[Segment], inner: int, *, marks: bool) -> list[Segment]:
        """Draw marks, and the cursor through all rows."""
        signs: dict[int, tuple[str, Style]] = {}
        if marks:
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
            text[self._gutter + column] = sign
        return [Segment(character, style) for character, style in text]

    def _column(self, position: int, inner: int) -> int | None:
        window = self._plot.window
        inside = window.lo <= position < window.hi
        return (position - window.lo) * inner // window.size if inside else None

    def _axis(self, inner: int) -> list[Segment]:
        left, right = self._plot.axis
        text = f"{left}{right:>{max(inner - len(left), 1)}}" if inner > 20 else right
        return [Segment(" " * self._gutter + text[:inner], self._style("foreground", dim=True))]


def _extents(curve: Curve, plot: Plot, count: int) -> list[Extent]:
    if isinstance(curve.series, Smoothed):
        curve.series.catch_up(curve.length)
    found = [
        curve.series.extent(lo, min(hi, curve.length)) for lo, hi in plot.window.columns(count)
    ]
    if curve.mirrored:
        found = [(-high, -low) if low <= high else NOTHING for low, high in found]
    return [logarithmic(extent) for extent in found] if plot.log else found
