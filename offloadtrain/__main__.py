"""The command `offloadtrain`; also `python -m offloadtrain`.

[Note: A small parent]
Where a limit refuses memory (`ulimit -v`), some libraries end the process instead of raising an
error: OpenMP exits if it gets no thread, others abort or dereference a null pointer. Under such a
limit the command therefore runs in a child. Its parent has loaded only the standard library,
forwards signals, ends as the child does, and prints one line that says why if the child could not.

[Note: A witness]
A terminal, `kill -TERM -PGID` and `timeout` signal all processes of a group, including the child.
If the parent forwarded such a signal, however late, the child would receive a second stop. A
signal's siginfo does not tell whether it was sent to a group. Therefore the parent has another
child that blocks all of these signals: a signal that is pending there was sent to the group.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from offloadtrain.hardware import host_memory

_DOES_NOT_FIT = 4
_PR_SET_PDEATHSIG = 1
_WORDLESS = 127
_AWAITED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2),
    signal.SIGCHLD,
)
_REFUSED = (1, _WORDLESS, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
"""Exit codes of a child that was ended by a library or the loader."""


def main() -> int:
    """Run a command and return its exit code; under a memory limit, run it in a child. Ranks
    already have such a parent: their launcher or torchrun."""
    _replace_closed_streams()
    try:
        if host_memory.has_rlimit() and "RANK" not in os.environ:
            return watched(_command)
        return _command()
    except Exception as error:  # errors of fork, of imports, or of the error report itself
        if not host_memory.is_out_of_memory(error):
            raise
        return _refused(error)


def _replace_closed_streams() -> None:
    """Connect streams that a shell or a daemon has closed (`>&-`) to the null device. Otherwise
    the next opened file gets their descriptor, and output of libraries is written into it."""
    for name in ("stdin", "stdout", "stderr"):  # in this order: open takes the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
            os.set_inheritable(getattr(sys, name).fileno(), True)


def _command() -> int:
    from offloadtrain.cli.main import main as run

    return run()


def _refused(error: object) -> int:
    try:
        print(host_memory.refusal(error), file=sys.stderr)
    except MemoryError:  # no memory for the message: the parent prints it
        os._exit(_WORDLESS)
    return _DOES_NOT_FIT


def watched(command: Callable[[], int]) -> int:
    """Run a command in a child and return its exit code, or 4 if it was ended for lack of memory.
    See [Note: A small parent].

    Args:
        command: returns its exit code.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    witness = _witness()
    ended, ends = os.pipe()
    os.set_blocking(ended, False)
    if (child := _fork()) == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        code = command()
        os.write(ends, bytes([code]))
        return code
    os.close(ends)
    signals: list[int] = []
    # Not with handlers: one could run after the child has gone and its pid is reused.
    while not (status := os.waitpid(child, os.WNOHANG))[0]:
        received = signal.sigwaitinfo(_AWAITED)  # waits for the child, or for a signal to it
        number = signal.Signals(received.si_signo)
        if number == signal.SIGCHLD or signal.getsignal(number) is signal.SIG_IGN:  # nohup
            continue
        signals.append(number)
        if not _is_pending(witness, number):
            os.kill(child, number)
            continue
        os.kill(witness, signal.SIGKILL)
        os.waitpid(witness, 0)
        with suppress(OSError):  # without a witness all signals are forwarded
            witness = _witness()
    code = os.waitstatus_to_exitcode(status[1])
    try:
        orderly = os.read(ended, 1)
    except BlockingIOError:  # a process that the child started still has the pipe open
        orderly = b""
    if orderly:
        return orderly[0]
    if code in _REFUSED and not signals:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return _refused(f"a library has ended the process: {how}")
    if code < 0:
        with suppress(OSError):  # SIGKILL has no other handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    return code


def _fork() -> int:
    """Fork a child that ends with this process; return its pid, and 0 in the child."""
    if (child := os.fork()) == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return child


def _witness() -> int:
    """Start a child that blocks `_AWAITED`, as this process does, and sleeps: [Note: A witness]."""
    if (child := _fork()) == 0:
        while True:
            signal.pause()
    return child


def _is_pending(process: int, number: int) -> bool:
    """Return True if a signal sent to a process is still pending there."""
    status = ""
    with suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text()
    pending = re.search(r"^ShdPnd:\s*(\w+)", status, re.MULTILINE)
    return pending is not None and bool(int(pending[1], 16) >> (number - 1) & 1)


if __name__ == "__main__":
    sys.exit(main())
