"""What the monitor costs, on a terminal of 160 by 45.

    python -m benchmarks.monitor [delays] [charts] [screens] [resident] [--json]

Prints, beside the goal of each, all parts or those named: the first frame of a fresh process,
opening a run of 100,000 steps, how long after its writing a step is on the screen, how long after a
kill the death is (delays); the share of a core at 1 and 4 steps per second with twelve charts
(charts), that of every screen over a run of 13B shape, 4 ranks, 62 blocks, 16 microbatches
(screens); and resident memory over a log of 71 MB (resident). Each part takes less than 4
minutes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from offloadtrain_tui.keys import PANELS

from offloadtrain.events import log_lines, schema
from tests.tui import recordings

WIDTH, HEIGHT = 160, 45
RANK_STEPS = 200
SCREEN_S = 10.0
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")

_TRAINER = """
import json, os, socket, sys, time
from pathlib import Path
from offloadtrain.train import run_folder
run = run_folder.RunFolder(Path(sys.argv[1]))
run.write_run({})
sys.stdout.write("ready\\n"); sys.stdout.flush()
time.sleep(3600)
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement; `goal` is a most."""

    name: str
    value: float
    goal: float
    unit: str


class Screen:
    """The monitor in a terminal of its own; keeps what it draws."""

    def __init__(self, *arguments: str) -> None:
        self.began = time.perf_counter()
        self.drawn = bytearray()
        pid, self._fd = pty.fork()
        if pid == 0:
            os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
            command = [sys.executable, "-m", "offloadtrain", "tui", *arguments]
            os.execv(sys.executable, command)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        self.process = psutil.Process(pid)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until(self, text: str, most_s: float = 20.0) -> float:
        """Seconds from now until the text has been drawn."""
        began = time.perf_counter()
        while text not in self.text():
            if time.perf_counter() - began > most_s:
                raise RuntimeError(f"'{text}' was not drawn within {most_s} s")
            time.sleep(0.005)
        return time.perf_counter() - began

    def text(self) -> str:
        """What was drawn, without colors and positions."""
        return _ESCAPES.sub(b"", bytes(self.drawn)).decode(errors="replace")

    def clear(self) -> None:
        self.drawn.clear()

    def cpu_s(self) -> float:
        spent = self.process.cpu_times()
        return float(spent.user + spent.system)

    def close(self) -> None:
        self.process.kill()
        os.waitpid(self.process.pid, 0)
        os.close(self._fd)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:
                return
            self.drawn += data


@contextmanager
def trainer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run's lock, as a trainer does."""
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run_of(folder: Path, steps: int) -> Path:
    """A live run with so many steps behind it."""
    told = recordings.plain(steps)[:-1]
    shift = time.time() - told[-1][0]
    return recordings.write(folder, [(time_s + shift, event) for time_s, event in told])


def large_model(folder: Path) -> Path:
    """A live run of four ranks whose sampled steps have some 6,000 spans each."""
    logs = recordings.ranks(4, steps=RANK_STEPS)
    shift = time.time() - logs[0][-1][0]
    moved = [[(time_s + shift, event) for time_s, event in told] for told in logs]
    for told in moved:
        told += [(told[-1][0], span) for span in _spans_of_13b(RANK_STEPS)]
    return recordings.write(folder, *moved)


def long_log(folder: Path) -> Path:
    """A live run of the same shape whose logs have 71 MB: every 80th of 2,000 steps was sampled."""
    logs = recordings.ranks(4, steps=2000)
    shift = time.time() - logs[0][-1][0]
    found: list[list[recordings.Timed]] = []
    for told in logs:
        found.append([])
        for time_s, event in told:
            found[-1].append((time_s + shift, event))
            if isinstance(event, schema.Step) and event.step % 80 == 2:
                found[-1] += [(time_s + shift, span) for span in _spans_of_13b(event.step)]
    return recordings.write(folder, *found)


def _spans_of_13b(step: int, blocks: int = 62, microbatches: int = 16) -> Iterator[schema.LaneSpan]:
    lanes = (("compute", 0.0, 1.0), ("compute", 1.0, 2.0), ("d2h", 1.5, 0.6), ("host", 2.0, 0.5))
    for microbatch in range(microbatches):
        for block in range(blocks):
            begin_ms = 3.0 * (microbatch * blocks + block)
            for lane, after_ms, spent_ms in lanes:
                yield schema.LaneSpan(
                    step=step,
                    lane=lane,
                    name=f"{lane} blocks.{block}",
                    start_ms=begin_ms + after_ms,
                    duration_ms=spent_ms,
                    num_bytes=420_000_000,
                )


def append(folder: Path, number: int) -> None:
    event = recordings.step(number, random.Random(number))
    with open(folder / "events/rank000.jsonl", "ab") as log:
        log.write(log_lines.to_line(event, 0, time.time()))


