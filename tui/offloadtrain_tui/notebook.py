"""`offloadtrain.watch(run)`: a run in a notebook, one picture that is refreshed in place.

The picture is the monitor's own screen, drawn by a process of its own (`pictures`). IPython is
imported only when it asks for the picture.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.log_reader import RunReader
from offloadtrain_tui.reading.runs import RunError, RunPath
from offloadtrain_tui.reports import line

SIZE = (120, 36)
EVERY_S = 2.0


def watch(
    run: str | Path = "runs",
    *,
    screen: str = "overview",
    size: tuple[int, int] = SIZE,
    every_s: float = EVERY_S,
) -> Watch:
    """Watch a run from a notebook: as a cell's last line, a picture that follows the run.

    Args:
        run: a run folder, a folder of runs (the newest), or an event file.
        screen: one of the monitor's screens.
        size: columns and lines.
        every_s: seconds between two pictures.

    Raises:
        ValueError: there is no such run or screen.
    """
    from offloadtrain_tui.keys import PANELS

    if screen not in PANELS:
        raise ValueError(f"screen = {screen!r}: choose one of {', '.join(PANELS)}")
    try:
        (run_path,) = runs.find([Path(run)])
    except RunError as error:
        raise ValueError(str(error)) from None
    return Watch(run_path, screen, size, every_s)


class Watch:
    """A run and its newest picture. `stop` ends the refreshing; the run does not notice."""

    def __init__(self, run: RunPath, screen: str, size: tuple[int, int], every_s: float) -> None:
        self._run, self._screen, self._size, self._every_s = run, screen, size, every_s
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def svg(self) -> str:
        """Return the screen as it is now; takes about a second.

        Raises:
            RuntimeError: it cannot be drawn; the message has the drawing process's error.
        """
        process = self._draw(most=1)
        output, problem = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the picture of {self._run.name} was not drawn: {problem}")
        return str(json.loads(output))

    def stop(self) -> None:
        """Leave the last picture as it is."""
        if self._process is not None:
            self._process.terminate()
        if self._thread is not None:
            self._thread.join()  # waits until the last picture is shown

    def __repr__(self) -> str:
        return f"{self._run.name}: {line(RunReader(self._run).read_to_end(time.time()))}"

    def _repr_html_(self) -> str:
        return self.svg()

    def _ipython_display_(self) -> None:
        """Show the first picture, and replace it until the run ends; called by IPython."""
        from IPython.display import HTML, display

        self.stop()
        handle: Any = display(HTML(self.svg()), display_id=True)
        if handle is None:  # no frontend
            return
        self._process = process = self._draw(most=0)

        def replace(pictures: Iterable[str]) -> None:
            with process:
                for picture in pictures:  # waits for the next one, or the process's end
                    if picture.endswith("\n"):  # not one that `stop` has cut
                        handle.update(HTML(json.loads(picture)))

        assert process.stdout is not None
        self._thread = threading.Thread(
            target=replace, args=(process.stdout,), name="watch", daemon=True
        )
        self._thread.start()

    def _draw(self, most: int) -> subprocess.Popen[str]:
        width, height = self._size
        arguments = (self._run.path, self._screen, width, height, self._every_s, most)
        # Nobody reads the stderr of an endless series; `svg` has reported errors before.
        return subprocess.Popen(
            [sys.executable, "-m", "offloadtrain_tui.pictures", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if most else subprocess.DEVNULL,
            text=True,
        )
