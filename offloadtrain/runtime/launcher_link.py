"""A rank's end of the link to its launcher, `offloadtrain train --nproc`.

[Note: No orphans]
A rank must not outlive its launcher: nobody would see its output or stop it, and it would hold the
lock of the run. So the kernel kills it when the launcher's thread ends (PR_SET_PDEATHSIG), however
that happens. The link is a socket: its end of file reports the same, in case the kernel's signal
did not arrive (it is lost if the launcher ends before the rank has requested it).
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

VARIABLE = "OFFLOADTRAIN_LAUNCHER"
STACKS = signal.SIGUSR2
"""Signal that prints the stacks of all threads to stderr, even while no thread can run Python."""
BLOCKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, STACKS)
"""Signals that are blocked while a rank starts, until it handles them."""
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 1 << 14
_inherited: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A rank's report to the launcher, a few times a second.

    Attributes:
        silent_s, limit_s: seconds without progress, and how many of them are a hang.
        collectives: number of collectives that the rank has entered.
        waits: the rank waits for other ranks in a collective.
        run: the run folder, once the run has begun.
    """

    phase: str
    silent_s: float
    limit_s: float
    collectives: int
    waits: bool
    run: str = ""


class Link:
    """Messages between a rank and its launcher; neither end ever blocks on the other.

    Attributes:
        store_fd: a listening socket for the store, for rank 0.
    """

    def __init__(self, end: socket.socket, store_fd: int | None = None) -> None:
        self._end, self.store_fd = end, store_fd
        self._end.setblocking(False)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or drop it: the launcher may be stopped, or may have ended."""
        with suppress(OSError):
            self._end.send(json.dumps(message).encode())

    def receive(self, wait_s: float = 0.0) -> Mapping[str, Any] | None:
        """Return a message of the other end, or None.

        Raises:
            EOFError: the other end has ended.
        """
        if not select.select([self._end], [], [], wait_s)[0]:
            return None
        try:
            text = self._end.recv(_MESSAGE_BYTES)
        except ConnectionResetError:
            text = b""
        if not text:
            raise EOFError
        message: Mapping[str, Any] = json.loads(text)
        return message

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()


def attach() -> Link | None:
    """Tie this process to the launcher that has started it; None without a launcher.

    Call it first. Afterwards `STACKS` prints the stacks of this process, with or without a
    launcher.
    """
    global _inherited
    faulthandler.register(STACKS, file=sys.__stderr__ or sys.stderr, all_threads=True)
    if (text := os.environ.pop(VARIABLE, None)) is not None:
        settings = json.loads(text)
        die_with(settings["pid"])
        for fd in filter(None, (settings["link"], settings["store"])):
            os.set_inheritable(fd, False)
        _inherited = Link(socket.socket(fileno=settings["link"]), settings["store"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACKS])
    return _inherited


def is_attached() -> bool:
    """Return whether a launcher has started this process."""
    return _inherited is not None


def store_fd() -> int | None:
    """Return the launcher's listening socket for the ranks' store, which only rank 0 inherits."""
    return None if _inherited is None else _inherited.store_fd


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends; end now if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
