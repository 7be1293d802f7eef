"""Stop signals of a run's process.

Ctrl-C, SIGTERM from Slurm, Kubernetes or systemd, and SIGHUP of a lost terminal request a stop.
SIGUSR1 requests a checkpoint, and training continues. Nothing here imports torch.
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
"""A second stop within this time counts as the first: a terminal sends Ctrl-C to its process
group, and programs that start others may pass it on."""

_watched: set[int] = set()
"""Write ends of the pipes of all active `SecondStop` objects in this process."""


class SecondStop:
    """Watches for the signals `numbers` in its own thread.

    Python runs handlers between two instructions of the main thread: not while that thread waits in
    C code (for the device or a lock), and late if a signal comes just before such a call.
    The interpreter writes to this object's pipe as soon as the signal arrives.
    """

    def __init__(
        self,
        numbers: Collection[int],
        first: Callable[[int], object],
        again: Callable[[], object],
    ) -> None:
        """Start the thread; call it in the main thread. `first` is called in the new thread at
        the first stop, `again` at each further stop at least `REPEAT_S` later.

        Raises:
            ValueError: this is not the main thread.
        """
        self.repeated = 0  # first stops that this process has sent to itself again
        self._numbers, self._first, self._again = frozenset(numbers), first, again
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        _watched.add(self._writer)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="second stop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Handle the signals that have arrived, and end the thread."""
        signal.set_wakeup_fd(self._before)
        _watched.discard(self._writer)
        os.close(self._writer)
        self._thread.join()  # its read returns when the pipe is closed
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
    """In a forked child (a data loader's worker), stop writing signals to the parent's pipe."""
    before = signal.set_wakeup_fd(-1)
    if before not in _watched:
        signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_leave_to_the_parent)

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STDERR = 2
_IMPORT_WAIT_S = 0.05
"""Delay before a stop that interrupted an import is raised again."""


@contextmanager
def signals_handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals with `handler` inside, except a SIGHUP that is ignored (nohup)."""
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
    """A stop was requested before the first step, so there is nothing to save.

    Not an Exception, which code called during set-up might handle as its own failure.
    """


class StopRequests:
    """While entered, turns signals into requests; the second stop ends the process at once.

    Until `defer` a stop raises StoppedEarlyError: set-up ends where it is, or after the current
    import (code that imports a half-initialized module again may fail in any way; numpy recurses
    without end). After `defer` a stop only sets `requested`, which the loop checks between steps,
    where the state is consistent. If the process is ended at once (status 1, nothing is saved), the
    last checkpoint stays valid: it is never half written. Outside the main thread signals are not
    handled, because Python does not allow it.

    Attributes:
        requested: name of the signal that requested a stop; None if there was none.
        wants_checkpoint: SIGUSR1 has arrived; the code that saves resets it.
    """

    def __init__(self, *, aborts: bool = True, quiet: bool = False) -> None:
        """`aborts`: a second stop ends the process. False for ranks of a launcher, which ends them:
        a scheduler may signal all ranks and the launcher. `quiet`: another rank prints the
        notes."""
        self.requested: str | None = None
        self.wants_checkpoint = False
        self._aborts, self._quiet, self._deferred = aborts, quiet, False
        self._second: SecondStop | None = None
        self._waits_for_import = False
        self._waiting: threading.Timer | None = None
        self._handled = ExitStack()

    @property
    def stops_building(self) -> bool:
        """True if a stop was requested before `defer`."""
        return self.requested is not None and not self._deferred

    def defer(self) -> None:
        """From now on only record stops.

        Raises:
            StoppedEarlyError: a stop came before, and its exception was lost (in a finalizer).
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
            # A launcher has blocked these signals until here.
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
            return  # SecondStop handles it
        self.requested = signal.Signals(number).name
        if not self._deferred:
            self._end_building(number, frame)
        elif self._second is None:
            self._tell(number)

    def _tell(self, number: int) -> None:
        """Print the effect of a first stop: on SecondStop's thread, or else in the handler."""
        if self._deferred and not self._quiet:
            name = signal.Signals(number).name
            _write(f"{name}: stopping after this step, with a checkpoint; repeat: end at once")

    def _end_building(self, number: int, frame: FrameType | None) -> None:
        """Raise StoppedEarlyError now, or after the import that the signal interrupted."""
        if not _imports(frame):
            raise StoppedEarlyError(str(self.requested))

        def look_again() -> None:
            self._waits_for_import = True
            if self._second is not None:
                self._second.repeated += 1
            # Send a signal, which also wakes a blocking call.
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
    """Return True if this frame runs inside an import."""
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
    with suppress(OSError):  # the terminal may be gone, the reason for SIGHUP
        os.write(_STDERR, f"\n{note}\n".encode())
