"""Colors, and a widget base class that redraws only changed lines on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

LANE_COLORS = {
    "compute": "success",
    "wait": "error",
    "d2h": "warning",
    "host": "foreground",
    "h2d": "primary",
    "load": "secondary",
    "comm": "error",
    "ortho": "success",
    "update": "accent",
    "write": "primary",
    "disk_read": "warning",
    "disk_write": "secondary",
    "disk_load": "primary",
}
STATE_COLORS = {
    "starting": "primary",
    "running": "success",
    "slow": "warning",
    "done": "success",
    "stopped": "warning",
    "failed": "error",
    "killed": "error",
    "unknown": "warning",
}
RUN_COLORS = ("error", "success", "secondary", "accent")
"""Colors of the overlaid runs in every chart; the header shows which run has which color."""
OWNER_COLORS = ("primary", "success", "foreground", "accent", "secondary", "error")
"""Colors of memory owners, in the order of the bars. "warning" is missing, because it equals
"accent" in Textual's own themes."""

FILLS = "█▓▒▚▞"
"""Fill characters of owners. With 5 fills and 6 colors, 30 owners all look different."""

EIGHTHS = " ▁▂▃▄▅▆▇█"
"""Cells filled from below, by eighths."""

CACHE, OTHERS = "=", "-"
"""Fill characters of the allocator's cache and of the memory of other programs."""


PLAIN = Style.null()


@lru_cache(maxsize=256)
def styled(color: str, bold: bool = False, dim: bool = False) -> Style:
    """Return a style with a theme color; "" is the terminal's default color."""
    return Style.parse(rich_color(color)) + Style(bold=bold, dim=dim)


def shade(variables: Mapping[str, str], name: str) -> str:
    """Return a theme color in the shade that contrasts with the theme's background."""
    return variables.get(f"text-{name}") or variables.get(name, "")


def rich_color(color: str) -> str:
    """Return Rich's name of a theme color."""
    name = color.removeprefix("ansi_").strip()
    return "default" if not name or name == "default" or name.startswith("auto") else name


Content = TypeVar("Content")


class Drawn(Widget, Generic[Content]):
    """A widget that draws a value; equal values are drawn equally."""

    def __init__(self, content: Content, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.content = content
        self._strips: list[Strip] = []
        self._drawn: object = None
        self._look: tuple[object, ...] = ()
        self._colors: dict[str, str] = {}
        self._base = PLAIN  # the widget's style: its background may differ from the terminal's
        self._width = self._height = 0  # of the drawn strips; `size` is computed on each call

    def draw(self, width: int, height: int) -> list[Strip]:
        """Return the lines from top to bottom; missing lines are empty."""
        raise NotImplementedError

    def show(self, content: Content) -> None:
        """Redraw if the content has changed; only changed lines are sent to the terminal."""
        if content == self.content:
            return
        self.content = content
        before = self._strips
        self._bring_up()
        count = max(len(before), len(self._strips))
        changed = [y for y in range(count) if before[y : y + 1] != self._strips[y : y + 1]]
        if changed:
            self.refresh(*(Region(0, y, self._width, 1) for y in changed))

    def render_line(self, y: int) -> Strip:
        self._bring_up()
        return self._strips[y] if y < len(self._strips) else self.strip(())

    def on_show(self) -> None:
        """Redraw every line, because lines that changed while the widget was hidden were not
        drawn."""
        self.refresh()

    def strip(self, segments: Iterable[Segment]) -> Strip:
        """Return a line of the widget, which ends with an ellipsis if it is cut. Every segment has
        a style, as the NO_COLOR filter requires."""
        width, base = self._width, self._base
        styled = [
            Segment(text, base if style is None else base + style) for text, style, _ in segments
        ]
        strip = Strip(Segment.simplify(styled))
        if strip.cell_length > width > 1 and strip.text[width - 1 :].strip():
            shortened = list(strip.crop(0, width - 1))
            strip = Strip([*shortened, Segment("…", shortened[-1].style)])
        return strip.adjust_cell_length(width, base)

    def axis(self, first: str, last: str, gutter: int) -> Strip:
        """Return a line with labels below both ends of a chart that begins after `gutter`
        columns."""
        inner = max(self._width - gutter, 0)
        text = f"{first}{last:>{max(inner - len(first), 1)}}" if inner > 20 else last
        return self.strip(
            [Segment(" " * gutter + text[:inner], self.style("foreground", dim=True))]
        )

    def owner(self, number: int) -> tuple[str, Style]:
        """Return fill character and style of a memory owner, by its index on the screen."""
        color = OWNER_COLORS[number % len(OWNER_COLORS)]
        return FILLS[number % len(FILLS)], self.style(color)

    def style(self, color: str, *, bold: bool = False, dim: bool = False) -> Style:
        """Return a style with a color of the theme that the widget was last drawn with."""
        return styled(shade(self._colors, color), bold, dim)

    def _bring_up(self) -> None:
        """Redraw the strips if size, theme or content have changed."""
        look = (self.size, self.app.size, self.app.theme)
        if look != self._look:
            self._look, self._drawn = look, None
            self._width, self._height = self.size
            self._colors, self._base = self.app.theme_variables, self.rich_style
        if self._drawn is not self.content:
            self._drawn = self.content
            is_hidden = not (self._width and self._height)
            self._strips = [] if is_hidden else self.draw(self._width, self._height)
