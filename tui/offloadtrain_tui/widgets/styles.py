"""Theme colors for the cells of a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

LANE_COLORS = {
    "compute": "success",
    "wait": "error",
    "d2h": "warning",
    "host": "accent",
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
"""Colors of the overlaid runs, in every chart; the header says whose they are."""
OWNER_COLORS = (
    *("primary", "accent", "success", "secondary", "error", "foreground"),
    *("primary-darken-3", "accent-darken-3", "success-darken-3", "secondary-darken-3"),
    "error-darken-3",
)
"""Colors of the owners of memory, in the order of the bars. In Textual's own themes "warning" is
the color of "accent"."""

FILLS = "█▓▒░▚▞▤"
"""Their fill characters, so that they differ without color too."""

CACHE, OTHERS = "=", "-"
"""The fills of the cache of torch's allocator, and of the memory of other programs."""


PLAIN = Style.null()


def strip_of(segments: Iterable[Segment], width: int, base: Style = PLAIN) -> Strip:
    """Build a line of a widget, which ends in an ellipsis where it is cut. Every segment has a
    style, as the NO_COLOR filter requires.

    Args:
        base: the widget's own colors; the theme's background may not be the terminal's.
    """
    styled = [Segment(text, base if style is None else base + style) for text, style, _ in segments]
    strip = Strip(Segment.simplify(styled))
    if strip.cell_length > width > 1 and strip.text[width - 1 :].strip():
        shortened = list(strip.crop(0, width - 1))
        strip = Strip([*shortened, Segment("…", shortened[-1].style)])
    return strip.adjust_cell_length(width, base)


@lru_cache(maxsize=256)
def styled(color: str, bold: bool = False, dim: bool = False) -> Style:
    """Return a color of a theme's variables, "" for the terminal's own."""
    return Style.parse(rich_color(color)) + Style(bold=bold, dim=dim)


def shade(variables: Mapping[str, str], name: str) -> str:
    """Return a theme's color in the shade that stands out from its background, light or dark."""
    return variables.get(f"text-{name}") or variables.get(name, "")


def rich_color(color: str) -> str:
    """Return Rich's name of a theme's color."""
    name = color.removeprefix("ansi_").strip()
    return "default" if not name or name == "default" or name.startswith("auto") else name
