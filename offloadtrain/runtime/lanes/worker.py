"""A thread with a queue, for each lane that does not run on the launching thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from offloadtrain.runtime.lanes.base import LaneError

_Task = Callable[[], object]


class Failure:
    """The first error of the workers that share it; the launching thread raises it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._watched: list[tuple[Callable[[], str], Callable[[], None]]] = []

    def watch(self, error: Callable[[], str], stop: Callable[[], None]) -> None:
        """Watch a native queue. `error`: returns its error, "" for none; `stop`: stops it."""
        self._watched.append((error, stop))

    def fail(self, error: BaseException) -> None:
        """Stop all workers; the launching thread will raise the error."""
        # Set without a lock: workers only ask whether there is one, and any first error will do.
        self.error = self.error or error
        for _, stop in self._watched:
            stop()

    def check(self) -> None:
        """Raises LaneError if a worker has failed."""
        # A native queue cannot stop the others itself: the launching thread does so here.
        for error, _ in self._watched:
            if (message := error()) and self.error is None:
                self.fail(RuntimeError(message))
        if self.error is not None:
            raise LaneError(f"a lane failed: {self.error}") from self.error


class Worker:
    """Runs tasks in order. After a failure of any worker it runs only the tasks that set events, so
    that no thread waits for ever."""

    def __init__(
        self, name: str, failure: Failure, begin: Callable[[], None] | None = None
    ) -> None:
        """`begin`: run first on the thread."""
        self._failure = failure
        self._begin = begin
        self._runs = False
        self._tasks: queue.SimpleQueue[tuple[_Task, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"offloadtrain-{name}", daemon=True)
        self._thread.start()

    def put(self, task: _Task, *, always: bool = False) -> None:
        """Queue a task; `always`: run it after a failure, too (it sets an event)."""
        # The queue owns the task, and with it the tensors that it uses, until it has run.
        self._tasks.put((task, always))

    def pending(self) -> int:
        """Return the number of queued tasks, with the one that runs."""
        return self._tasks.qsize() + self._runs

    def end(self) -> None:
        """Run the queued tasks, then stop the thread."""
        # Last in the queue: the thread ends when all that it was given has run.
        self._tasks.put(None)
        # The garbage collector may call this on the worker's own thread, which cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        if self._begin is not None:
            self._try(self._begin)
        while (entry := self._tasks.get()) is not None:
            task, always = entry
            if self._failure.error is None or always:
                self._runs = True
                self._try(task)
                self._runs = False

    def _try(self, task: _Task) -> None:
        # The next call of the launching thread raises it.
        try:
            task()
        except BaseException as error:
            self._failure.fail(error)
