"""What the streams and threads of `fake_cuda.py` did, for the prover.

[Note: The order of launch]
The prover reads a program in the order in which it was launched. A task of a lane's thread has its
place there from when it is put into the thread's queue, whenever it runs; what the host lane's
queue is given has its place at once. So each entry says what a stream or a thread *did*, at the
place where it was asked for; and each stream must follow that order.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from ctypes import c_uint64
from dataclasses import dataclass
from typing import Any

from offloadtrain.runtime.lanes import Lane
from offloadtrain.runtime.lanes.queues import Flag, LaneQueue, NativeQueue, Worker
from offloadtrain.step.proof.prove import prove
from offloadtrain.step.proof.recording import Entry, Recorded, Waited

ADDRESS = 0x7F00_0000_0000
"""Of event number 0."""


@dataclass(frozen=True, slots=True)
class _Task:
    """What a lane's thread runs, and its place in the order of launch."""

    place: int
    lane: Lane


class _Running(threading.local):
    task: _Task | None = None


class Log:
    """Entries with their places."""

    def __init__(self) -> None:
        self.passed_over: list[str] = []
        """What CUDA takes without a word and nobody means."""
        self._running = _Running()
        self._places = itertools.count(1)
        self._numbers = itertools.count(1)
        self._entries: list[tuple[int, Entry | c_uint64]] = []
        self._reached: dict[Lane, int] = {}

    def number(self) -> int:
        """Of an event, a flag or a span."""
        return next(self._numbers)

    def add(self, entry: Entry | c_uint64) -> int:
        """At the place of the running task, or now. A number: the host lane waits for the event
        whose address it will be."""
        task = self._running.task
        place = next(self._places) if task is None else task.place
        self._entries.append((place, entry))
        return place

    def on_stream(self, lane: Lane, entry: Entry) -> None:
        """By the stream of a lane."""
        place = self.add(entry)
        if place < self._reached.get(lane, 0):
            self.passed_over.append(f"{lane}: {entry} after what was launched later")
        self._reached[lane] = place

    def waited(self, number: int, why: str) -> None:
        """By the running thread; on a lane's thread that orders this lane."""
        task = self._running.task
        self.add(Waited(None if task is None else task.lane, number, why))

    def faults(self) -> list[str]:
        """All that is wrong with what was done so far."""
        ordered = sorted(self._entries, key=lambda pair: pair[0])
        program = [_by_address(item) if isinstance(item, c_uint64) else item for _, item in ordered]
        return [*self.passed_over, *(f"{fault.kind}: {fault.message}" for fault in prove(program))]

    def placed(self, worker: Worker, task: Callable[[], None]) -> Callable[[], None]:
        """The task of a lane's thread, at its place."""
        lane = Lane(worker._thread.name.removeprefix("offloadtrain-"))
        here = _Task(next(self._places), lane)

        def run() -> None:
            self._running.task = here
            task()

        return run


def _by_address(handle: c_uint64) -> Waited:
    return Waited(Lane.HOST, handle.value - ADDRESS, "cuEventSynchronize")


class LoggedFlag:
    """A flag that the host lane sets is an event of it; one that a thread sets says only that an
    event was recorded, and orders nothing."""

    def __init__(self, log: Log, inner: Flag) -> None:
        self.inner, self.number, self.of_host = inner, log.number(), False
        self._log = log

    def set(self) -> None:
        self.inner.set()

    def is_set(self) -> bool:
        if not self.inner.is_set():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        self.inner.wait()
        if self.of_host:
            self._log.waited(self.number, "flag")


class LoggedHost:
    """A host lane of either kind, whose queue is logged as it is filled."""

    def __init__(self, log: Log, inner: LaneQueue, lane: Lane = Lane.HOST) -> None:
        self.inner = inner
        self._log, self._lane = log, lane

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def make_flag(self) -> LoggedFlag:
        return LoggedFlag(self._log, self.inner.make_flag())

    def set(self, flag: LoggedFlag) -> None:
        flag.of_host = True
        self._log.add(Recorded(self._lane, flag.number))
        self.inner.set(flag.inner)

    def wait(self, flag: LoggedFlag) -> None:
        self._log.add(Waited(self._lane, flag.number, "flag"))
        self.inner.wait(flag.inner)

    def wait_event(self, issued: LoggedFlag, handle: c_uint64, block: Callable[[], None]) -> None:
        if isinstance(self.inner, NativeQueue):  # the other kind blocks in Python, and says so
            self._log.add(handle)
        self.inner.wait_event(issued.inner, handle, block)
