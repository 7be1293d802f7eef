"""One frame of the monitor without a terminal: as text, and as SVG."""

from __future__ import annotations

import asyncio

from textual.pilot import Pilot

from offloadtrain_tui.app import Monitor

_SETTLE_S, _MOST_S = 0.05, 10.0


async def frame(app: Monitor, screen: str, width: int, height: int) -> tuple[str, str]:
    """Run the app without a terminal until everything is read and drawn."""
    async with app.run_test(size=(width, height)) as pilot:
        app.action_panel(screen)
        await settled(app, pilot)
        return screen_text(app), app.export_screenshot()


async def settled(app: Monitor, pilot: Pilot[None]) -> None:
    """Wait until everything present at the start has been read and drawn. Gives up after ten
    seconds without a byte read."""
    read_bytes, waited_s = 0, 0.0
    while not app.is_settled and waited_s < _MOST_S:
        await asyncio.sleep(_SETTLE_S)
        before, read_bytes = read_bytes, app.reader.read_bytes
        waited_s = 0.0 if read_bytes > before else waited_s + _SETTLE_S
    await pilot.pause()
    app.settle()
    await pilot.pause()


def screen_text(app: Monitor) -> str:
    """Return the screen as lines of text."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips)
