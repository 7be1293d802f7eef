"""A progress bar on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress

from offloadtrain.boundary.sanitize import sanitize, unfiltered
from offloadtrain.config.units import format_bytes
from offloadtrain.runtime.heartbeat import HEARTBEAT

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
