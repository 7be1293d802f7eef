"""One frame of the monitor without a terminal: as text, and as SVG."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from textual.pilot import Pilot

from offloadtrain.config import units
from offloadtrain_tui.app import Monitor

_SETTLE_S, _MOST_S, _SAY_S = 0.05, 10.0, 2.0


async def frame(
    app: Monitor, screen: str, width: int, height: int, say: Callable[[str], object] = len
) -> tuple[str, str]:
    """Run the app without a terminal until everything is read and drawn. `say` gets a line every
    two seconds."""
    say("drawing")
    async with app.run_test(size=(width, height)) as pilot:
        app.action_panel(screen)
        await settled(app, pilot, say)
        return screen_text(app), app.export_screenshot()


async def settled(app: Monitor, pilot: Pilot[None], say: Callable[[str], object] = len) -> None:
    """Wait until everything present at the start has been read and drawn. Gives up after ten
    seconds without a byte read."""
    read_bytes, waited_s, said_s = 0, 0.0, time.monotonic()
    while not app.is_settled and waited_s < _MOST_S:
        await asyncio.sleep(_SETTLE_S)
        if time.monotonic() - said_s >= _SAY_S:
            said_s = time.monotonic()
            say(f"reading the log: {units.format_bytes(read_bytes)} so far")
        before, read_bytes = read_bytes, app.reader.read_bytes
        waited_s = 0.0 if read_bytes > before else waited_s + _SETTLE_S
    await pilot.pause()
    app.settle()
    await pilot.pause()


def screen_text(app: Monitor) -> str:
    """Return the screen as lines of text."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips)
