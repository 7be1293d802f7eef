"""Execution of the lanes in any legal order on one thread, chosen by a seed or an adversary.

Compute runs when it is launched, because autograd does. Any other operation stays in its lane's
queue until a draw chooses its lane or, with `late`, until a wait needs it. In torch's deterministic
mode an allocation fills memory, on compute: as late as compute's next event or operation allows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from offloadtrain.runtime.lanes.base import (
    HostProgress,
    LaneEvent,
    Lanes,
    Operation,
    Range,
    views,
)
from offloadtrain.step.program.operations import Lane


class _Flag(LaneEvent):
    """Occurs when its place in the queue of `lane` is reached."""

    __slots__ = ("done", "lane")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.done = False

    def set(self) -> None:
        self.done = True


_Entry = _Flag | Callable[[], object]
"""What a queue holds: a flag that it waits for, or a task."""


class SeededLanes(Lanes):
    """Lanes in a seeded order: the same seed gives the same order."""

    def __init__(self, seed: int, *, late: bool = False) -> None:
        """`late`: an operation runs only when a wait needs it."""
        super().__init__()
        self._draw = random.Random(seed)
        self._late = late
        self._queues: dict[Lane, deque[_Entry]] = {
            lane: deque() for lane in Lane if lane is not Lane.COMPUTE
        }
        self._launched = self._begun = self._ended = 0
        """Operations of the host lane."""
        self._unfilled: list[Tensor] = []
        """Memory that compute has still to fill."""

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        operands = views(reads, writes)
        self._count(lane, name, writes)
        if lane is Lane.COMPUTE:
            self._fill_allocated()
            fn(*operands)
        else:
            self._put(lane, partial(fn, *operands))
        while not self._late and self._draw.random() < 0.5 and self._runnable():
            self._run_one()

    def record(self, lane: Lane) -> LaneEvent:
        event = _Flag(lane)
        # Compute has run all that it was given.
        if lane is Lane.COMPUTE:
            self._fill_allocated()
            event.done = True
        else:
            self._queues[lane].append(event.set)
        return event

    def wait(self, lane: Lane, event: LaneEvent, why: object) -> None:
        flag = _Flag.own(event)
        # Compute cannot be held back: what it waits for runs now. Other lanes' queues are blocked.
        if lane is Lane.COMPUTE:
            self._run_until(flag)
            # Nothing held the fills back, and nothing made the other lane wait for them.
            self._fill_allocated()
        else:
            self._queues[lane].append(flag)

    def host_wait(self, event: LaneEvent, why: object) -> None:
        self._run_until(_Flag.own(event))

    def synchronize(self) -> None:
        while any(self._queues.values()):
            self._run_one()
        self._fill_allocated()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = super().allocate(numel, dtype, device)
        if fills_allocations():
            self._unfilled.append(memory)
        return memory

    def _fill_allocated(self) -> None:
        for memory in self._unfilled:
            memory.view(torch.uint8).fill_(0xFF)  # NaN in every floating-point format
        self._unfilled.clear()

    def close(self) -> None:
        # What is queued may still be due on disk or in a master: it is run, and not dropped.
        self.synchronize()

    def host_progress(self) -> HostProgress:
        return HostProgress(self._launched, self._begun, self._ended)

    def abandon(self) -> None:
        for queue in self._queues.values():
            queue.clear()

    def _run_in_order(self, lane: Lane, task: Callable[[], object]) -> None:
        if lane is Lane.COMPUTE:
            task()
        else:
            self._put(lane, task)

    def _put(self, lane: Lane, task: Callable[[], object]) -> None:
        if lane is Lane.HOST:
            self._launched += 1
            task = partial(self._count_task, task)
        self._queues[lane].append(task)

    def _count_task(self, task: Callable[[], object]) -> None:
        self._begun += 1
        task()
        self._ended += 1

    def _run_until(self, event: _Flag) -> None:
        while not event.done:
            if self._late:
                self._advance(self._needed(event))
            else:
                self._run_one()

    def _run_one(self) -> None:
        self._advance(self._draw.choice(self._runnable()))

    def _runnable(self) -> list[Lane]:
        return [lane for lane, queue in self._queues.items() if queue and not _blocked(queue[0])]

    def _needed(self, event: _Flag) -> Lane:
        """Return the lane whose next operation `event` needs first. This ends, since waits point
        back in the order of launch."""
        head = self._queues[event.lane][0]
        return self._needed(head) if isinstance(head, _Flag) and not head.done else event.lane

    def _advance(self, lane: Lane) -> None:
        entry = self._queues[lane].popleft()
        if not isinstance(entry, _Flag):
            entry()


def _blocked(entry: _Entry) -> bool:
    return isinstance(entry, _Flag) and not entry.done


def fills_allocations() -> bool:
    """Return True if torch fills uninitialized memory: its deterministic mode does, by default."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    )