def first_frame(folder: Path) -> float:
    screen = Screen(str(folder))
    try:
        return screen.until("working weights")
    finally:
        screen.close()


def large_run(folder: Path) -> tuple[float, float, float]:
    """Until the newest step is there, and until the first one is too; and the processor time of
    both, which other work on the machine changes less."""
    screen = Screen(str(folder))
    try:
        newest = screen.until("step 100000")
        began = time.perf_counter()
        # The line ends with it: state, bar and end are between.
        while "reading" in screen.text().rpartition("step 100000/100000")[2][:WIDTH]:
            time.sleep(0.005)
        return newest, newest + time.perf_counter() - began, screen.cpu_s()
    finally:
        screen.close()


def freshness(folder: Path, first: int) -> float:
    """The slowest of five."""
    screen = Screen(str(folder))
    try:
        screen.until(f"step {first - 1}")
        found = []
        for number in range(first, first + 5):
            screen.clear()
            append(folder, number)
            found.append(screen.until(f"{number}"))
            time.sleep(0.37)
        return max(found)
    finally:
        screen.close()


def death(folder: Path) -> float:
    screen = Screen(str(folder))
    try:
        with trainer(folder) as process:
            screen.until("running")
            screen.clear()
            process.send_signal(signal.SIGKILL)
            return screen.until("killed")
    finally:
        screen.close()


def cost(
    folder: Path, first: int, per_s: float, seconds: float = 15.0, panel: str = "plots"
) -> tuple[float, float]:
    """Percent of a core, and MiB, while steps arrive."""
    screen = Screen(str(folder), "--screen", panel)
    try:
        screen.until(f"{first - 1}/")
        time.sleep(2.0)
        spent, began = screen.cpu_s(), time.perf_counter()
        for number in range(round(seconds * per_s)):
            append(folder, first + number)
            time.sleep(1.0 / per_s)
        share = 100 * (screen.cpu_s() - spent) / (time.perf_counter() - began)
        return share, screen.process.memory_info().rss / 2**20
    finally:
        screen.close()


def every_screen(folder: Path) -> list[Figure]:
    """Of a large model, at a step per second."""
    found, number = [], RANK_STEPS + 1
    large = large_model(folder)
    with trainer(large):
        for panel in PANELS:
            share, mib = cost(large, number, 1.0, SCREEN_S, panel)
            number += round(SCREEN_S)
            found.append(Figure(f"13B, 4 ranks: {panel}", share, 3.0, "% of a core"))
    return [*found, Figure("13B, 4 ranks: resident", mib, 80.0, "MiB")]


def resident(folder: Path) -> list[Figure]:
    """Once the whole log has been read."""
    with trainer(long_log(folder)):
        screen = Screen(str(folder))
        try:
            screen.until("2000/")
            time.sleep(SCREEN_S)
            mib = screen.process.memory_info().rss / 2**20
            return [Figure("a log of 71 MB: resident", mib, 76.0, "MiB")]
        finally:
            screen.close()


def delays(base: Path) -> list[Figure]:
    small, large = run_of(base / "small", 1000), run_of(base / "large", 100_000)
    with trainer(small):
        first = first_frame(small)
    opened = large_run(large)
    return [
        Figure("first frame", first, 1.0, "s"),
        Figure("100,000 steps: newest", opened[0], 2.0, "s"),
        Figure("100,000 steps: all", opened[1], 2.0, "s"),
        Figure("100,000 steps: processor", opened[2], 2.0, "s"),
        Figure("a new step is shown", freshness(run_of(base / "fresh", 50), 51), 0.5, "s"),
        Figure("a kill is shown", death(run_of(base / "doomed", 50)), 1.0, "s"),
    ]


def charts(base: Path) -> list[Figure]:
    folder = run_of(base / "charts", 1000)
    with trainer(folder):
        once = cost(folder, 1001, 1.0)
        often = cost(folder, 1016, 4.0)  # after the 15 steps of before
    return [
        Figure("12 charts, 1 step/s", once[0], 3.0, "% of a core"),
        Figure("12 charts, 4 steps/s", often[0], 8.0, "% of a core"),
        Figure("resident memory", often[1], 80.0, "MiB"),
    ]


PARTS = {"delays": delays, "charts": charts, "screens": every_screen, "resident": resident}


def measure(parts: list[str]) -> list[Figure]:
    base = Path(tempfile.mkdtemp())
    try:
        return [figure for part in parts for figure in PARTS[part](base / part)]
    finally:
        shutil.rmtree(base)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("part", nargs="*", metavar="part", help=", ".join(PARTS))
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    if unknown := set(given.part) - set(PARTS):
        options.error(f"no such part: {', '.join(unknown)}")
    figures = measure(given.part or [*PARTS])
    if given.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=1))
        return
    for figure in figures:
        goal = f"goal {figure.goal:g}"
        print(f"{figure.name:<26} {figure.value:>7.2f} {figure.unit:<12} {goal}")


if __name__ == "__main__":
    main()
