"""Requests by signal: Ctrl-C, or SIGTERM from Slurm, Kubernetes or systemd, SIGHUP of a lost
terminal: stop; SIGUSR1: save a checkpoint and go on."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType

from offloadtrain.train.second_stop import SecondStop

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STDERR = 2
_IMPORT_WAIT_S = 0.05
"""Time after which a stop that came in the midst of an import is looked at again."""


class StoppedEarlyError(BaseException):
    """A stop was requested before the first step: there is nothing to save.

    No Exception: code that building calls may take those for its own failures.
    """


class StopRequests:
    """While entered, signals are requests; the second stop ends the process at once.

    Until `defer` a stop raises StoppedEarlyError: building ends where it is, or behind the import
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
        self._before: dict[int, object] = {}

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
            # nohup ignores SIGHUP, and means it.
            ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            numbers = [n for n in _STOPS if n != signal.SIGHUP or not ignored]
            self._before = {number: signal.signal(number, self._note) for number in numbers}
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._note_checkpoint)
            self._second = SecondStop(numbers, self._tell, _end_at_once) if self._aborts else None
            # A launcher has blocked them until here.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._look_no_more()
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
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
        """Raise StoppedEarlyError, now or behind the import that the signal came into."""
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
    _write("ended at once; the last checkpoint is intact")
    os._exit(1)


def _write(note: str) -> None:
    with suppress(OSError):  # the terminal is gone, which is what SIGHUP says
        os.write(_STDERR, f"\n{note}\n".encode())
