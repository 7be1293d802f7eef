"""A chart of curves over steps, in braille: two by four dots per character, and the minimum and the
maximum of each column of dots."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rich.segment import Segment
from rich.style import Style
from textual.events import Click
from textual.message import Message
from textual.strip import Strip

from offloadtrain_tui.reading.columns import NOTHING, Extent, Outline, Series, Smoothed, Window
from offloadtrain_tui.text import short
from offloadtrain_tui.widgets.drawn import Drawn

_GUTTER = 8
"""Minimum width of the labels and the axis."""

_HIGH = 7
"""Minimum height of a chart with a separate line for its marks."""

NO_WINDOW = Window(0, 0)

Signs = tuple[tuple[int, tuple[str, Style]], ...]
"""(column, (character, its style)) of characters that are drawn over the curves."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a chart.

    Attributes:
        length: number of values of the series so far.
        color: name of a color variable of the theme.
        mirrored: True if the curve is drawn below zero.
    """

    label: str
    series: Series
    length: int
    color: str = "primary"
    mirrored: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """Description of a chart, for any run.

    Attributes:
        fields: (series, label or lane, color, mirrored) of each curve.
        log: True if `y` makes the axis logarithmic.
        smoothed: True if a moving average is drawn over the first curve.
        least_range: minimum range of the axis as a fraction of the largest value, so that noise
            looks flat.
        from_zero: True if the axis begins at zero.
    """

    title: str
    fields: tuple[tuple[str, str, str, bool], ...] = ()
    unit: str = ""
    log: bool = False
    smoothed: bool = False
    form: Callable[[float], str] = short
    least_range: float = 0.0
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """Content of a chart; equal contents are drawn equally.

    Attributes:
        window: displayed positions of the first curve.
        marks: (position, sign, color) of checkpoints, resumes and skipped steps.
        cursor: position that is selected in all charts.
        axis: labels below the left and the right end.
        log: True if the axis is logarithmic.
    """

    kind: Kind
    curves: tuple[Curve, ...] = ()
    window: Window = NO_WINDOW
    marks: tuple[tuple[int, str, str], ...] = ()
    cursor: int | None = None
    log: bool = False
    axis: tuple[str, str] = ("", "")

    @property
    def is_mirrored(self) -> bool:
        return any(curve.mirrored for curve in self.curves)

    def range_of(self, low: float, high: float) -> Extent:
        """Return the ends of the axis for values from `low` to `high`. The range is large enough
        for noise to look flat, and symmetric if curves are mirrored."""
        if self.is_mirrored:
            high = max(abs(low), abs(high))
            low = -high
        elif self.kind.from_zero:
            low = min(low, 0.0)
        share = self.kind.least_range if not self.log else 0.0
        least = share * max(abs(low), abs(high)) or (high == low) * (0.1 * abs(high) or 1.0)
        missing = max(least - (high - low), 0.0)
        return low - missing / 2, high + missing / 2


class Chart(Drawn[Plot]):
    """A widget that draws a `Plot`."""

    @dataclass
    class Picked(Message):
        """A position of the chart was clicked."""

        position: int

    DEFAULT_CSS = "Chart { height: 1fr; min-height: 4; }"

    def __init__(self, plot: Plot, *, id: str | None = None, pickable: bool = True) -> None:
        """`pickable`: True if positions are steps, which can be selected."""
        super().__init__(plot, id=id)
        self._pickable = pickable
        self._gutter = _GUTTER
        self._outlines: dict[tuple[str, int], Outline] = {}

    def on_click(self, event: Click) -> None:
        window, inner = self.content.window, self.size.width - self._gutter
        column = event.x - self._gutter
        if self._pickable and window.size and 0 <= column < inner:
            last = max((curve.length for curve in self.content.curves), default=0) - 1
            position = min(window.lo + column * window.size // inner, last)
            if position >= 0:
                self.post_message(self.Picked(position))

    def draw(self, width: int, height: int) -> list[Strip]:
        rows = height - 2 - self._has_mark_row(height)
        columns = (
            2 * width if self.content.log else 1
        )  # a logarithm leaves out what is not positive
        extent = bounds(self._extents("range", columns))
        if extent is None or rows < 1 or width < 2 * _GUTTER:
            empty = self.strip([Segment(" nothing yet", self.style("foreground", dim=True))])
            return [self.strip(self._title()), *([] if extent else [empty])]
        low, high = self.content.range_of(*extent)
        labels = self._labels(low, high, rows)
        self._gutter = max(_GUTTER, *(len(label) + 1 for label in labels))
        inner = width - self._gutter
        blank = Segment(" " * (self._gutter + inner))
        marks = self.strip(self._with_signs([blank], self._signs(inner, marks=True)))
        top = [marks] if self._has_mark_row(height) else []
        extents = self._extents("curves", 2 * inner)
        canvas = Canvas(inner, rows)
        for number in reversed(range(len(extents))):  # the first curve is on top
            canvas.draw(extents[number], low, high, number)
        body = self._body(canvas, labels)
        return [self.strip(self._title()), *top, *body, self.axis(*self.content.axis, self._gutter)]

    def _extents(self, what: str, columns: int) -> list[list[Extent]]:
        """Return the extents of each curve in `columns` columns; `what` is the key of cached
        outlines."""
        extents = []
        for number, curve in enumerate(self.content.curves):
            outline = self._outlines.setdefault((what, number), Outline())
            extents.append(_extents(curve, self.content, outline, columns))
        return extents

    def _has_mark_row(self, height: int) -> bool:
        """Return False for a low chart, which draws its marks over the first row of curves."""
        return height >= _HIGH and bool(self.content.marks)

    def _labels(self, low: float, high: float, rows: int) -> list[str]:
        """Return the label of each row: at both ends, and in the middle of a high chart."""
        labels = [""] * rows
        middle = [(rows // 2)] if rows > 4 else []
        for y in (0, *middle, rows - 1):
            share = y / max(rows - 1, 1)
            value = high * (1 - share) + low * share  # exact at both ends: no "-7e-16 %"
            if self.content.is_mirrored:
                value = 0.0 if y in middle else abs(value)
            labels[y] = self.content.kind.form(10**value if self.content.log else value)
        return labels

    def _title(self) -> list[Segment]:
        plot = self.content
        title = f" {plot.kind.title}" if plot.kind.title else ""
        segments = [Segment(title, self.style("foreground", bold=True))]
        at = plot.window.hi if plot.cursor is None else plot.cursor + 1
        for curve in plot.curves:
            value = curve.series.last(min(at, curve.length))
            label = f" {curve.label}" if curve.label else ""
            figure = "-" if value is None else f"{plot.kind.form(value)}{plot.kind.unit}"
            style = self.style(curve.color, bold=not title)
            segments.append(Segment(f"{label} {figure}", style))
        if plot.log:
            segments.append(Segment(" log", self.style("foreground", dim=True)))
        # Omit figures that do not fit, first the title if the labels of curves explain the chart.
        length = Segment.get_line_length
        if length(segments) > self._width and len(plot.kind.fields) > 1 and not plot.kind.smoothed:
            del segments[0]
        while length(segments) > self._width and len(segments) > 1:
            segments.pop()
        return segments

    def _body(self, canvas: Canvas, labels: Sequence[str]) -> list[Strip]:
        zero = canvas.height // 2 if self.content.is_mirrored else None
        colors = tuple(curve.color for curve in self.content.curves)
        inner, has_mark_row = canvas.width, self._has_mark_row(self._height)
        signs = self._signs(inner, marks=False)
        rows = []
        for y, label in enumerate(labels):
            is_marked = y == 0 < len(labels) - 1 and not has_mark_row
            over = self._signs(inner, marks=True) if is_marked else signs
            axis = f"{label:>{self._gutter - 1}}│"
            rows.append(self.strip(self._row(canvas, y, axis, colors, over, is_zero=y == zero)))
        return rows

    def _row(
        self,
        canvas: Canvas,
        y: int,
        axis: str,
        colors: Sequence[str],
        signs: Signs,
        *,
        is_zero: bool,
    ) -> list[Segment]:
        dim = self.style("foreground", dim=True)
        segments = [Segment(axis, dim)]
        for run, curve in canvas.row(y):
            if curve is not None:
                segments.append(Segment(run, self.style(colors[curve])))
            else:
                segments.append(Segment("┈" * len(run) if is_zero else run, dim))
        return self._with_signs(segments, signs)

    def _signs(self, inner: int, *, marks: bool) -> Signs:
        """Return the signs drawn over a row: marks, and the cursor, which crosses all rows."""
        signs: dict[int, tuple[str, Style]] = {}
        for position, sign, color in self.content.marks if marks else ():
            if (column := self._column(position, inner)) is not None:
                signs[column] = (sign, self.style(color, bold=True))
        if self.content.cursor is not None:
            column = self._column(self.content.cursor, inner)
            if column is not None:
                signs.setdefault(column, ("│", self.style("accent")))
        return tuple(signs.items())

    def _with_signs(self, segments: list[Segment], signs: Signs) -> list[Segment]:
        if not signs:
            return segments
        text = [(character, segment.style) for segment in segments for character in segment.text]
        for column, sign in signs:
            text[self._gutter + column] = sign
        return [Segment(character, style) for character, style in text]

    def _column(self, position: int, inner: int) -> int | None:
        window = self.content.window
        inside = window.lo <= position < window.hi
        return (position - window.lo) * inner // window.size if inside else None


def _extents(curve: Curve, plot: Plot, outline: Outline, count: int) -> list[Extent]:
    if isinstance(curve.series, Smoothed):
        curve.series.catch_up(curve.length)
    extents = outline.of(curve.series, curve.length, plot.window, count)
    if curve.mirrored:
        extents = [(-high, -low) if low <= high else NOTHING for low, high in extents]
    return [logarithmic(extent) for extent in extents] if plot.log else extents


# ---- braille

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the dots in a braille character, by column and row."""

