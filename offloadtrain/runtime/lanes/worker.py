"""A thread with a queue, for each lane outside the calling thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from offloadtrain.runtime.lanes.base import LaneError


class Failure:
    """The first error of the workers that share this object; raised by the launching thread."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._watched: list[tuple[Callable[[], str], Callable[[], None]]] = []

    def watch(self, error: Callable[[], str], stop: Callable[[], None]) -> None:
        """The error of a native queue, "" for none, and the function that stops it."""
        self._watched.append((error, stop))

    def fail(self, error: BaseException) -> None:
        """Stop all workers; the launching thread will raise."""
        self.error = self.error or error
        for _, stop in self._watched:
            stop()

    def check(self) -> None:
        """Raises LaneError if there is one."""
        for error, _ in self._watched:
            if (message := error()) and self.error is None:
                self.fail(RuntimeError(message))
        if self.error is not None:
            raise LaneError(f"a lane failed: {self.error}") from self.error


class Worker:
    """Runs tasks in order. After a failure anywhere it runs only those that set events, so that no
    thread hangs."""

    def __init__(
        self, name: str, failure: Failure, begin: Callable[[], None] | None = None
    ) -> None:
        """`begin`: run first on the thread."""
        self._failure = failure
        self._begin = begin
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"offloadtrain-{name}", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None], *, always: bool = False) -> None:
        """`always`: also run after a failure (the tasks that set events)."""
        self._tasks.put((task, always))

    def end(self) -> None:
        """Run what is queued, then stop."""
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:  # the collector may run us anywhere
            self._thread.join()

    def _run(self) -> None:
        if self._begin is not None:
            self._try(self._begin)
        while (entry := self._tasks.get()) is not None:
            task, always = entry
            if self._failure.error is None or always:
                self._try(task)

    def _try(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # raised by the next call of the launching thread
            self._failure.fail(error)
