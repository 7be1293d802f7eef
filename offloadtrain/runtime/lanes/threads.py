"""A CPU thread for each lane but compute, with optional delays: concurrency without a GPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from offloadtrain.runtime.lanes.base import (
    ClockedLanes,
    HostProgress,
    LaneError,
    LaneEvent,
    LaneTotals,
    Operation,
    Range,
    now_ms,
    views,
)
from offloadtrain.runtime.lanes.host_lane import Endable, Flag, make_host_lane
from offloadtrain.runtime.lanes.timeline import Interval
from offloadtrain.runtime.lanes.worker import Failure, Worker
from offloadtrain.step.program.operations import Lane


class _Flag(LaneEvent):
    __slots__ = ("happened", "lane")

    def __init__(self, lane: Lane, happened: Flag) -> None:
        self.lane = lane
        self.happened = happened


class ThreadLanes(ClockedLanes):
    """Compute is the calling thread; the other lanes run concurrently."""

    def __init__(
        self,
        *,
        seed: int = 0,
        longest_delay_ms: float = 0.0,
        pace: Callable[[str], float] | None = None,
    ) -> None:
        """`longest_delay_ms`: each operation is preceded by a random pause of at most this.
        `pace`: name of an operation → its least duration in milliseconds."""
        super().__init__()
        self._failure = Failure()
        self._draw = random.Random(seed)
        self._longest_s = longest_delay_ms / 1e3
        self._pace = pace
        self._host = make_host_lane(self._failure)
        self._workers = {
            lane: Worker(lane, self._failure)
            for lane in Lane
            if lane not in (Lane.COMPUTE, Lane.HOST)
        }
        self._closed = False

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
        operands, pause_s = views(reads, writes), self._draw.random() * self._longest_s
        # A native queue where the kernels are native: no thread of Python runs between two kernels.
        if lane is Lane.HOST:
            least_s = 0.0 if self._pace is None else self._pace(name) / 1e3
            self._host.compute(name, fn, operands, pause_s=pause_s, least_s=least_s)
            return

        def task() -> None:
            time.sleep(pause_s)
            start_ms = now_ms()
            fn(*operands)
            if self._pace is not None:
                time.sleep(max(0.0, self._pace(name) - (now_ms() - start_ms)) / 1e3)
            self._account(lane, name, start_ms)

        if lane is Lane.COMPUTE:
            task()
        else:
            # From here on the queue owns the operands; this thread goes on to launch.
            self._workers[lane].put(task)

    def record(self, lane: Lane) -> LaneEvent:
        event = _Flag(lane, self._host.make_flag())
        # Compute has run all that it was given: it is this thread. Other lanes set the flag when
        # they reach it in their queue, also after a failure: a thread may wait for it.
        if lane is Lane.COMPUTE:
            event.happened.set()
        elif lane is Lane.HOST:
            self._host.set(event.happened)
        else:
            self._workers[lane].put(event.happened.set, always=True)
        return event

    def wait(self, lane: Lane, event: LaneEvent, why: object) -> None:
        flag = _Flag.own(event)
        # A wait of compute blocks this thread. Another lane's wait is a task in its queue: it holds
        # back what is after it, while this thread goes on launching.
        if lane is Lane.COMPUTE:
            self.host_wait(flag, why)
        elif lane is Lane.HOST:
            self._host.wait(flag.happened)
        else:
            self._workers[lane].put(flag.happened.wait)

    def host_wait(self, event: LaneEvent, why: object) -> None:
        # What this thread waits for the lane has not hidden: it is counted as exposed.
        flag, start_ms = _Flag.own(event), now_ms()
        if not flag.happened.is_set():
            flag.happened.wait()
            if not self._is_reading:
                self._expose(flag.lane, start_ms)
        # A lane that failed has set the flag without doing the work.
        self._failure.check()

    def synchronize(self) -> None:
        # Nothing is launched meanwhile: a lane that has reached its flag is empty.
        for lane in Lane:
            self.host_wait(self.record(lane), "synchronize")

    def host_progress(self) -> HostProgress:
        return self._host.progress()

    def abandon(self) -> None:
        self._failure.fail(LaneError("the lanes were abandoned"))
        # Flags are set after a failure too: a lane that has set its own runs nothing any more.
        flags = [_Flag.own(self.record(lane)) for lane in Lane]
        for flag in flags:
            flag.happened.wait()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            # Joins the threads: each runs its queue to the end. Waits point back in the order of
            # launch, so no order of these joins can hang.
            workers: list[Endable] = [*self._workers.values(), self._host]
            for worker in workers:
                worker.end()

    def read_totals(self) -> LaneTotals:
        self.totals.busy_ms[Lane.HOST] = self._host.busy_ms()
        return super().read_totals()

    def _run_in_order(self, lane: Lane, task: Callable[[], None]) -> None:
        if lane is Lane.COMPUTE:
            task()
        elif lane is Lane.HOST:
            self._host.run(task)
        else:
            # In the queue: after what was launched, in front of what will be.
            self._workers[lane].put(task)

    def _begin_sampling(self) -> None:
        super()._begin_sampling()
        self._host.keep_intervals(True)

    def _end_sampling(self, lane: Lane) -> None:
        super()._end_sampling(lane)
        if lane is Lane.HOST:
            self._host.keep_intervals(False)

    def _sampled(self) -> list[Interval]:
        return [*super()._sampled(), *self._host.take_intervals(self._origin_ms)]

    def _pending(self) -> dict[Lane, int]:
        pending = {lane: worker.pending() for lane, worker in self._workers.items()}
        host = self._host.progress()
        return pending | {Lane.HOST: host.launched - host.ended}

    def _poison(self, lane: Lane, memory: Tensor) -> None:
        if lane is Lane.COMPUTE:
            super()._poison(lane, memory)
        elif lane is Lane.HOST:
            poison = super()._poison
            self._host.compute("poison", lambda memory: poison(lane, memory), [memory])
        else:
            # In the queue like any write: after the lane's earlier uses, in front of later ones.
            self._workers[lane].put(lambda: super(ThreadLanes, self)._poison(lane, memory))
