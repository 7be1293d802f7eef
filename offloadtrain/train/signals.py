"""Stop signals of a run's process.

Ctrl-C, SIGTERM from Slurm, Kubernetes or systemd, and SIGHUP of a lost terminal request a stop.
SIGUSR1 requests a checkpoint, and training goes on. Nothing here imports torch.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType, TracebackType

REPEAT_S = 0.25
"""A stop so soon after the first is the same one: a terminal sends Ctrl-C to all of a group, and
programs that start others may pass it on."""

_watched: set[int] = set()
"""Ends for writing of the watches that this process has begun."""


class SecondStop:
    """Watches for the signals `numbers` in a thread of its own.

    Python runs handlers between two instructions of the main thread: never while that waits in a
    call of C, for the device or for a lock, and late where a signal comes just before such a call.
    What is read here the interpreter writes when the signal arrives.
    """

    def __init__(
        self,
        numbers: Collection[int],
        first: Callable[[int], object],
        again: Callable[[], object],
    ) -> None:
        """Begin, in the main thread. `first`: called in the thread with the first stop; `again`:
        at each one that comes `REPEAT_S` after it or later.

        Raises:
            ValueError: this is not the main thread.
        """
        self.repeated = 0  # first stops that this process has sent itself once more
        self._numbers, self._first, self._again = frozenset(numbers), first, again
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        _watched.add(self._writer)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="second stop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look at the signals that have come, and at no more."""
        signal.set_wakeup_fd(self._before)
        _watched.discard(self._writer)
        os.close(self._writer)
        self._thread.join()  # it ends with the pipe
        os.close(self._reader)

    def _watch(self) -> None:
        first_s, repeats = None, 0
        while byte := os.read(self._reader, 1):
            now_s = time.monotonic()
            if byte[0] not in self._numbers:
                continue
            if first_s is None:
                first_s = now_s
                self._first(byte[0])
            elif repeats < self.repeated:
                repeats += 1
            elif now_s - first_s >= REPEAT_S:
                self._again()


def _leave_to_the_parent() -> None:
    """Signals of a forked child (a data loader's worker) are not those of its parent."""
    before = signal.set_wakeup_fd(-1)
    if before not in _watched:
        signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_leave_to_the_parent)

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STDERR = 2
_IMPORT_WAIT_S = 0.05
"""Time after which a stop that came in the midst of an import is looked at again."""


@contextmanager
def signals_handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals by a function inside, except a SIGHUP that is ignored (nohup)."""
    before = {number: signal.getsignal(number) for number in numbers}
    for number in before:
        if number != signal.SIGHUP or before[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class StoppedEarlyError(BaseException):
    """A stop was requested before the first step: there is nothing to save.

    No Exception: code that building calls may take those for its own failures.
    """


class StopRequests:
    """While entered, signals are requests; the second stop ends the process at once.

    Until `defer` a stop raises StoppedEarlyError: building ends where it is, or after the import
    that is under way (whoever imports half a module again may find anything; numpy calls itself
    without end). From then on it is only noted: the loop checks `requested` between two steps,
    where the state is consistent. A run that is ended at once (status 1, nothing is saved) keeps
    its last checkpoint, which is never half written. Outside the main thread signals are not
    handled: Python does not allow it.

    Attributes:
        requested: the name of the signal that requested a stop.
        wants_checkpoint: SIGUSR1 has come; whoever saves sets it back.
    """

    def __init__(self, *, aborts: bool = True, quiet: bool = False) -> None:
        """`aborts`: a second stop ends the process; false for ranks, whose launcher does that: a
        scheduler may signal all of them and the launcher too. `quiet`: another rank says it."""
        self.requested: str | None = None
        self.wants_checkpoint = False
        self._aborts, self._quiet, self._deferred = aborts, quiet, False
        self._second: SecondStop | None = None
        self._waits_for_import = False
        self._waiting: threading.Timer | None = None
        self._handled = ExitStack()

    @property
    def stops_building(self) -> bool:
        """A stop has come before `defer`."""
        return self.requested is not None and not self._deferred

    def defer(self) -> None:
        """From now on only note stops.

        Raises:
            StoppedEarlyError: one has come, and was lost where exceptions are (a finalizer).
        """
        self._deferred = True
        self._look_no_more()
        if self.requested:
            raise StoppedEarlyError(self.requested)

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            handle = self._handled.enter_context
            handle(signals_handled(_STOPS, self._note))
            handle(signals_handled((signal.SIGUSR1,), self._note_checkpoint))
            self._second = SecondStop(_STOPS, self._tell, _end_at_once) if self._aborts else None
            # A launcher has blocked them until here.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_STOPS, signal.SIGUSR1))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._look_no_more()
        self._handled.close()
        if self._second is not None:
            self._second.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        # os.write, not print: the signal may have come in the middle of a print.
        again, self._waits_for_import = self._waits_for_import, False
        if self.requested and not again:
            return  # SecondStop hears it
        self.requested = signal.Signals(number).name
        if not self._deferred:
            self._end_building(number, frame)
        elif self._second is None:
            self._tell(number)

    def _tell(self, number: int) -> None:
        """Say what a first stop does, also from SecondStop's thread, while this one waits in C."""
        if self._deferred and not self._quiet:
            name = signal.Signals(number).name
            _write(f"{name}: stopping after this step, with a checkpoint; repeat: end at once")

    def _end_building(self, number: int, frame: FrameType | None) -> None:
        """Raise StoppedEarlyError, now or after the import that the signal has interrupted."""
        if not _imports(frame):
            raise StoppedEarlyError(str(self.requested))

        def look_again() -> None:
            self._waits_for_import = True
            if self._second is not None:
                self._second.repeated += 1
            # As a signal: a call that blocks is woken.
            signal.pthread_kill(threading.main_thread().ident or 0, number)

        self._waiting = threading.Timer(_IMPORT_WAIT_S, look_again)
        self._waiting.daemon = True
        self._waiting.start()

    def _look_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def _note_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self.wants_checkpoint = True


def _imports(frame: FrameType | None) -> bool:
    """Return whether a module is being imported below this frame."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def told_early(error: StoppedEarlyError) -> str:
    return f"{error}: stopped before the first step; the same command starts again"


def _end_at_once() -> None:
    _write("ended at once; saved checkpoints are intact")
    os._exit(1)


def _write(note: str) -> None:
    with suppress(OSError):  # the terminal is gone, which is what SIGHUP says
        os.write(_STDERR, f"\n{note}\n".encode())
