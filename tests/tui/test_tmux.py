"""A real run, watched in tmux at three sizes while it is killed and resumed, then replayed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offloadtrain.events import log_lines, schema
from tests.tui.test_app import TERMINALS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux: apt-get install tmux"),
]
ROOT = Path(__file__).resolve().parent.parent.parent
OURS = [sys.executable, "-m", "offloadtrain"]
HANGS_S = 180.0
SIZES = (*TERMINALS.values(), (80, 24))
"""From the smallest to the largest, and back while the curves of the largest are there."""


class Tmux:
    """A tmux server of its own, with one window."""

    def __init__(self, folder: Path) -> None:
        config = folder / "tmux.conf"
        config.write_text("set -g status off\nset -g remain-on-exit on\n")
        self._call = ["tmux", "-S", str(folder / "socket"), "-f", str(config)]
        # A process that has loaded readline has the size of its own terminal in the environment.
        self._environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._call, *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env=self._environ,
        )
        return done.stdout

    def show(self, *arguments: str) -> str:
        """Return the command of the window that shows the monitor."""
        return shlex.join([*OURS, "tui", *arguments])

    def lines(self) -> list[str]:
        """What is on the screen, line by line."""
        return self.run("capture-pane", "-p").splitlines()

    def until(self, seen: Callable[[list[str]], bool]) -> list[str]:
        """Return the first screen on which it is seen; a busy machine takes its time."""
        deadline = time.monotonic() + HANGS_S
        while not seen(lines := self.lines()):
            assert "Traceback" not in "".join(lines), "\n".join(lines)
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.1)
        return lines


@contextmanager
def tmux(folder: Path) -> Iterator[Tmux]:
    found = Tmux(folder)
    try:
        yield found
    finally:
        found.run("kill-server")


@contextmanager
def training(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`offloadtrain train`, killed at the end as by the kernel."""
    log = folder.with_suffix(".log")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*OURS, "train", "debug", *arguments], stdout=output, stderr=output, cwd=ROOT
        )
    try:
        deadline = time.monotonic() + HANGS_S
        while not (folder / "run.json").exists():  # until then there is nothing to watch
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def step_of(lines: list[str]) -> int:
    """The step in the first line; -1 if there is none."""
    number = lines[0].partition("step ")[2].partition("/")[0] if lines else ""
    return int(number) if number.isdigit() else -1


def newest_step(run: Path) -> int:
    """The last step of the log, which nobody writes any more."""
    events = [record.event for record in log_lines.read(run / "events/rank000.jsonl")]
    return [event.step for event in events if isinstance(event, schema.Step)][-1]


def says(state: str, above: int = 0) -> Callable[[list[str]], bool]:
    return lambda lines: bool(lines) and f" {state} " in f"{lines[0]} " and step_of(lines) > above


def is_drawn(width: int, height: int) -> Callable[[list[str]], bool]:
    """The footer is in the last line, charts begin, and something reaches the right edge."""

    def seen(lines: list[str]) -> bool:
        whole = len(lines) == height and "? help" in lines[-1] and "loss" in lines[1]
        return whole and width - 8 <= max(map(len, lines)) <= width and says("running")(lines)

    return seen


def test_a_run_is_watched_through_its_life(tmp_path: Path) -> None:
    run = tmp_path / "run"
    often = "train.steps=100000", "train.checkpoint_every=20"
    with tmux(tmp_path) as screen:
        with training(run, "--run-dir", str(run), "--set", *often):
            screen.run("new-session", "-d", "-x", "80", "-y", "24", screen.show(str(run)))
            screen.until(says("running", above=25))  # behind a checkpoint
            for width, height in SIZES:
                screen.run("resize-window", "-x", str(width), "-y", str(height))
                lines = screen.until(is_drawn(width, height))
                assert any("│" in line for line in lines), "the axis of a chart"
        killed = step_of(screen.until(says("killed")))
        with training(run, "--resume", str(run), "--set", *often):
            screen.until(says("running", above=killed))
        last = newest_step(run)
        assert last > killed
        screen.until(lambda lines: says("killed")(lines) and step_of(lines) == last)
        screen.run("respawn-pane", "-k", screen.show(str(run), "--replay", "--speed", "0.5"))
        early = step_of(screen.until(says("running")))
        assert early <= last
        screen.run("send-keys", "End")
        screen.until(lambda lines: step_of(lines) == last)
