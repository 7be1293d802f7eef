"""Memory as stacked bars: owners of a tier, planned and free memory."""

from __future__ import annotations

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from offloadtrain.config import units
from offloadtrain_tui.widgets.styles import OWNER_COLORS, strip_of, styled

_FILLS = "█▓▒░▚▞▤"
"""Fill characters, so that parts differ without color too."""


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
        total: total memory; 0: unknown, the parts are the whole.
        other: memory of others.
        note: text after the title.
    """

    title: str
    parts: tuple[Part, ...] = ()
    total: int = 0
    other: int = 0
    note: str = ""

    @property
    def used(self) -> int:
        return sum(part.nbytes for part in self.parts)


class StackBar(Widget):
    """A title line, the bar, and as many owners as fit below."""

    DEFAULT_CSS = "StackBar { height: auto; min-height: 2; }"

    def __init__(self, tier: Tier, *, legend: int = 3, id: str | None = None) -> None:
        super().__init__(id=id)
        self._tier = tier
        self._legend = legend

    @property
    def tier(self) -> Tier:
        return self._tier

    def show(self, tier: Tier) -> None:
        if tier != self._tier:
            resized = len(tier.parts) != len(self._tier.parts)
            self._tier = tier
            self.refresh(layout=resized)

    def get_content_height(self, *_: object) -> int:
        return 2 + self._legend_lines(self.app.size.width)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y == 0:
            segments = self._title()
        elif y == 1:
            segments = self._bar(width)
        else:
            segments = self._names(y - 2, width)
        return strip_of(segments, width)

    def _legend_lines(self, width: int) -> int:
        per_line = max(width // 34, 1)
        return min(-(-len(self._tier.parts) // per_line), self._legend)

    def _style(self, color: str, **options: bool) -> Style:
        return styled(self.app.theme_variables.get(color, ""), **options)

    def _title(self) -> list[Segment]:
        tier = self._tier
        of = f" of {units.format_bytes(tier.total)}" if tier.total else ""
        text = f" {units.format_bytes(tier.used)}{of}"
        return [
            Segment(f" {tier.title}", self._style("foreground", bold=True)),
            Segment(text, self._style("primary")),
            Segment(f"  {tier.note}", self._style("foreground", dim=True)),
        ]

    def _bar(self, width: int) -> list[Segment]:
        tier, inner = self._tier, max(width - 2, 1)
        whole = max(tier.total, tier.used + tier.other, 1)
        segments, done, filled = [Segment(" ")], 0, 0
        for number, part in enumerate(tier.parts):
            done += part.nbytes
            end = inner * done // whole
            segments.append(self._cells(number, end - filled))
            filled = end
        end = min(inner * (done + tier.other) // whole, inner)
        segments.append(Segment("-" * (end - filled), self._style("foreground", dim=True)))
        segments.append(Segment("·" * (inner - end), self._style("foreground", dim=True)))
        return segments

    def _cells(self, number: int, count: int) -> Segment:
        color = OWNER_COLORS[number % len(OWNER_COLORS)]
        return Segment(_FILLS[number % len(_FILLS)] * count, self._style(color))

    def _names(self, line: int, width: int) -> list[Segment]:
        per_line = max(width // 34, 1)
        segments = [Segment(" ")]
        for number in range(line * per_line, (line + 1) * per_line):
            if number < len(self._tier.parts):
                part = self._tier.parts[number]
                text = f" {part.owner} {units.format_bytes(part.nbytes)}"
                segments += [self._cells(number, 1), Segment(f"{text[:32]:<33}")]
        return segments
