"""Draws frames of the monitor without a terminal: one frame as text and SVG, or, run as a process,
an SVG for each line on stdin, for a notebook.

It does not draw in the notebook's process: Textual redirects a process's stdout and stderr while it
draws, and Rich prints into a notebook if it detects one. The process answers each line with a line
of JSON, [SVG, True if the run has ended], and ends when its stdin is closed. Arguments: run,
screen, columns, lines.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from textual.pilot import Pilot

from offloadtrain.config import units
from offloadtrain_tui.app import Monitor
from offloadtrain_tui.reading import runs

_SETTLE_S, _MOST_S, _SAY_S = 0.05, 10.0, 2.0


async def frame(
    app: Monitor, screen: str, width: int, height: int, say: Callable[[str], object] = len
) -> tuple[str, str]:
    """Run the app without a terminal until everything is read and drawn. `say` gets a progress
    message every two seconds."""
    say("drawing")
    async with app.run_test(size=(width, height)) as pilot:
        app.action_panel(screen)
        await settled(app, pilot, say)
        return screen_text(app), app.export_screenshot()


async def settled(app: Monitor, pilot: Pilot[None], say: Callable[[str], object] = len) -> None:
    """Wait until everything present at the start has been read and drawn. Give up after ten seconds
    in which nothing was read."""
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


async def draw(
    run: Path, screen: str, size: tuple[int, int], requests: TextIO, out: TextIO
) -> None:
    """Write an image for each request, until `requests` ends."""
    app = Monitor(runs.find([run]), runs_dir=run.parent, readonly=True)
    async with app.run_test(size=size) as pilot:
        app.action_panel(screen)
        while await asyncio.to_thread(requests.readline):
            await settled(app, pilot)
            over = app.shown.snapshot.state not in runs.ALIVE
            out.write(json.dumps([app.export_screenshot(), over]) + "\n")
            out.flush()


def main(arguments: list[str]) -> int:
    run, screen, columns, lines = arguments
    size = (int(columns), int(lines))
    try:
        asyncio.run(draw(Path(run), screen, size, sys.stdin, sys.stdout))
    except BrokenPipeError:  # the notebook's process has ended
        sys.stdout = None
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
