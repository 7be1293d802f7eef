"""The writer of a run log: training never waits for the disk. Standard library only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

from offloadtrain.events import Event, Span, Warning_, to_line

_Queued: TypeAlias = tuple[Event, float, int] | threading.Event | None


class EventWriter:
    """Appends records to one log from a thread of its own; training never waits for the disk.

    [Note: who owns an event] `emit` takes the event over: it is formatted later, on the writer's
    thread, so dicts in it must not change afterwards. Between the two threads lies one queue. When
    it is full, new events are dropped and counted; spans, which come in hundreds, are dropped
    while a quarter of it is still free, so that they never push a step out. If the disk refuses
    (it is full), the writer stops for good, remembers `error`, and goes on emptying the queue.

    Attributes:
        error: the first refusal of the disk, or None.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int = 0,
        capacity: int = 4096,
        on_error: Callable[[OSError], None] | None = None,
    ) -> None:
        """Open the log for appending, with mode 0600 if it is new.

        Args:
            on_error: called once, on the writer's thread, when the disk refuses.

        Raises:
            OSError: the log cannot be opened.
        """
        self.error: OSError | None = None
        self._fd = _open_log(path)
        self._rank = rank
        self._capacity = capacity
        self._on_error = on_error
        self._queue: SimpleQueue[_Queued] = SimpleQueue()
        self._drop_lock = threading.RLock()  # reentrant: a signal handler may emit
        self._dropped = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="event-writer", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Events that will never be in the log."""
        return self._dropped

    def emit(self, event: Event) -> None:
        """Queue an event with the time of now; never blocks and never raises."""
        limit = self._capacity * 3 // 4 if type(event) is Span else self._capacity
        if self._closed or self._queue.qsize() >= limit:
            self._count_drop()
        else:
            self._queue.put((event, time.time(), time.monotonic_ns()))

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all that was emitted before is written; False if that took too long."""
        done = threading.Event()
        if self._thread.is_alive():
            self._queue.put(done)
            return done.wait(timeout_s)
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued and a warning if anything was dropped; a second call does nothing.

        A disk that hangs is left behind after `timeout_s`.
        """
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._write(*item)
        if self._dropped:
            self._write(_dropped_warning(self._dropped), time.time(), time.monotonic_ns())
        with suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)

    def _write(self, event: Event, time_s: float, monotonic_ns: int) -> None:
        if self.error:
            self._count_drop()
            return
        try:
            line = to_line(event, self._rank, time_s, monotonic_ns)
        except (TypeError, ValueError, RecursionError) as error:
            warning = Warning_(code="event-unwritable", message=f"{event.KIND}: {error}")
            line = to_line(warning, self._rank, time_s, monotonic_ns)
        try:
            _write_line(self._fd, line)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        self.error = error
        self._count_drop()
        if self._on_error:
            self._on_error(error)

    def _count_drop(self) -> None:
        with self._drop_lock:
            self._dropped += 1


def _open_log(path: str | Path) -> int:
    """Open for appending; a line torn by a crash of an earlier run is ended first."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")
    except OSError:
        os.close(fd)
        raise
    return fd


def _write_line(fd: int, line: bytes) -> None:
    """Write the line with one call; more only where the disk took a part of it."""
    while line:
        line = line[os.write(fd, line) :]


def _dropped_warning(count: int) -> Warning_:
    message = f"{count} events were dropped: the log's disk was slower than the run"
    return Warning_(code="events-dropped", message=message)
