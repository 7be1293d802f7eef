"""The second stop ends the process, whatever its main thread waits for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection

_watched: set[int] = set()
"""Ends for writing of the watches that this process has begun."""


class SecondStop:
    """Watches for the second of the signals `numbers` in a thread of its own.

    Python runs handlers between two instructions of the main thread: never while that waits in a
    call of C, for the device or for a lock, and late where a signal comes just before such a call.
    What is read here the interpreter writes when the signal arrives.
    """

    def __init__(self, numbers: Collection[int], end: Callable[[], object]) -> None:
        """Begin, in the main thread. `end`: called in the thread at each stop from the second on.

        Raises:
            ValueError: this is not the main thread.
        """
        self.repeated = 0  # first stops that this process has sent itself once more
        self._numbers, self._end = frozenset(numbers), end
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
        stops = 0
        while number := os.read(self._reader, 1):
            stops += number[0] in self._numbers
            if stops > 1 + self.repeated:
                self._end()


def _leave_to_the_parent() -> None:
    """Signals of a forked child (a data loader's worker) are not those of its parent."""
    before = signal.set_wakeup_fd(-1)
    if before not in _watched:
        signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_leave_to_the_parent)
