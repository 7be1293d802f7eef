"""The writer of a run log: training never waits for the disk. Standard library only."""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TypeAlias

from offloadtrain.boundary.safe_open import open_descriptor
from offloadtrain.boundary.safe_write import own_folder
from offloadtrain.events.log_lines import to_line
from offloadtrain.events.schema import Event, LaneSpan, RunEnded, Warning_
from offloadtrain.events.standby_thread import StandbyThread

RETRY_S = 0.5
END_WITHIN_S = 5.0
RESERVED_BYTES = 64 << 10

_Queued: TypeAlias = tuple[Event, float, int] | threading.Event | None


@dataclass(slots=True)
class _Losses:
    """The number of events that will never be in the log.

    Attributes:
        reported: of those, the number that the log reports.
        reported_before: `reported` when the disk began to refuse.
    """

    count: int = 0
    reported: int = 0
    reported_before: int = 0
    # Reentrant: a signal handler may emit.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self) -> None:
        with self._lock:
            self.count += 1


class _LogFile:
    """The open log, and the space that is reserved for its last record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd, self._torn = _open_log(path)
        self._reserve = _reserved(path.parent)

    def append(self, line: bytes) -> None:
        """Append with one call, or more after a partial write.

        Raises:
            OSError: the disk refuses; the last line may be torn.
        """
        rest = b"\n" + line if self._torn else line
        while rest:
            rest = rest[os.write(self._fd, rest) :]
            self._torn = bool(rest)

    def is_removed(self) -> bool:
        """Return whether the file was removed or renamed."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return True
        except OSError:
            return False  # the disk fails: the next write reports it

    def make_again(self) -> None:
        """Write to a new file of this name from now on.

        Raises:
            OSError: it cannot be made; the removed one stays open.
        """
        own_folder(self.path.parent)
        fd, torn = _open_log(self.path)
        os.close(self._fd)
        self._fd, self._torn = fd, torn

    def release_reserve(self) -> None:
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None

    def close(self) -> None:
        with suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)
        self.release_reserve()