_BARS = tuple(
    tuple(tuple(sum(side[first : last + 1]) for last in range(4)) for first in range(4))
    for side in _DOTS
)
"""Bits of the dots in a column from row `first` to row `last`, as `_BARS[column][first][last]`."""

_NO_CURVE = 255

_SIGNS = [" ", *(chr(0x2800 + dots) for dots in range(1, 256))]


class Canvas:
    """`width` by `height` characters. Each stores its dots and the number of the last curve drawn
    there."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._dots = [bytearray(width) for _ in range(height)]
        self._curve = [bytearray([_NO_CURVE] * width) for _ in range(height)]

    def draw(self, extents: Sequence[Extent], low: float, high: float, curve: int) -> None:
        """Draw a curve, given one extent per column of dots (2 * width); neighbors are connected.

        `low` is the value of the lowest row of dots, `high` that of the highest; they must differ.
        """
        lowest = self.height * 4 - 1
        scale = lowest / (high - low)
        last: tuple[int, int] | None = None
        for column, (least, greatest) in enumerate(extents[: self.width * 2]):
            if least > greatest:
                last = None
                continue
            top = lowest - _row(greatest, low, scale, lowest)
            bottom = lowest - _row(least, low, scale, lowest)
            if last is None:
                self._column(column, top, bottom, curve)
            else:  # extend to the end of the last column
                first = min(top, last[1] + 1)
                self._column(column, first, max(bottom, last[0] - 1), curve)
            last = (top, bottom)

    def _column(self, column: int, top: int, bottom: int, curve: int) -> None:
        x, bars = column >> 1, _BARS[column & 1]
        first, last = top >> 2, bottom >> 2
        for y in range(first, last + 1):
            begin = top & 3 if y == first else 0
            end = bottom & 3 if y == last else 3
            self._dots[y][x] |= bars[begin][end]
            self._curve[y][x] = curve

    def row(self, y: int) -> list[tuple[str, int | None]]:
        """Return runs of characters of one curve: (text, curve), with None for undrawn
        characters."""
        cells = zip(self._curve[y], self._dots[y], strict=True)
        return [
            ("".join(_SIGNS[dots] for _, dots in run), None if curve == _NO_CURVE else curve)
            for curve, run in groupby(cells, key=itemgetter(0))
        ]


_HALF = 0.5 + 1e-9
"""Rounding offset: a value halfway between two rows, up to rounding errors, is in the upper one."""


def _row(value: float, low: float, scale: float, highest: int) -> int:
    """Return the row of dots of a value, counted from the bottom."""
    row = int((value - low) * scale + _HALF)
    return 0 if row < 0 else highest if row > highest else row


def logarithmic(extent: Extent) -> Extent:
    """Return the logarithms of the positive part of an extent."""
    low, high = extent
    if high <= 0:
        return NOTHING
    return math.log10(low) if low > 0 else math.log10(high), math.log10(high)


def bounds(extents: Sequence[Sequence[Extent]]) -> Extent | None:
    """Return minimum and maximum of several curves; None if nothing can be drawn."""
    known = [extent for curve in extents for extent in curve if extent != NOTHING]
    if not known:
        return None
    return min(low for low, _ in known), max(high for _, high in known)
