"""A stand-in for `os` that counts calls and, at one of them, fails or kills the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from offloadtrain.hardware import atomic_io, direct_io
from offloadtrain.hardware.direct_io import BLOCK
from offloadtrain.train.checkpoint import checkpoint, save

MODULES = (atomic_io, direct_io, checkpoint, save)
"""Those that write a checkpoint."""

EFFECTS = (
    *("open", "read", "write", "fsync", "close", "posix_fadvise"),
    *("posix_fallocate", "pwrite", "preadv", "fstat"),
    *("mkdir", "makedirs", "rename", "unlink", "rmdir", "listdir", "statvfs"),
)


class FaultyOs:
    """Passes every call on to `os`; at call number `at` it does `fault(name)` first.

    Attributes:
        calls: (name, path or file descriptor) of every call so far.
    """

    def __init__(self, at: int = -1, fault: Callable[[str], None] = lambda name: None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.tear_writes = False
        self._at, self._fault = at, fault
        self._lock = threading.Lock()

    def fails(self, number: int) -> OSError | None:
        """Return the error of this call; a disk that fails for longer overrides it."""
        return None

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in EFFECTS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:  # several threads write
                self.calls.append((name, args[0]))
                number = len(self.calls) - 1
            if (error := self.fails(number)) is not None:
                raise error
            if number == self._at:
                if name == "write" and self.tear_writes:
                    os.write(args[0], args[1][: len(args[1]) // 2])
                if name == "pwrite" and self.tear_writes:
                    half = len(args[1]) // 2 // BLOCK * BLOCK
                    os.pwrite(args[0], args[1][:half], args[2])
                self._fault(name)
            return real(*args, **kwargs)

        return call


@contextmanager
def through(fault: FaultyOs) -> Iterator[None]:
    """Every `os` call of a save goes through `fault`."""
    for module in MODULES:
        module.os = fault  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in MODULES:
            module.os = os  # type: ignore[attr-defined]


def kill(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_with(code: int) -> Callable[[str], None]:
    def fail(name: str) -> None:
        raise OSError(code, os.strerror(code))

    return fail
