"""Stops are heard, whatever the main thread waits for: the first is told, the second ends the
process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection

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
