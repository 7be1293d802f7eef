"""Every screen can be read on light and on dark terminals, at three sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from offloadtrain_tui.app import Monitor
from offloadtrain_tui.display import PANELS
from rich.color import Color
from rich.segment import Segment

from tests.tui.recordings import unlucky, write
from tests.tui.test_app import SIZES, watching

LEAST = 2.5
"""Contrast as WCAG 2 defines it, 1 (of the same color) to 21; of dim text too."""


def luminance(color: Color) -> float:
    parts = (part / 255 for part in color.get_truecolor())
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Color, other: Color) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def unreadable(app: Monitor) -> Iterator[Segment]:
    """Yield what is drawn in nearly the color behind it, or in colors that are not known."""
    for strip in app.screen._compositor.render_strips():
        for segment in strip:
            style = segment.style
            if segment.control or not any(map(str.isalnum, segment.text)):
                continue  # spaces, and the borders of fields
            if style is None or style.color is None or style.bgcolor is None:
                yield segment
            elif contrast(style.color, style.bgcolor) < LEAST:
                yield segment


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", ["textual-light", "textual-dark", "color-blind-safe"])
def test_all_that_is_drawn_stands_out(tmp_path: Path, theme: str, size: str) -> None:
    folder = write(tmp_path / "runs/20261121-080000-demo", unlucky())

    async def test() -> None:
        async with watching(folder, size=size) as (app, press):
            app.theme = theme
            await press()  # its colors are computed
            for name in PANELS:
                app.action_panel(name)
                app.settle()
                await press()
                assert list(unreadable(app)) == [], name

    asyncio.run(test())
