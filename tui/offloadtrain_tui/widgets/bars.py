"""Memory as stacked bars: owners of a tier, cache, others and free memory, peak and plan."""

from __future__ import annotations

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from offloadtrain.config import units
from offloadtrain_tui.text import clean
from offloadtrain_tui.widgets.drawn import CACHE, FILLS, OTHERS, OWNER_COLORS, Drawn

FREE, PEAK = "·", "┃"
_NARROW, _SHORT = 100, 30
_MORE = 4
"""Columns at the end of a legend's line for how many owners it leaves out."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one owner; `color` is its number among all owners of the screen."""

    owner: str
    nbytes: int
    color: int = 0


@dataclass(frozen=True, slots=True)
class Tier:
    """One bar.

    Attributes:
        parts: the largest first.
        total: total memory; 0: unknown, the sum of the parts is used.
        cache: cache of torch's allocator.
        other: memory of other programs.
        note: text after the figures.
        peak: peak of the parts; 0: not known.
        planned: bytes of the plan; 0: none.
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
    """Bars below each other: a line of figures, the bar, and as many owners as fit; more bars than
    fit so have one line each."""

    DEFAULT_CSS = "MemoryBars { height: auto; }"

    def __init__(self, *, legend: int = 2, id: str | None = None) -> None:
        """`legend`: most lines of owners below a bar."""
        super().__init__((), id=id)
        self._legend = legend

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return self._content

    def show(self, content: tuple[Tier, ...]) -> None:
        super().show(content)
        if self.get_content_height() != self.size.height:
            self.refresh(layout=True)

    def get_content_height(self, *_: object) -> int:
        return max(len(self._lines(self.app.size.width)), 1)

    def draw(self, width: int, height: int) -> list[Strip]:
        return [self.strip(line) for line in self._lines(width)]

    def _lines(self, width: int) -> list[list[Segment]]:
        tiers = self.tiers
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
        note = "" if self.app.size.width < _NARROW else f"  {clean(tier.note)[:40]}"
        room = max(width - len(tier.title) - len(figures) - len(free) - len(note) - 2, 8)
        return [
            Segment(f" {tier.title}", self.style("foreground", bold=True)),
            Segment(free, self._free_style(tier)),
            *self._bar(tier, room),
            Segment(figures, self.style("foreground")),
            Segment(note, self.style("foreground", dim=True)),
        ]

    def _bar(self, tier: Tier, inner: int) -> list[Segment]:
        """Owners, others, free memory; the mark of the peak is drawn over them."""
        capacity = max(tier.total, tier.used + tier.cache + tier.other, 1)
        cells: list[tuple[str, Style]] = []
        done = 0
        for part in tier.parts:
            done += part.nbytes
            cells += [self._cell(part.color)] * (inner * done // capacity - len(cells))
        for sign, size in ((CACHE, tier.cache), (OTHERS, tier.other), (FREE, capacity)):
            done = min(done + size, capacity)
            rest = inner * done // capacity - len(cells)
            cells += [(sign, self.style("foreground", dim=True))] * rest
        if 0 < tier.peak <= capacity and cells:
            cells[min(inner * tier.peak // capacity, inner - 1)] = PEAK, self.style("error")
        return [Segment(text, style) for text, style in cells]

    def _cell(self, number: int) -> tuple[str, Style]:
        color = OWNER_COLORS[number % len(OWNER_COLORS)]
        return FILLS[number % len(FILLS)], self.style(color)

    def _legend_lines(self, tier: Tier, width: int) -> list[list[Segment]]:
        """Return sign and name of all that is in a bar, in as few lines as they need: of more lines
        than there is room for, the number of names that are left out."""
        owned = [(*self._cell(part.color), part) for part in tier.parts]
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
    """Return, for example, "2.7 free of 32.0 GiB"."""
    (number, unit), total_text = units.format_bytes(part).split(" "), units.format_bytes(total)
    unit = "" if total_text.endswith(f" {unit}") else f" {unit}"
    return f"{number}{unit}{word} of {total_text}"
