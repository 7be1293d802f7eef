"""Pictures of a run for a notebook: for each line on stdin one line of JSON on stdout, of the SVG
and whether the run has ended.

A process of its own: Textual takes a process's stdout and stderr while it draws, and Rich prints
into a notebook that it finds itself in. It ends with its stdin. Arguments: the run, the screen,
columns, lines.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TextIO

from offloadtrain_tui.app import Monitor
from offloadtrain_tui.frame import settled
from offloadtrain_tui.reading import runs


async def draw(
    run: Path, screen: str, size: tuple[int, int], requests: TextIO, out: TextIO
) -> None:
    """Write a picture for each request, until there are no more."""
    app = Monitor(runs.find([run]), runs_dir=run.parent, readonly=True)
    async with app.run_test(size=size) as pilot:
        app.action_panel(screen)
        await settled(app, pilot)
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
    except BrokenPipeError:  # the notebook is gone
        sys.stdout = None
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
