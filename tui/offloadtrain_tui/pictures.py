"""Pictures of a run for a notebook, one JSON string of SVG per line on stdout, until it has ended.

A process of its own: Textual takes a process's stdout and stderr while it draws, and Rich prints
into a notebook that it finds itself in. Arguments: the run, the screen, columns, lines, seconds
between two pictures, and how many there are at most (0: until the run has ended).
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
    run: Path, screen: str, size: tuple[int, int], every_s: float, most: int, out: TextIO
) -> None:
    """Write pictures until the run has ended, or `most` are written."""
    app = Monitor(runs.find([run]), runs_dir=run.parent, readonly=True)
    drawn = 0
    async with app.run_test(size=size) as pilot:
        app.action_panel(screen)
        await settled(app, pilot)
        while True:
            over = app.shown.snapshot.state not in runs.ALIVE
            out.write(json.dumps(app.export_screenshot()) + "\n")
            out.flush()
            drawn += 1
            if over or drawn == most:
                return
            await asyncio.sleep(every_s)


def main(arguments: list[str]) -> int:
    run, screen, columns, lines, every_s, most = arguments
    size = (int(columns), int(lines))
    try:
        asyncio.run(draw(Path(run), screen, size, float(every_s), int(most), sys.stdout))
    except BrokenPipeError:  # the notebook is gone
        sys.stdout = None
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
