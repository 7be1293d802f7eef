"""The monitor on a real terminal: what it writes there, byte by byte."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offloadtrain import events
from tests.tui.recordings import lines, plain, write

ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS, ROWS = 110, 34
FRAME = b"\x1b[?2026h"
"""Begin of a synchronized update: the terminal shows what follows at once."""
CLEARED = re.compile(rb"\x1b\[[23]J")
COLOR = re.compile(rb"[34]8;2;(\d+);(\d+);(\d+)")


class Terminal:
    """The master side: everything that was written, with its time."""

    def __init__(self, master: int) -> None:
        self.master = master
        self.read: list[tuple[float, bytes]] = []

    def watch(self, seconds: float) -> bytes:
        """What is written in so many seconds."""
        began, until = len(self.read), time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                self.read.append((time.monotonic(), os.read(self.master, 1 << 16)))
                self._answer(self.read[-1][1])
        return b"".join(piece for _, piece in self.read[began:])

    def until(self, text: bytes, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.everything:
            assert time.monotonic() < deadline, self.everything[-2000:]
            self.watch(0.1)

    def send(self, keys: bytes) -> None:
        os.write(self.master, keys)

    @property
    def everything(self) -> bytes:
        return b"".join(piece for _, piece in self.read)

    def _answer(self, written: bytes) -> None:
        """A terminal that knows synchronized updates says so when it is asked."""
        if b"\x1b[?2026$p" in written:
            self.send(b"\x1b[?2026;2$y")


@contextmanager
def monitor(run: Path, **environ: str) -> Iterator[Terminal]:
    """`offloadtrain tui` in a terminal of its own."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "SSH_CONNECTION")}
    known = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        [sys.executable, "-m", "offloadtrain", "tui", str(run)],
        cwd=ROOT,
        env=kept | known | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tui'}"} | environ,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    terminal = Terminal(master)
    try:
        terminal.until(b"gradient norm")
        yield terminal
    finally:
        process.kill()
        process.wait()
        os.close(master)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "20261121-080000-demo", plain(60))


@contextmanager
def growing(run: Path, per_s: float = 20.0) -> Iterator[None]:
    """A step is appended to the log so many times a second."""
    log, ended = run / "events" / "rank000.jsonl", threading.Event()
    kept = [line for line in log.read_bytes().splitlines(keepends=True) if b"run_ended" not in line]
    log.write_bytes(b"".join(kept))

    def grow() -> None:
        number = 60
        with log.open("ab", buffering=0) as file:
            while not ended.wait(1 / per_s):
                number += 1
                step = events.Step(step=number, loss=2.0 + 1 / number, lr=1e-3, tokens=number)
                file.write(b"".join(lines([(time.time(), step)])))

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def colors(terminal: Terminal) -> set[tuple[bytes, ...]]:
    """Those that are no grey."""
    found = {match.groups() for match in COLOR.finditer(terminal.everything)}
    return {color for color in found if len(set(color)) > 1}


def test_no_color_means_greys(run: Path) -> None:
    """On every screen: each kind of widget draws its own lines."""
    with monitor(run, NO_COLOR="1") as grey:
        for key in b"123456789":
            grey.send(bytes([key]))
            grey.watch(0.4)
    assert b"Traceback" not in grey.everything
    assert COLOR.search(grey.everything) and not colors(grey)
    with monitor(run) as terminal:
        terminal.watch(0.5)
    assert colors(terminal)  # the check above can fail


def test_nothing_flickers(run: Path) -> None:
    """News are drawn over what is there, a frame at a time; nothing is cleared first."""
    with growing(run), monitor(run) as terminal:
        terminal.watch(1.5)
        written = terminal.watch(3.0)
    assert written and not CLEARED.search(written)
    assert written.count(FRAME) >= 2  # otherwise this terminal was not asked
    outside = re.sub(re.escape(FRAME) + rb".*?\x1b\[\?2026l", b"", written, flags=re.DOTALL)
    assert len(outside) < 0.02 * len(written)
    assert len(written) < 3 * COLUMNS * ROWS * 30  # not the whole screen at every frame


def test_over_ssh_it_draws_once_a_second(run: Path) -> None:
    def frames(terminal: Terminal, seconds: float = 4.0) -> list[float]:
        """When something was drawn; what comes within a tenth of a second is one."""
        terminal.watch(1.5)
        began = len(terminal.read)
        terminal.watch(seconds)
        times: list[float] = []
        for at, _ in terminal.read[began:]:
            if not times or at - times[-1] > 0.1:
                times.append(at)
        return times

    with growing(run):
        with monitor(run, SSH_CONNECTION="10.0.0.1 50000 10.0.0.2 22") as terminal:
            over_ssh = frames(terminal)
        with monitor(run) as terminal:
            here = frames(terminal)
    assert 3 <= len(over_ssh) <= 10  # the news, and the clock's own second
    assert len(here) > 1.2 * len(over_ssh)


def click(column: int, row: int) -> bytes:
    """A press and a release of the left button, as a terminal reports them."""
    place = f"{column + 1};{row + 1}"
    return f"\x1b[<0;{place}M\x1b[<0;{place}m".encode()


def test_a_mouse_is_enough(run: Path) -> None:
    """A click on a name in the footer opens a screen; one into a chart goes to that step."""
    with monitor(run) as terminal:
        terminal.watch(1.0)
        terminal.send(click(16, ROWS - 1))  # " 1 overview  2 memory"
        terminal.until(b"planned")
        terminal.send(b"5")
        terminal.watch(1.0)
        terminal.send(click(30, 10))
        terminal.until(b"before the newest")
