"""`offloadtrain.watch(run)`: shows a run in a notebook, as an image that is refreshed in place.

The image is the monitor's screen, drawn by a separate process (`pictures`). IPython is imported
only when it requests the image.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

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
    """Watch a run from a notebook. As a cell's last line, it displays an image that follows it.

    Args:
        run: a run folder, a folder of runs (selects the newest), or an event file.
        screen: name of one of the monitor's screens.
        size: columns and lines of the screen.
        every_s: seconds between refreshes.

    Raises:
        ValueError: the run or the screen does not exist.
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
    """A watched run. `stop` ends the refreshes, and does not affect the run.

    A single process draws all images, from the first one until `stop` or the end of this process.
    """

    def __init__(self, run: RunPath, screen: str, size: tuple[int, int], every_s: float) -> None:
        self._run, self._screen, self._size, self._every_s = run, screen, size, every_s
        self._process: subprocess.Popen[str] | None = None
        self._problems: IO[str] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def svg(self) -> str:
        """Return the current screen; the first call takes about a second.

        Raises:
            RuntimeError: it cannot be drawn; the message contains the drawing process's error.
        """
        return self._next()[0]

    _repr_html_ = svg

    def stop(self) -> None:
        """Stop refreshing, and end the process that draws; the last image remains."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()  # waits until the last image is displayed
        with self._lock:
            self._end()

    def __repr__(self) -> str:
        return f"{self._run.name}: {line(RunReader(self._run).read_to_end(time.time()))}"

    def _ipython_display_(self) -> None:
        """Display an image, and refresh it until the run ends; called by IPython."""
        from IPython.display import HTML, display

        self.stop()
        self._stopped = stopped = threading.Event()
        picture, over = self._next()
        handle: Any = display(HTML(picture), display_id=True)
        if handle is None:  # no frontend
            return

        def replace(over: bool) -> None:
            while not over and not stopped.wait(self._every_s):
                picture, over = self._next()
                handle.update(HTML(picture))

        self._thread = threading.Thread(target=replace, args=(over,), name="watch", daemon=True)
        self._thread.start()

    def _next(self) -> tuple[str, bool]:
        """Return the next image, and True if the run has ended."""
        with self._lock:
            process = self._process or self._begin()
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):  # the process has ended; its stderr says why
                process.stdin.write("\n")
                process.stdin.flush()
            answer = process.stdout.readline()
            if not answer.endswith("\n"):
                problem = self._end()
                raise RuntimeError(f"the picture of {self._run.name} was not drawn: {problem}")
            picture, over = json.loads(answer)
            return picture, over

    def _begin(self) -> subprocess.Popen[str]:
        self._problems = tempfile.TemporaryFile("w+")
        arguments = (self._run.path, self._screen, *self._size)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offloadtrain_tui.pictures", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._problems,
            text=True,
        )
        return self._process

    def _end(self) -> str:
        """End the process that draws; return its stderr."""
        process, self._process = self._process, None
        if process is None or self._problems is None:
            return ""
        with suppress(BrokenPipeError):
            process.communicate()  # closes its stdin, which ends it
        self._problems.seek(0)
        with self._problems:
            return self._problems.read()
