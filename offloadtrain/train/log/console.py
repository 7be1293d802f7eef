"""Console output: one live line, or a plain line every few seconds; a bar for long preparations.

Everything goes to stderr: stdout is for data.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from offloadtrain.boundary.sanitize import sanitize, unfiltered
from offloadtrain.config.units import format_bytes, format_clock, format_duration, format_rate
from offloadtrain.runtime.heartbeat import HEARTBEAT

SILENCE_S = 8.0
"""Silence after which the current activity is printed."""
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """The figures of one step line; None is omitted.

    Attributes:
        eta_s: time left, evaluations and checkpoints included; NaN if unknown.
        now_s: Unix seconds.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens_per_s: float
    mfu: float | None
    exposed_ms: float
    device_bytes: int
    host_bytes: int
    eta_s: float
    now_s: float
    skipped: bool = False
    loss_scale: float | None = None
    val_loss: float | None = None


def format_step(line: StepLine) -> str:
    """Format one line, the most important first, so that truncation loses least."""
    parts = [
        f"step {line.step}/{line.steps} {100 * line.step // max(line.steps, 1)}%",
        f"eta {format_duration(line.eta_s)} ({format_clock(line.now_s + line.eta_s, line.now_s)})",
        f"loss {line.loss:.4f}",
        None if line.val_loss is None else f"val {line.val_loss:.4f}",
        "SKIPPED" if line.skipped else None,
        None if line.grad_norm is None else f"grad {line.grad_norm:.3g}",
        f"lr {line.lr:.2e}",
        format_rate(line.tokens_per_s, "tok"),
        None if line.mfu is None else f"mfu {100 * line.mfu:.1f}%",
        f"waits {line.exposed_ms:.1f}ms",
        None if line.loss_scale is None else f"scale {line.loss_scale:g}",
        f"dev {format_bytes(line.device_bytes)}",
        f"host {format_bytes(line.host_bytes)}",
    ]
    return "  ".join(part for part in parts if part is not None)


class Console:
    """Writes step lines and messages; a live line is rewritten in place, on a terminal only.

    A closed terminal ends the output, not the run.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        quiet: bool = False,
    ) -> None:
        """`every_s`: between plain lines; a live line is refreshed ten times a second at most.
        `quiet`: print nothing, since another rank does."""
        self._quiet = quiet
        self._stream = unfiltered(stream or sys.stderr)
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._interval_s = 0.1 if self._live else every_s
        self._clock = clock
        self._shown_s = -math.inf
        self._open = False
        self._silence_s = max(SILENCE_S, every_s)
        self._spoke_s = clock()
        self._doing, self._doing_since_s = "", clock()

    @contextmanager
    def never_silent(self, what: str) -> Iterator[None]:
        """Print the current activity, initially `what`, from a thread during silence."""
        self.doing(what)
        over = threading.Event()

        def look() -> None:
            while not over.wait(_LOOK_EVERY_S):
                self.fill_silence()

        thread = threading.Thread(target=look, name="silence", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def doing(self, what: str) -> None:
        """Set the current activity."""
        HEARTBEAT.enter(what)
        self._doing, self._doing_since_s = what, self._clock()

    def spoken(self) -> None:
        """Note that something else was printed."""
        self._spoke_s = self._clock()

    def fill_silence(self) -> None:
        """Print the current activity after a while of silence; how far it is at once, on a
        terminal."""
        now = self._clock()
        if now - self._spoke_s >= self._silence_s:
            spent = format_duration(now - self._doing_since_s)
            doing = ", ".join(filter(None, (self._doing, self._part())))
            self.say(f"... {doing}: {spent} so far")
        elif self._live and not self._quiet and (part := self._part()):
            self._show(f"... {part}")

    def _part(self) -> str:
        part = HEARTBEAT.part
        if part is None or part.done_bytes >= part.total_bytes:
            return ""
        done, total = format_bytes(part.done_bytes), format_bytes(part.total_bytes)
        return f"{part.what} {100 * part.done_bytes // part.total_bytes}% ({done} of {total})"

    def _show(self, text: str) -> None:
        """Rewrite the live line."""
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r\x1b[2K{text[:width]}")
        self._open = True

    def step(self, line: StepLine, *, force: bool = False) -> None:
        """Print a step if it is due, or if forced (the first and the last)."""
        now = self._clock()
        if not force and now - self._shown_s < self._interval_s:
            return
        self._shown_s = now
        text = format_step(line)
        if self._live:
            self._show(text)
        else:
            self._write(f"{text}\n")

    def say(self, text: str) -> None:
        """Print a message on its own lines, with visible control characters."""
        self.end_line()
        self._write(f"{sanitize(text)}\n")

    def end_line(self) -> None:
        """Keep the live line and continue below it."""
        if self._open:
            self._write("\n")
            self._open = False

    def _write(self, text: str) -> None:
        self.spoken()
        if self._quiet:
            return
        with suppress(OSError, ValueError):  # the pipe's reader has left, or the stream is closed
            # A paused terminal, or the full pipe of a pager, holds the run up: that is no hang.
            with HEARTBEAT.outside():
                self._stream.write(text)
                self._stream.flush()


_BAR_CELLS = 30
_TERMINAL_INTERVAL_S, _PLAIN_INTERVAL_S = 0.1, 5.0


class ProgressBar:
    """A bar on stderr if it is a terminal, otherwise a plain line now and then."""

    def __init__(self, label: str, on_shown: Callable[[], None] | None = None) -> None:
        """`on_shown`: called after each print."""
        self._label, self._on_shown = label, on_shown
        self._stream = unfiltered(sys.stderr)
        self._terminal = self._stream.isatty()
        self._shown_at = time.monotonic()
        self._shown = False

    def show(self, done_bytes: int, total_bytes: int) -> None:
        HEARTBEAT.advance(self._label, done_bytes, total_bytes)
        interval = _TERMINAL_INTERVAL_S if self._terminal else _PLAIN_INTERVAL_S
        now = time.monotonic()
        if now - self._shown_at < interval:
            return
        self._shown_at, self._shown = now, True
        share = done_bytes / total_bytes if total_bytes else 1.0
        cells = int(share * _BAR_CELLS)
        bar = "█" * cells + "░" * (_BAR_CELLS - cells)
        sizes = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
        text = sanitize(f"{self._label} {bar} {share:4.0%}  {sizes}")
        with suppress(OSError, ValueError):  # the pipe's reader has left
            print(f"\r{text}\x1b[K" if self._terminal else text, end="", file=self._stream)
            print(end="" if self._terminal else "\n", file=self._stream, flush=True)
        if self._on_shown is not None:
            self._on_shown()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End the line of the bar."""
        if self._terminal and self._shown:
            with suppress(OSError, ValueError):
                print("\r\x1b[K", end="", file=self._stream, flush=True)
