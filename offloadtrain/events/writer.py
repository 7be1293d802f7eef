"""The writer of a run log: training never waits for the disk. Standard library only."""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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


class _LogFile:
    """The open log, and disk space reserved for its last record.

    Attributes:
        reported_removal: a message has said that the log was removed and cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.reported_removal = path, False
        self._fd, self._torn = _open_log(path)
        self._reserve = _reserved(path.parent)

    def append(self, line: bytes) -> None:
        """Append a line with one call, or with several after a partial write.

        Raises:
            OSError: the disk refuses; the last line may be torn.
        """
        rest = b"\n" + line if self._torn else line
        while rest:
            rest = rest[os.write(self._fd, rest) :]
            self._torn = bool(rest)

    def is_removed(self) -> bool:
        """Return True if the file was removed or renamed."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return True
        except OSError:
            return False  # the disk fails: the next write reports it

    def make_again(self) -> None:
        """Write to a new file with this name from now on.

        Raises:
            OSError: it cannot be created; the removed file stays open.
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

    [Note: A disk that refuses] A record refused by a full disk is retried every RETRY_S, while
    later records wait in the queue: only records beyond its capacity are lost. When writing
    succeeds again, a record reports their number. A run that ends during that time waits
    END_WITHIN_S for the disk; then the remaining records are lost as well, except `RunEnded`, for
    which RESERVED_BYTES were reserved in an unnamed file when the log was opened.

    [Note: A log that is removed] Training does not end because somebody removes its log. Before
    each record the writer compares the file at the log's path with the open one. If they differ,
    it creates the folder and the file again; the new log begins with a warning. If it cannot, it
    continues in the open file, which may have been renamed together with the run folder.

    Attributes:
        error: the current error of the disk, or None.
        dropped: number of events that will never be in the log.
    """

    def __init__(
        self,
        rank: int = 0,
        capacity: int = 4096,
        say: Callable[[str], object] = lambda sentence: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Queue events until `open`.

        Args:
            say: called with a sentence, on the writer's thread, when the disk begins to refuse,
                when writing succeeds again, and each time the log is removed or renamed.
            clock: time of a record, in Unix seconds.
        """
        self.error: OSError | None = None
        self.dropped = self._reported = 0
        self._lock = threading.RLock()  # for `dropped`; reentrant, since a signal handler may emit
        self._rank, self._clock, self._say = rank, clock, say
        self._capacity = capacity
        self._queue: SimpleQueue[_Queued] = SimpleQueue()
        self._refused: OSError | None = None  # until the recovery is reported
        self._give_up_s = math.inf
        self._closed = False
        self._thread = StandbyThread("event-writer")

    def open(self, path: Path) -> None:
        """Open the log for appending, with mode 0600 if it is new, and write the queued events
        and all later ones.

        Raises:
            OSError: the log cannot be opened.
        """
        self._file = _LogFile(path)
        self._thread.begin(self._run)

    def emit(self, event: Event) -> None:
        """Queue an event with the current time; never blocks and never raises."""
        limit = self._capacity * 3 // 4 if type(event) is LaneSpan else self._capacity
        if self._closed or (self._queue.qsize() >= limit and type(event) is not RunEnded):
            self._lose()
        else:
            self._queue.put((event, self._clock(), time.monotonic_ns()))
        if type(event) is RunEnded:
            self._give_up_s = min(self._give_up_s, time.monotonic() + END_WITHIN_S)

    def flush(self, timeout_s: float = 2 * END_WITHIN_S) -> bool:
        """Wait until all earlier events are written; return False on a timeout."""
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
            self._thread.begin(lambda: None)  # ends it if the log was never opened
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
                    self._lose()
                return
            time.sleep(RETRY_S)

    def _lose(self) -> None:
        with self._lock:
            self.dropped += 1

    def _restore_removed_log(self) -> None:
        """Create the log again if it was removed or renamed; see [Note: A log that is removed]."""
        if not self._file.is_removed():
            self._file.reported_removal = False
            return
        message = f"{self._file.path} was removed or renamed during the run: "
        try:
            self._file.make_again()
        except OSError as error:
            if not self._file.reported_removal:
                self._say(
                    f"warning: {message}it cannot be made again ({error.strerror}); training "
                    "continues, later records are in the removed file"
                )
            self._file.reported_removal = True
            return
        message += "training continues with a new log, without the records before"
        self._appended(self._warning_line("log-removed", message))
        self._say(f"warning: {message}")

    def _appended(self, line: bytes) -> bool:
        """Append a line; return True if the disk accepted it."""
        try:
            self._file.append(line)
        except OSError as error:
            if not self._refused:
                self._reported_before = self._reported
                self._say(
                    f"warning: the event log cannot be written ({error.strerror}): training "
                    "continues, and writes are retried until the run ends"
                )
            self.error = self._refused = error
            return False
        self.error = None
        return True

    def _end_anyway(self, line: bytes) -> bool:
        """Write the last record on a full disk, preceded by a record of the losses."""
        self._file.release_reserve()
        lost = self.dropped - self._reported
        if not self._appended((self._lost_line() if lost else b"") + line):
            return False
        self._reported += lost
        return True

    def _report_losses(self) -> None:
        """Record the losses once the disk accepts writes again."""
        if self.error:
            return
        lost = self.dropped - self._reported
        if lost and self._appended(self._lost_line()):
            self._reported += lost
        if self._refused and not self.error:
            lost = self.dropped - self._reported_before
            self._say(f"the event log is being written again; {lost} records were lost")
        self._refused = self.error

    def _lost_line(self) -> bytes:
        lost = self.dropped - self._reported
        message = f"{lost} events were dropped: the log's disk was slower than the run"
        if self._refused:
            message = f"{lost} events were lost: the log's disk refused ({self._refused.strerror})"
        return self._warning_line("events-dropped", message)

    def _warning_line(self, code: str, message: str) -> bytes:
        warning = Warning_(code=code, message=message)
        return to_line(warning, self._rank, time.time(), time.monotonic_ns())


def _open_log(path: Path) -> tuple[int, bool]:
    """Open for appending; return (descriptor, True if a crash tore the last line)."""
    fd = open_descriptor(path, flags=os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(fd).st_size
        return fd, bool(size) and os.pread(fd, 1, size - 1) != b"\n"
    except OSError:
        os.close(fd)
        raise


def _reserved(folder: Path) -> IO[bytes] | None:
    """Reserve space on the log's disk with incompressible bytes; None if there is no space. The
    kernel frees it when the process ends, however it ends."""
    try:
        file = tempfile.TemporaryFile(buffering=0, dir=folder)
        file.write(os.urandom(RESERVED_BYTES))
    except OSError:
        return None
    return file
