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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from offloadtrain_tui import command
from offloadtrain_tui.app import Monitor
from offloadtrain_tui.reading import log_reader
from offloadtrain_tui.reading.log_reader import NEWS_OVER_SSH_S, NEWS_S
from offloadtrain_tui.reading.runs import open_run

from offloadtrain.cli.main import main
from offloadtrain.events import schema
from tests.tui.recordings import BEGIN_S, StoppedClock, lines, plain, write

ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS, ROWS = 110, 34
HANGS_S = 180.0
FRAME = b"\x1b[?2026h"
"""Begin of a synchronized update: the terminal shows what follows at once."""
CLEARED = re.compile(rb"\x1b\[[23]J")
COLOR = re.compile(rb"[34]8;2;(\d+);(\d+);(\d+)")


class Terminal:
    """The master side: everything that was written."""

    def __init__(self, master: int) -> None:
        self.master = master
        self.read: list[bytes] = []

    def watch(self, seconds: float) -> bytes:
        """What is written in so many seconds."""
        began, until = len(self.read), time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                self.read.append(os.read(self.master, 1 << 16))
                self._answer(self.read[-1])
        return b"".join(self.read[began:])

    def until(
        self, text: bytes, *, times: int = 1, since: int = 0, sending: bytes | None = None
    ) -> bytes:
        """What is written from here, or from piece `since` on, until it holds a text so often. A
        terminal that never shows it ends the test after minutes: a busy machine takes its time.
        `sending`: sent now and every few seconds, as a user does whose click found nothing yet."""
        deadline, next_send = time.monotonic() + HANGS_S, time.monotonic()
        while (written := b"".join(self.read[since:])).count(text) < times:
            assert time.monotonic() < deadline, written[-2000:]
            if sending is not None and time.monotonic() >= next_send:
                self.send(sending)
                next_send = time.monotonic() + 3
            self.watch(0.05)
        return written

    def send(self, keys: bytes) -> None:
        os.write(self.master, keys)

    @property
    def everything(self) -> bytes:
        return b"".join(self.read)

    def _answer(self, written: bytes) -> None:
        """A terminal that knows synchronized updates says so when it is asked."""
        if b"\x1b[?2026$p" in written:
            self.send(b"\x1b[?2026;2$y")


@contextmanager
def monitor(run: Path, **environ: str) -> Iterator[Terminal]:
    """`offloadtrain tui` in a terminal of its own."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    # A process that has loaded readline has the size of its own terminal in the environment.
    unset = ("NO_COLOR", "SSH_CONNECTION", "COLUMNS", "LINES")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    known = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        [sys.executable, "-m", "offloadtrain", "tui", str(run)],
        cwd=ROOT,
        env=environment | known | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tui'}"} | environ,
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
    lines_before = [
        line for line in log.read_bytes().splitlines(keepends=True) if b"run_ended" not in line
    ]
    log.write_bytes(b"".join(lines_before))

    def grow() -> None:
        number = 60
        with log.open("ab", buffering=0) as file:
            while not ended.wait(1 / per_s):
                number += 1
                step = schema.Step(step=number, loss=2.0 + 1 / number, lr=1e-3, tokens=number)
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
    drawn = {match.groups() for match in COLOR.finditer(terminal.everything)}
    return {color for color in drawn if len(set(color)) > 1}


SHOWN = {
    "2": b"planned",
    "3": b"GB/s",
    "4": b"adam",
    "5": b"tokens/s",
    "6": b"skew",
    "7": b"run_started",
    "8": b"d_model",
    "9": b"runs",
    "1": b"gradient norm",
}
"""A word of each screen, by the key that opens it."""


def test_no_color_means_greys(run: Path) -> None:
    """On every screen: each kind of widget draws its own lines."""
    with monitor(run, NO_COLOR="1") as grey:
        for key, word in SHOWN.items():
            began = len(grey.read)
            grey.send(key.encode())
            grey.until(word, since=began)
    assert b"Traceback" not in grey.everything
    assert COLOR.search(grey.everything) and not colors(grey)


def test_nothing_flickers(run: Path) -> None:
    """News are drawn over what is there, a frame at a time; nothing is cleared first."""
    with growing(run), monitor(run) as terminal:
        terminal.until(FRAME, times=4)
        began = len(terminal.read)
        written = terminal.until(FRAME, times=8, since=began)
        opened = b"".join(terminal.read[:began])
    assert not CLEARED.search(written)
    written = written[written.index(FRAME) : written.rindex(FRAME)]  # whole frames
    outside = re.sub(re.escape(FRAME) + rb".*?\x1b\[\?2026l", b"", written, flags=re.DOTALL)
    assert len(outside) < 0.02 * len(written)
    largest = max(map(len, opened.split(FRAME)))  # the first ones draw the whole screen
    assert len(written) < 0.7 * largest * written.count(FRAME)


@pytest.mark.parametrize(
    ("connection", "news_s"), [("", NEWS_S), ("10.0.0.1 50000 10.0.0.2 22", NEWS_OVER_SSH_S)]
)
def test_over_ssh_news_come_once_a_second(
    run: Path, monkeypatch: pytest.MonkeyPatch, connection: str, news_s: float
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", connection)
    started: list[Monitor] = []
    monkeypatch.setattr(command, "_in_terminal", lambda app, _: started.append(app))
    main(["tui", str(run)])
    assert started[0].reader._news_s == news_s


def test_news_come_at_most_at_the_chosen_rate(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that this test moves."""
    now_s, looks = 100.0, 0

    def monotonic() -> float:
        nonlocal looks
        looks += 1
        return now_s

    monkeypatch.setattr(log_reader, "time", SimpleNamespace(monotonic=monotonic))
    news = threading.Semaphore(0)
    reader = log_reader.Reader([open_run(run)], StoppedClock(BEGIN_S), news.release, news_s=1.0)
    reader.start()
    assert news.acquire(timeout=HANGS_S)
    log = run / "events/rank000.jsonl"
    with log.open("ab") as file:
        file.write(lines([(BEGIN_S + 99, schema.Step(step=61, loss=2.0, lr=1e-3, tokens=61))])[0])
    now_s += 0.9
    looks_before = looks
    until(lambda: reader.read_bytes == log.stat().st_size and looks > looks_before + 4)
    assert not news.acquire(blocking=False), "read, and not reported"
    now_s += 0.1
    assert news.acquire(timeout=HANGS_S)
    reader.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def click(column: int, row: int) -> bytes:
    """A press and a release of the left button, as a terminal reports them."""
    place = f"{column + 1};{row + 1}"
    return f"\x1b[<0;{place}M\x1b[<0;{place}m".encode()


def test_a_mouse_is_enough(run: Path) -> None:
    """A click on a name in the footer opens a screen; one into a chart goes to that step."""
    with monitor(run) as terminal:
        terminal.until(b"memory")
        # "1 overview 2 memory"
        terminal.until(b"planned", sending=click(15, ROWS - 1))
        began = len(terminal.read)
        terminal.send(b"5")
        terminal.until(SHOWN["5"], since=began)
        terminal.until(b"before the newest", sending=click(30, 10))
    assert colors(terminal)  # that there are none without colors can fail
