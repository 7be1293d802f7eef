"""Colors side by side differ, with any color vision."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from offloadtrain_tui.app import Monitor
from offloadtrain_tui.plots import KINDS
from offloadtrain_tui.widgets.drawn import FILLS, LANE_COLORS, OWNER_COLORS, shade
from rich.color import Color

from tests.tui.conftest import THEMES

VISIONS = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}
"""Linear RGB as it is seen (Machado, Oliveira and Fernandes 2009, severity 1)."""

LEAST = 15.0
"""Difference in CIE L*a*b* (1976). 2.3 is just noticeable for areas that touch."""


def seen(color: str, vision: str) -> tuple[float, float, float]:
    """Return a color in L*a*b*, for a white of D65."""
    parts = [part / 255 for part in Color.parse(color).get_truecolor()]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    red, green, blue = (
        min(max(sum(a * b for a, b in zip(row, linear, strict=True)), 0.0), 1.0)
        for row in VISIONS[vision]
    )
    x, y, z = (
        value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116
        for value in (
            (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047,
            0.2126 * red + 0.7152 * green + 0.0722 * blue,
            (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883,
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.fixture(scope="module")
def palettes() -> dict[str, dict[str, str]]:
    """Theme → its variables."""

    async def read() -> dict[str, dict[str, str]]:
        app = Monitor([], watch_machine=False)
        async with app.run_test():
            variables = {}
            for theme in THEMES:
                app.theme = theme
                variables[theme] = app.theme_variables
            return variables

    return asyncio.run(read())


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("vision", VISIONS)
def test_lanes_owners_and_curves_side_by_side_differ(
    palettes: dict[str, dict[str, str]], theme: str, vision: str
) -> None:
    """Of lanes those that every run has, with and without logged waits."""
    lanes = ("compute", "wait", "d2h", "host", "h2d")
    names = {
        *pairwise(LANE_COLORS[lane] for lane in lanes),
        *pairwise(LANE_COLORS[lane] for lane in lanes if lane != "wait"),
        *pairwise((*OWNER_COLORS, OWNER_COLORS[0])),
    }
    for kind in KINDS.values():
        colors = [color for _, _, color, _ in kind.fields]
        names |= {(a, b) for a in colors for b in colors if a < b}
    for pair in names:
        first, second = (seen(shade(palettes[theme], name), vision) for name in pair)
        apart = sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5
        assert apart >= LEAST, (pair, round(apart, 1))


def test_owners_differ_without_color_too() -> None:
    """Neighbors have other fills, and no two of the first thirty both fill and color."""
    looks = {(FILLS[n % len(FILLS)], OWNER_COLORS[n % len(OWNER_COLORS)]) for n in range(30)}
    assert len(looks) == 30 and len(set(FILLS)) == len(FILLS) > 1
