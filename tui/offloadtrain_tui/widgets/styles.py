"""Colors of the theme as the cells of a terminal take them."""

from __future__ import annotations

from collections.abc import Iterable
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
OWNER_COLORS = ("primary", "accent", "success", "warning", "secondary", "error", "foreground")
"""Of the parts of a bar, the largest first."""


PLAIN = Style.null()


def strip_of(segments: Iterable[Segment], width: int) -> Strip:
    """A line of a widget. Every segment has a style: the filter for NO_COLOR takes none without."""
    whole = [Segment(text, PLAIN if style is None else style) for text, style, _ in segments]
    return Strip(whole).adjust_cell_length(width, PLAIN)


@lru_cache(maxsize=256)
def styled(color: str, bold: bool = False, dim: bool = False) -> Style:
    """A color of a theme's variables, "" for the terminal's own."""
    return Style.parse(rich_color(color)) + Style(bold=bold, dim=dim)


def rich_color(color: str) -> str:
    """A theme's color by the name that Rich has for it."""
    name = color.removeprefix("ansi_").strip()
    return "default" if not name or name == "default" or name.startswith("auto") else name
