"""Lanes that show a missing wait: threads that pause, and memory that is filled where its contents
are undefined."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from offloadtrain.runtime.lanes import Lane, Lanes, Operation, Range
from offloadtrain.runtime.lanes.threads import ThreadLanes

_L = TypeVar("_L", bound=Lanes)


class PausingLanes(ThreadLanes):
    """Threads; a random pause is in front of each operation, in the order of its lane."""

    def __init__(self, longest_ms: float, *, seed: int = 0) -> None:
        super().__init__()
        self._draw = random.Random(seed)
        self._longest_s = longest_ms / 1e3

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        pause_s = self._draw.random() * self._longest_s
        self._run_in_order(lane, partial(time.sleep, pause_s))
        super().launch(lane, name, fn, reads, writes)


def poisoned(lanes: _L) -> _L:
    """Return the lanes, which from now on fill memory whose contents are undefined with NaN."""
    undefine = lanes.undefine

    def fill(range_: Range, lane: Lane) -> None:
        undefine(range_, lane)
        # In the lane's order: after the waits for earlier users and before the write.
        if range_.buffer.flat.is_floating_point():
            lanes._run_in_order(lane, partial(range_.view.fill_, float("nan")))

    lanes.undefine = fill  # type: ignore[method-assign]
    return lanes
