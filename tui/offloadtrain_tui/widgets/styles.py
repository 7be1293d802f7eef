"""Colors of the theme as the cells of a terminal take them."""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style

LANE_COLORS = {
    "compute": "success",
    "d2h": "warning",
    "host": "accent",
    "h2d": "primary",
    "load": "secondary",
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


@lru_cache(maxsize=256)
def styled(color: str, bold: bool = False, dim: bool = False) -> Style:
    """A color of a theme's variables, "" for the terminal's own."""
    name = color.removeprefix("ansi_").strip()
    if not name or name == "default" or name.startswith("auto"):
        name = "default"
    return Style.parse(name) + Style(bold=bold, dim=dim)
