"""A CPU thread for each lane except compute: concurrency without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from offloadtrain.runtime.lanes.base import (
    ClockedLanes,
    LaneError,
    LaneEvent,
    Operation,
    Range,
    now_ms,
    views,
)
from offloadtrain.runtime.lanes.queues import Flag, PythonQueue, QueuedLanes, make_host_queue
from offloadtrain.runtime.lanes.timeline import Interval
from offloadtrain.step.program.operations import Lane


class _Flag(LaneEvent):
    __slots__ = ("happened", "lane")

    def __init__(self, lane: Lane, happened: Flag) -> None:
        self.lane = lane
        self.happened = happened


class ThreadLanes(QueuedLanes, ClockedLanes):
    """Compute runs on the calling thread; the other lanes run concurrently."""

    def __init__(self, *, pace: Callable[[str], float] | None = None) -> None:
        """`pace`: name of an operation → its least duration in milliseconds."""
        super().__init__()
        self._pace = pace
        # A native queue if the kernels are native: no Python runs between two kernels.
        self._host = make_host_queue(self._failure)
        self._queues = {
            lane: self._host if lane is Lane.HOST else PythonQueue(self._failure, None, lane)
            for lane in Lane
            if lane is not Lane.COMPUTE
        }

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        self._failure.check()
        self._count(lane, name, writes)
        operands = views(reads, writes)
        least_s = 0.0 if self._pace is None else self._pace(name) / 1e3
        if lane is not Lane.COMPUTE:
            self._queues[lane].compute(name, fn, operands, least_s=least_s)
            return
        start_ms = now_ms()
        fn(*operands)
        time.sleep(max(0.0, least_s - (now_ms() - start_ms) / 1e3))
        self._account(lane, name, start_ms)

    def record(self, lane: Lane) -> LaneEvent:
        event = _Flag(lane, self._host.make_flag())
        # Compute is this thread, so all of its operations have run. Other lanes set the flag when
        # they reach it in their queue, even after a failure: a thread may wait for it.
        if lane is Lane.COMPUTE:
            event.happened.set()
        else:
            self._queues[lane].set(event.happened)
        return event

    def wait(self, lane: Lane, event: LaneEvent, why: object) -> None:
        flag = _Flag.own(event)
        # A wait of compute blocks this thread. Another lane's wait is a task in its queue: it
        # delays later tasks, while this thread continues to launch.
        if lane is Lane.COMPUTE:
            self.host_wait(flag, why)
        else:
            self._queues[lane].wait(flag.happened)

    def host_wait(self, event: LaneEvent, why: object) -> None:
        # A wait of this thread was not overlapped: it counts as exposed time.
        flag, start_ms = _Flag.own(event), now_ms()
        if not flag.happened.is_set():
            flag.happened.wait()
            if not self._is_reading:
                self._expose(flag.lane, start_ms)
        # A failed lane has set the flag without doing the work.
        self._failure.check()

    def synchronize(self) -> None:
        # Nothing is launched meanwhile: a lane that has reached its flag is idle.
        for lane in Lane:
            self.host_wait(self.record(lane), "synchronize")

    def abandon(self) -> None:
        self._failure.fail(LaneError("the lanes were abandoned"))
        # Flags are set after a failure too: a lane that has set its flag runs nothing any more.
        flags = [_Flag.own(self.record(lane)) for lane in Lane]
        for flag in flags:
            flag.happened.wait()

    def _run_in_order(self, lane: Lane, task: Callable[[], object]) -> None:
        if lane is Lane.COMPUTE:
            task()
        else:
            # In the queue: after earlier launches, before later launches.
            self._queues[lane].run(task)

    def _sampled(self) -> list[Interval]:
        return [*super()._sampled(), *self._of_queues(self._origin_ms)]
