"""The next batch, made while the current one is computed with."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from offloadtrain.data.batches import Batch, Batches


class Prefetch:
    """Makes one batch ahead, on a thread of its own.

    What comes next is still up to the batches: the one that was made ahead is taken only if they
    stand where it was expected. So they can be skipped, restored and saved between two calls.
    """

    def __init__(self, batches: Batches, ready: Callable[[Batch], Batch]) -> None:
        """`ready`: what the thread does with each batch, such as a copy to pinned memory."""
        self._batches = batches
        self._ready = ready
        self._thread = ThreadPoolExecutor(1, "offloadtrain-batches")
        self._ahead: tuple[int, Future[Batch]] | None = None

    def next(self) -> Batch:
        """Return the next batch; the batches move on by one call, and not by the one ahead."""
        position = self._batches.position
        if self._ahead is not None and self._ahead[0] == position:
            # Usually done: it had a whole microbatch's time. Errors of the thread are raised here.
            batch = self._ahead[1].result()
        else:
            batch = self._make(position)
        self._batches.skip(1)
        following = self._batches.position
        self._ahead = following, self._thread.submit(self._make, following)
        return batch

    def close(self) -> None:
        """End the thread, and drop the batch that it has made ahead."""
        self._ahead = None
        self._thread.shutdown()

    def _make(self, position: int) -> Batch:
        return self._ready(self._batches.at(position))
