"""All lanes in order on the calling thread, for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offloadtrain.runtime.lanes.base import (
    ClockedLanes,
    HostProgress,
    LaneEvent,
    Operation,
    Range,
    now_ms,
    views,
)
from offloadtrain.step.program.operations import Lane


class _Done(LaneEvent):
    """An event that has occurred before `record` returns, because everything runs at launch."""

    __slots__ = ()


_DONE = _Done()


class SequentialLanes(ClockedLanes):
    """Runs operations when they are launched. All but compute is exposed: compute waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = self._ended = 0
        """Operations of the host lane."""

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        start_ms, on_host = now_ms(), lane is Lane.HOST
        self._begun += on_host
        fn(*views(reads, writes))
        self._ended += on_host
        self._count(lane, name, writes)
        self._account(lane, name, start_ms)
        if lane is not Lane.COMPUTE:
            self._expose(lane, start_ms)

    # No event and no wait does anything: launch order is execution order, on one thread.
    def record(self, lane: Lane) -> LaneEvent:
        return _DONE

    def wait(self, lane: Lane, event: LaneEvent, why: object) -> None:
        if event is not _DONE:
            _Done.own(event)

    def host_wait(self, event: LaneEvent, why: object) -> None:
        # The training thread runs all lanes: it waits as they do.
        self.wait(Lane.HOST, event, why)

    def synchronize(self) -> None:
        """Does nothing: nothing is ever pending."""

    def host_progress(self) -> HostProgress:
        return HostProgress(self._begun, self._begun, self._ended)

    def abandon(self) -> None:
        """Does nothing: nothing is ever pending."""

    def close(self) -> None:
        """Does nothing: nothing is ever pending."""

    def _run_in_order(self, lane: Lane, task: Callable[[], None]) -> None:
        task()
