"""Memory as stacked bars: owners of a tier, cache, others and free memory, peak and plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from offloadtrain.config import units
from offloadtrain_tui.text import clean
from offloadtrain_tui.widgets.drawn import Drawn
from offloadtrain_tui.widgets.styles import CACHE, FILLS, OTHERS, OWNER_COLORS

FREE, PEAK = "·", "┃"
_NAME_WIDTH = 38
_NARROW, _SHORT = 100, 30
_ONE, _REST = -1, -2


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one owner."""

    owner: str
    nbytes: int


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
    def owners(self) -> int:
        """How many have memory in it."""
        return len(self.parts) + bool(self.cache) + bool(self.other)

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
        before = len(self._layout())
        super().show(content)
        if len(self._layout()) != before:
            self.refresh(layout=True)

    def get_content_height(self, *_: object) -> int:
        return max(len(self._layout()), 1)

    def draw(self, width: int, height: int) -> list[Strip]:
        lines = [(self.tiers[number], line) for number, line in self._layout()]
        count = len(lines), len(self.tiers)
        return [self.line((*of, *count), partial(self._segments, *of, width)) for of in lines]

    def _segments(self, tier: Tier, line: int, width: int) -> list[Segment]:
        if line == _ONE:
            return self._in_one_line(tier, width)
        if line == _REST:
            return self._rest()
        if line == 0:
            return self._title(tier)
        if line == 1:
            return [Segment(" "), *self._bar(tier, width - 2)]
        return self._names(tier, line - 2, width)

    def _layout(self) -> list[tuple[int, int]]:
        """Return (bar, its line) of every line; ONE: all in one; REST: of bars that do not fit."""
        tiers = self.tiers
        if len(tiers) <= 2:
            return [line for number in range(len(tiers)) for line in self._lines(number)]
        order = sorted(range(len(tiers) - 1), key=lambda number: tiers[number].free)
        visible = sorted(order[: max(self.app.size.height // 6, 2)])
        lines = [(number, _ONE) for number in visible]
        lines += [(visible[0], _REST)] * (len(visible) < len(order))
        return [*lines, (visible[0], 2), *self._lines(len(tiers) - 1)]

    def _lines(self, number: int) -> list[tuple[int, int]]:
        """Return the lines of a bar with figures above and owners below it."""
        most = self._legend if self.app.size.height >= _SHORT else 1
        per_line = max(self.app.size.width // _NAME_WIDTH, 1)
        names = min(-(-self.tiers[number].owners // per_line), most)
        return [(number, line) for line in range(2 + names)]

    def _rest(self) -> list[Segment]:
        drawn = sum(line == _ONE for _, line in self._layout())
        text = f" and {len(self.tiers) - 1 - drawn} GPUs with more free memory"
        return [Segment(text, self.style("foreground", dim=True))]

    def _title(self, tier: Tier) -> list[Segment]:
        usage = _of(tier.used, tier.total) if tier.total else units.format_bytes(tier.used)
        return [
            Segment(f" {tier.title}", self.style("foreground", bold=True)),
            Segment(f" {usage}", self.style("primary")),
            *self._figures(tier),
            Segment(f"  {clean(tier.note)}", self.style("foreground", dim=True)),
        ]

    def _figures(self, tier: Tier) -> list[Segment]:
        free = self.style("warning" if tier.free < 0.05 * tier.total else "success")
        plain, dim = self.style("foreground"), self.style("foreground", dim=True)
        return [
            Segment(f"{label} {units.format_bytes(size)}", style)
            for is_known, label, size, style in (
                (tier.total, "  free", tier.free, free),
                (tier.peak, f" {PEAK} peak", tier.peak, plain),
                (tier.planned, "  plan", tier.planned, dim),
            )
            if is_known
        ]

    def _in_one_line(self, tier: Tier, width: int) -> list[Segment]:
        gib = 1 << 30
        figures = f" {tier.used / gib:.1f}/{tier.total / gib:.1f} GiB "
        peak = f"  peak {tier.peak / gib:.1f}" if tier.peak else ""
        free = f" free {tier.free / gib:.1f}{peak}"
        note = "" if self.app.size.width < _NARROW else f"  {clean(tier.note)[:40]}"
        room = max(width - len(tier.title) - len(figures) - len(free) - len(note) - 2, 8)
        scarce = tier.total and tier.free < 0.05 * tier.total
        return [
            Segment(f" {tier.title}", self.style("foreground", bold=True)),
            Segment(figures, self.style("primary")),
            *self._bar(tier, room),
            Segment(free, self.style("warning" if scarce else "success")),
            Segment(note, self.style("foreground", dim=True)),
        ]

    def _bar(self, tier: Tier, inner: int) -> list[Segment]:
        """Owners, others, free memory; the mark of the peak is drawn over them."""
        capacity = max(tier.total, tier.used + tier.cache + tier.other, 1)
        cells: list[tuple[str, Style]] = []
        done = 0
        for number, part in enumerate(tier.parts):
            done += part.nbytes
            cells += [self._cell(number)] * (inner * done // capacity - len(cells))
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

    def _names(self, tier: Tier, line: int, width: int) -> list[Segment]:
        per_line = max(self.app.size.width // _NAME_WIDTH, 1)
        labels = self._labels(tier)[line * per_line : (line + 1) * per_line]
        segments = [Segment(" ")]
        for sign, style, part in labels:
            text = f" {_named(part, _NAME_WIDTH - 3)}"
            segments += [Segment(sign, style), Segment(f"{text:<{_NAME_WIDTH - 1}}")]
        return segments

    def _labels(self, tier: Tier) -> list[tuple[str, Style, Part]]:
        """Return sign and part of all that is in a bar."""
        owned = [(*self._cell(number), part) for number, part in enumerate(tier.parts)]
        dim = self.style("foreground", dim=True)
        rest = ((CACHE, "allocator's cache", tier.cache), (OTHERS, "others", tier.other))
        return owned + [(sign, dim, Part(name, size)) for sign, name, size in rest if size]


def _of(used: int, total: int) -> str:
    """Return, for example, "26.9 of 32.0 GiB"."""
    (number, unit), total_text = units.format_bytes(used).split(" "), units.format_bytes(total)
    return (
        f"{number} of {total_text}"
        if total_text.endswith(f" {unit}")
        else f"{number} {unit} of {total_text}"
    )


def _named(part: Part, most: int) -> str:
    """Return name and size in so many columns; a name is cut, a size never."""
    size = f" {units.format_bytes(part.nbytes)}"
    name, room = clean(part.owner), most - len(size)
    return (name if len(name) <= room else f"{name[: room - 1]}…") + size
