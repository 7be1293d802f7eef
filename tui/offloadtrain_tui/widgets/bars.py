"""Memory as stacked bars (owners of a tier, cache, other programs, free memory, peak and plan), and
over time as stacked bands of owners."""

from __future__ import annotations

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from offloadtrain.config import units
from offloadtrain_tui.text import clean
from offloadtrain_tui.widgets.drawn import CACHE, EIGHTHS, OTHERS, Drawn

FREE, PEAK = "·", "┃"
_NARROW, _SHORT = 100, 30
_MORE = 4
"""Columns reserved at the end of a legend for the number of omitted owners."""


@dataclass(frozen=True, slots=True)
class Part:
    """Memory of one owner; `color` is the owner's index among all owners on the screen."""

    owner: str
    nbytes: int
    color: int = 0


@dataclass(frozen=True, slots=True)
class Tier:
    """Content of one bar; sizes are in bytes.

    Attributes:
        parts: owners, the largest first.
        total: total memory; 0 if unknown: the bar then ends with the last part.
        cache: cache of torch's allocator.
        other: memory of other programs.
        note: text after the figures.
        peak: peak of the parts; 0 if unknown.
        planned: planned memory; 0 without a plan.
    """

    title: str
    parts: tuple[Part, ...] = ()
    total: int = 0
    cache: int = 0
    other: int = 0
    note: str = ""
    peak: int = 0
    planned: int = 0

    @property
    def used(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def free(self) -> int:
        return max(self.total - self.used - self.cache - self.other, 0)


class MemoryBars(Drawn[tuple[Tier, ...]]):
    """Bars below each other: each has a line of figures, the bar, and as many owners as fit. With
    more than two bars, a GPU has one line; without room, GPUs with more free memory have none."""

    DEFAULT_CSS = "MemoryBars { height: auto; }"

    def __init__(self, *, legend: int = 2, id: str | None = None) -> None:
        """`legend`: largest number of lines of owners below a bar."""
        super().__init__((), id=id)
        self._legend = legend

    def show(self, content: tuple[Tier, ...]) -> None:
        super().show(content)
        if self.get_content_height() != self.size.height:
            self.refresh(layout=True)

    def get_content_height(self, *_: object) -> int:
        return max(len(self._lines(self.app.size.width)), 1)

    def draw(self, width: int, height: int) -> list[Strip]:
        return [self.strip(line) for line in self._lines(width)]

    def _lines(self, width: int) -> list[list[Segment]]:
        tiers = self.content
        if len(tiers) <= 2:
            return [line for tier in tiers for line in self._bar_with_legend(tier, width)]
        order = sorted(tiers[:-1], key=lambda tier: tier.free)
        chosen = order[: max(self.app.size.height // 6, 2)]
        visible = [tier for tier in tiers[:-1] if tier in chosen]
        lines = [self._in_one_line(tier, width) for tier in visible]
        if more := len(order) - len(visible):
            text = f" and {more} GPUs with more free memory"
            lines.append([Segment(text, self.style("foreground", dim=True))])
        legend = self._legend_lines(visible[0], width)
        return [*lines, *legend, *self._bar_with_legend(tiers[-1], width)]

    def _bar_with_legend(self, tier: Tier, width: int) -> list[list[Segment]]:
        bar = [Segment(" "), *self._bar(tier, width - 2)]
        return [self._title(tier), bar, *self._legend_lines(tier, width)]

    def _title(self, tier: Tier) -> list[Segment]:
        return [
            Segment(f" {tier.title}", self.style("foreground", bold=True)),
            *self._figures(tier),
            Segment(f"  {clean(tier.note)}", self.style("foreground", dim=True)),
        ]

    def _figures(self, tier: Tier) -> list[Segment]:
        plain, dim = self.style("foreground"), self.style("foreground", dim=True)
        free = f"  {_of(tier.free, tier.total, ' free')}" if tier.total else ""
        return [
            Segment(free, self._free_style(tier)),
            *(
                Segment(f"{label} {units.format_bytes(size)}", style)
                for label, size, style in (
                    ("  owners", tier.used, plain),
                    (f" {PEAK} peak", tier.peak, plain),
                    ("  plan", tier.planned, dim),
                )
                if size
            ),
        ]

    def _free_style(self, tier: Tier) -> Style:
        return self.style("warning" if tier.free < 0.05 * tier.total else "success", bold=True)

    def _in_one_line(self, tier: Tier, width: int) -> list[Segment]:
        gib = 1 << 30
        free = f"  {tier.free / gib:.1f} free of {tier.total / gib:.1f} GiB "
        figures = f" owners {tier.used / gib:.1f}"
        figures += f"  peak {tier.peak / gib:.1f}" if tier.peak else ""
        note = "" if self.app.size.width < _NARROW else f"  {clean(tier.note, 40)}"
        room = max(width - len(tier.title) - len(figures) - len(free) - len(note) - 2, 8)
        return [
            Segment(f" {tier.title}", self.style("foreground", bold=True)),
            Segment(free, self._free_style(tier)),
            *self._bar(tier, room),
            Segment(figures, self.style("foreground")),
            Segment(note, self.style("foreground", dim=True)),
        ]

    def _bar(self, tier: Tier, inner: int) -> list[Segment]:
        """Return owners, cache, other programs and free memory; the mark of the peak is drawn over
        them."""
        capacity = max(tier.total, tier.used + tier.cache + tier.other, 1)
        cells: list[tuple[str, Style]] = []
        done = 0
        for part in tier.parts:
            done += part.nbytes
            cells += [self.owner(part.color)] * (inner * done // capacity - len(cells))
        for sign, size in ((CACHE, tier.cache), (OTHERS, tier.other), (FREE, capacity)):
            done = min(done + size, capacity)
            rest = inner * done // capacity - len(cells)
            cells += [(sign, self.style("foreground", dim=True))] * rest
        if 0 < tier.peak <= capacity and cells:
            cells[min(inner * tier.peak // capacity, inner - 1)] = PEAK, self.style("error")
        return [Segment(text, style) for text, style in cells]

    def _legend_lines(self, tier: Tier, width: int) -> list[list[Segment]]:
        """Return the names in a bar with their fill characters, in as few lines as possible. If
        there are too many lines, the last one ends with the number of omitted names."""
        owned = [(*self.owner(part.color), part) for part in tier.parts]
        dim = self.style("foreground", dim=True)
        rest = ((CACHE, "allocator's cache", tier.cache), (OTHERS, "others", tier.other))
        lines: list[list[Segment]] = []
        used = width
        for sign, style, part in (
            *owned,
            *((sign, dim, Part(name, size)) for sign, name, size in rest if size),
        ):
            text = f" {clean(part.owner)} {units.format_bytes(part.nbytes)}  "
            if used + len(text) + 1 > width - _MORE:
                lines.append([])
                used = 1
            lines[-1] += [Segment(sign if lines[-1] else f" {sign}", style), Segment(text)]
            used += len(text) + 1
        most = self._legend if self.app.size.height >= _SHORT else 1
        if more := sum(map(len, lines[most:])) // 2:
            lines[most - 1].append(Segment(f" +{more}", dim))
        return lines[:most]


def _of(part: int, total: int, word: str) -> str:
    """Return part and total as text, for example "2.7 free of 32.0 GiB"."""
    (number, unit), total_text = units.format_bytes(part).split(" "), units.format_bytes(total)
    unit = "" if total_text.endswith(f" {unit}") else f" {unit}"
    return f"{number}{unit}{word} of {total_text}"


# ---- memory over time

LABEL_WIDTH = 10


@dataclass(frozen=True, slots=True)
class Area:
    """Content of a chart of stacked bands; equal contents are drawn equally.

    Attributes:
        columns: from left to right, the bytes of each band; the last two bands are the
            allocator's cache and other programs; None if unknown.
        limit: total memory in bytes; 0 if unknown.
        planned: planned bytes, drawn as a line; 0 without a plan.
        axis: labels below the left and the right end.
        base: bytes below the lowest row, which `columns` do not include.
        colors: owner indices of the bands, as in the bars; remaining owners have the next index.
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
        """Bytes at the top of the highest row: the limit, or the highest column if it is higher."""
        highest = max((sum(column) for column in self.columns if column), default=0)
        return max(self.limit, highest, 1)


class AreaChart(Drawn[Area]):
    """A widget that draws an `Area`, with colors and fills as in the bars."""

    DEFAULT_CSS = "AreaChart { height: 1fr; min-height: 4; }"

    def draw(self, width: int, height: int) -> list[Strip]:
        rows, inner = height - 2, width - LABEL_WIDTH
        if not any(self.content.columns):
            return [self.strip(self._title())]
        lines = [self._title(), *(self._row(y, rows, inner) for y in range(rows))]
        return [*map(self.strip, lines), self.axis(*self.content.axis, LABEL_WIDTH)]

    def _title(self) -> list[Segment]:
        area = self.content
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
        """Return a row of cells; each has the fill of the band at the middle of the row."""
        area, top = self.content, self.content.top
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
        columns = self.content.columns
        column = columns[x * len(columns) // inner] if columns else None
        if column is None:
            return None
        middle, height, last = (low + high) / 2, 0, 0
        for number, size in enumerate(column):
            height += size
            last = number if size else last
            if height > middle:
                return Segment(*self._band(number, len(column)))
        eighths = round(8 * (height - low) / (high - low))
        return Segment(EIGHTHS[eighths], self._band(last, len(column))[1]) if eighths > 0 else None

    def _band(self, band: int, count: int) -> tuple[str, Style]:
        """Return fill character and style of one of `count` bands."""
        if band >= count - 2:
            return (CACHE, OTHERS)[band - count + 2], self.style("foreground", dim=True)
        colors = self.content.colors
        return self.owner(colors[band] if band < len(colors) else max(colors, default=-1) + 1)
