"""Memory over time: bands of owners on top of each other, and the limit as a line."""

from __future__ import annotations

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from offloadtrain.config import units
from offloadtrain_tui.widgets.drawn import CACHE, FILLS, OTHERS, OWNER_COLORS, Drawn

LABEL_WIDTH = 10
_EIGHTHS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Area:
    """The contents of a chart of bands; equal ones look the same.

    Attributes:
        columns: from left to right, the bytes of each band, the last two those of the allocator's
            cache and of others; None: not known.
        limit: total memory; 0: not known.
        planned: a line too; 0: no plan.
        axis: labels below the left and the right end.
        base: bytes below the lowest row, which are not in the columns.
        colors: numbers of the bands' owners, as in the bars; of other bands, the next ones.
    """

    title: str
    columns: tuple[tuple[int, ...] | None, ...] = ()
    limit: int = 0
    planned: int = 0
    axis: tuple[str, str] = ("", "")
    base: int = 0
    colors: tuple[int, ...] = ()

    @property
    def top(self) -> int:
        """Bytes of the highest row: the limit, or the highest column if that is more."""
        highest = max((sum(column) for column in self.columns if column), default=0)
        return max(self.limit, highest, 1)


class AreaChart(Drawn[Area]):
    """A widget that draws an `Area`; colors and fills are those of the bars."""

    DEFAULT_CSS = "AreaChart { height: 1fr; min-height: 4; }"

    def draw(self, width: int, height: int) -> list[Strip]:
        rows, inner = height - 2, width - LABEL_WIDTH
        if not any(self._content.columns):
            return [self.strip(self._title())]
        lines = [self._title(), *(self._row(y, rows, inner) for y in range(rows))]
        return [self.strip(line) for line in (*lines, self._axis(inner))]

    def _title(self) -> list[Segment]:
        area = self._content
        if not any(area.columns):
            title = area.title if ":" in area.title else f"{area.title}: no samples"
            return [Segment(f" {title}", self.style("foreground", dim=True))]
        limit = f" ─ limit {units.format_bytes(area.limit)}" if area.limit else ""
        plan = f" ┄ plan {units.format_bytes(area.planned)}" if area.planned else ""
        return [
            Segment(f" {area.title}", self.style("foreground", bold=True)),
            Segment(limit, self.style("error")),
            Segment(plan, self.style("foreground", dim=True)),
        ]

    def _row(self, y: int, rows: int, inner: int) -> list[Segment]:
        """The row between two heights; a cell has the fill of the band in its middle."""
        area, top = self._content, self._content.top
        low, high = top * (rows - 1 - y) / rows, top * (rows - y) / rows
        labelled = y in (0, rows - 1) or (rows > 5 and y == rows // 2)
        height = area.base + (high if y < rows - 1 else low)
        label = units.format_bytes(height) if labelled else ""
        segments = [Segment(f"{label:>{LABEL_WIDTH - 1}}│", self.style("foreground", dim=True))]
        empty = Segment(" ")
        if area.limit and low < area.limit <= high:
            empty = Segment("─", self.style("error"))
        elif area.planned and low < area.planned <= high:
            empty = Segment("┄", self.style("foreground", dim=True))
        for x in range(max(inner, 0)):
            segments.append(self._cell(x, inner, low, high) or empty)
        return segments

    def _cell(self, x: int, inner: int, low: float, high: float) -> Segment | None:
        columns = self._content.columns
        column = columns[x * len(columns) // inner] if columns else None
        if column is None:
            return None
        middle, height, last = (low + high) / 2, 0, 0
        for number, size in enumerate(column):
            height += size
            last = number if size else last
            if height > middle:
                count = len(column)
                fill = FILLS[self._number(number) % len(FILLS)]
                if number >= count - 2:
                    fill = (CACHE, OTHERS)[number - count + 2]
                return Segment(fill, self._color(number, count))
        eighths = round(8 * (height - low) / (high - low))
        if eighths <= 0:
            return None
        return Segment(_EIGHTHS[eighths], self._color(last, len(column)))

    def _color(self, number: int, count: int) -> Style:
        if number >= count - 2:
            return self.style("foreground", dim=True)
        return self.style(OWNER_COLORS[self._number(number) % len(OWNER_COLORS)])

    def _number(self, band: int) -> int:
        """Return the number of a band's owner."""
        colors = self._content.colors
        return colors[band] if band < len(colors) else max(colors, default=-1) + 1 + band

    def _axis(self, inner: int) -> list[Segment]:
        left, right = self._content.axis
        text = " " * LABEL_WIDTH + f"{left}{right:>{max(inner - len(left), 1)}}"
        return [Segment(text, self.style("foreground", dim=True))]