class EventWriter:
    """Appends records to one log from its own thread; training never waits for the disk.

    [Note: who owns an event] `emit` takes ownership of the event: it is formatted later, on the
    writer's thread, so dicts in it must not change afterwards. One queue connects the two threads.
    When it is full, new events are dropped and counted; spans, which come in hundreds, are dropped
    while a quarter of it is still free, so that they never push a step out.

    [Note: A disk that refuses] A record refused by a full disk is retried every RETRY_S, and later
    ones wait in the queue: only records beyond its capacity are lost. When writing
    succeeds again, a record reports their number. A run that ends meanwhile waits
    END_WITHIN_S for the disk; then the rest is lost too, except its `RunEnded`, for which
    RESERVED_BYTES were reserved in an unnamed file when the log was opened.

    [Note: A log that is removed] Training does not end because somebody removes its log. Before
    each record the writer compares the file at the log's path with the open one. If they differ,
    it makes the folder and the file again; the new log begins with a warning. If it cannot, it
    continues in the open file, which may have been renamed together with the run folder.

    Attributes:
        error: the current error of the disk, or None.
    """

    def __init__(
        self,
        path: str | Path | None,
        rank: int = 0,
        capacity: int = 4096,
        on_error: Callable[[OSError], None] | None = None,
        on_recovery: Callable[[int], None] | None = None,
        on_removed: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the log for appending, with mode 0600 if it is new.

        Args:
            path: None: events are held until `open`.
            on_error: called once, on the writer's thread, when the disk begins to refuse.
            on_recovery: called there with the number of lost events, when the rest is written.
            on_removed: called there with a sentence, once each time the log is removed or renamed.
            clock: the time of a record, in Unix seconds.

        Raises:
            OSError: the log cannot be opened.
        """
        self.error: OSError | None = None
        self._rank, self._clock = rank, clock
        self._capacity = capacity
        self._on_error, self._on_recovery, self._on_removed = on_error, on_recovery, on_removed
        self._queue: SimpleQueue[_Queued] = SimpleQueue()
        self._losses = _Losses()
        self._refused: OSError | None = None  # until the recovery was reported
        self._reported_removal = False
        self._give_up_s = math.inf
        self._closed = False
        self._thread = StandbyThread("event-writer")
        if path is not None:
            try:
                self.open(path)
            except OSError:
                self._thread.begin(lambda: None)  # ends it
                raise

    def open(self, path: str | Path) -> None:
        """Start writing, beginning with the held events.

        Raises:
            OSError: the log cannot be opened.
        """
        self._file = _LogFile(Path(path))
        self._thread.begin(self._run)

    @property
    def dropped(self) -> int:
        """Number of events that will never be in the log."""
        return self._losses.count

    def emit(self, event: Event) -> None:
        """Queue an event with the current time; never blocks and never raises."""
        limit = self._capacity * 3 // 4 if type(event) is LaneSpan else self._capacity
        if self._closed or (self._queue.qsize() >= limit and type(event) is not RunEnded):
            self._losses.add()
        else:
            self._queue.put((event, self._clock(), time.monotonic_ns()))
        if type(event) is RunEnded:
            self._give_up_s = min(self._give_up_s, time.monotonic() + END_WITHIN_S)

    def flush(self, timeout_s: float = 2 * END_WITHIN_S) -> bool:
        """Wait until all earlier events are written; False if that took too long."""
        done = threading.Event()
        if self._thread.begun and self._thread.is_alive():
            self._queue.put(done)
            return done.wait(timeout_s)
        return True

    def close(self, timeout_s: float = 2 * END_WITHIN_S) -> None:
        """Write the queue, and a warning if events were dropped; a second call does nothing.

        A hanging disk is abandoned after `timeout_s`.
        """
        if not self._closed:
            self._closed = True
            self._give_up_s = min(self._give_up_s, time.monotonic() + END_WITHIN_S)
            self._queue.put(None)
            self._thread.begin(lambda: None)  # unless it writes
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._write(*item)
                if self._queue.empty():
                    self._report_losses()
        self._report_losses()
        self._file.close()

    def _write(self, event: Event, time_s: float, monotonic_ns: int) -> None:
        self._restore_removed_log()
        try:
            line = to_line(event, self._rank, time_s, monotonic_ns)
        except (TypeError, ValueError, RecursionError) as error:
            warning = Warning_(code="event-unwritable", message=f"{event.KIND}: {error}")
            line = to_line(warning, self._rank, time_s, monotonic_ns)
        while not self._appended(line):
            if time.monotonic() >= self._give_up_s:
                if type(event) is not RunEnded or not self._end_anyway(line):
                    self._losses.add()
                return
            time.sleep(RETRY_S)

    def _restore_removed_log(self) -> None:
        """Make the log again if it was removed or renamed; see [Note: A log that is removed]."""
        if not self._file.is_removed():
            self._reported_removal = False
            return
        message = f"{self._file.path} was removed or renamed during the run: "
        try:
            self._file.make_again()
        except OSError as error:
            if not self._reported_removal and self._on_removed:
                self._on_removed(
                    f"{message}it cannot be made again ({error.strerror}); training continues, "
                    "later records are in the removed file"
                )
            self._reported_removal = True
            return
        message += "training continues with a new log, without the records before"
        self._appended(self._warning_line("log-removed", message))
        if self._on_removed:
            self._on_removed(message)

    def _appended(self, line: bytes) -> bool:
        """Append a line; return whether the disk has taken it."""
        try:
            self._file.append(line)
        except OSError as error:
            if not self._refused:
                self._losses.reported_before = self._losses.reported
                if self._on_error:
                    self._on_error(error)
            self.error = self._refused = error
            return False
        self.error = None
        return True

    def _end_anyway(self, line: bytes) -> bool:
        """Write the last record on a full disk, after a record of the losses."""
        self._file.release_reserve()
        lost = self._losses.count - self._losses.reported
        if not self._appended((self._lost_line() if lost else b"") + line):
            return False
        self._losses.reported += lost
        return True

    def _report_losses(self) -> None:
        """Record the losses, once the disk accepts writes again."""
        if self.error:
            return
        lost = self._losses.count - self._losses.reported
        if lost and self._appended(self._lost_line()):
            self._losses.reported += lost
        if self._refused and self._on_recovery and not self.error:
            self._on_recovery(self._losses.count - self._losses.reported_before)
        self._refused = self.error

    def _lost_line(self) -> bytes:
        lost = self._losses.count - self._losses.reported
        message = f"{lost} events were dropped: the log's disk was slower than the run"
        if self._refused:
            message = f"{lost} events were lost: the log's disk refused ({self._refused.strerror})"
        return self._warning_line("events-dropped", message)

    def _warning_line(self, code: str, message: str) -> bytes:
        warning = Warning_(code=code, message=message)
        return to_line(warning, self._rank, time.time(), time.monotonic_ns())


def _open_log(path: str | Path) -> tuple[int, bool]:
    """Open for appending; return also whether a crash of an earlier run tore its last line."""
    fd = open_descriptor(path, flags=os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(fd).st_size
        return fd, bool(size) and os.pread(fd, 1, size - 1) != b"\n"
    except OSError:
        os.close(fd)
        raise


def _reserved(folder: Path) -> IO[bytes] | None:
    """Reserve space on the log's disk with incompressible bytes; None: there is no space now. The
    kernel frees it when the process ends, however it ends."""
    try:
        file = tempfile.TemporaryFile(buffering=0, dir=folder)
        file.write(os.urandom(RESERVED_BYTES))
    except OSError:
        return None
    return file
