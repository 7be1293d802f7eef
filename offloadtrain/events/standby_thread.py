"""A thread that is started before it has work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class StandbyThread(threading.Thread):
    """Runs one function, once `begin` is called.

    It starts at once, before memory is used up: if a limit refuses the thread (RuntimeError), the
    run ends before it has begun.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.begun = False
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.start()

    def begin(self, work: Callable[[], object]) -> None:
        """Run `work` on the thread, which then ends; a second call does nothing."""
        self.begun = True
        self._work.put(work)

    def run(self) -> None:
        self._work.get()()
