"""A recorded program as operations that can be given any speed: virtual time."""

from __future__ import annotations

from collections.abc import Iterable

from offloadtrain.schedule import DECIDE, Op
from offloadtrain.transfer.base import Lane
from offloadtrain.transfer.recorder import Entry, Launched, Opened, Recorded, Waited

_NORM = "the gradient norm"


def operations(program: Iterable[Entry]) -> list[Op]:
    """Launches and spans as operations, waits as what these are after.

    As on lanes of threads: compute is the launching thread, so that nothing is launched before the
    compute in front of it is done. A span counts where it opens.
    """
    return _Translation().of(program)


class _Translation:
    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._thread: set[int] = set()
        self._lanes: dict[Lane, set[int]] = {lane: set() for lane in Lane}
        self._latest: dict[Lane, int] = {}
        self._events: dict[int, int | None] = {}

    def of(self, program: Iterable[Entry]) -> list[Op]:
        for entry in program:
            match entry:
                case Launched(lane, name, _, _):
                    self._add(lane, name)
                case Opened(_, name, _, _):
                    self._add(Lane.COMPUTE, name)
                case Recorded(lane, event):
                    self._events[event] = self._latest.get(lane)
                case Waited(lane, event, why):
                    self._wait(lane, event, why)
                case _:
                    pass
        return self._ops

    def _add(self, lane: Lane, name: str) -> None:
        after = self._thread | self._lanes[lane]
        self._lanes[lane] = set()
        self._ops.append(Op(lane.value, name, tuple(sorted(after))))
        self._latest[lane] = len(self._ops) - 1
        if lane is Lane.COMPUTE:
            self._thread = {self._latest[lane]}

    def _wait(self, lane: Lane | None, event: int, why: str) -> None:
        op = self._events[event]
        if op is not None:
            blocks = lane in (None, Lane.COMPUTE)
            (self._thread if lane is None or blocks else self._lanes[lane]).add(op)
        if lane is None and why == _NORM:
            self._add(Lane.COMPUTE, DECIDE)
