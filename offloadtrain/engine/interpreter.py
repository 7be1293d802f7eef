"""Runs the program's operations: kind → function, ref → memory, lane → stream or thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.functions import Functions
from offloadtrain.engine.memory_map import MemoryMap
from offloadtrain.runtime.lanes import LaneEvent, Lanes
from offloadtrain.step.operations import (
    Enter,
    Free,
    HostWait,
    Launch,
    Leave,
    Operation,
    Record,
    Renew,
    Swap,
    Undefined,
    Wait,
)


class CutShortError(OffloadTrainError):
    """An exception cut the operations of a step short."""


class Residents(Protocol):
    """Carries out the residence changes that the program orders."""

    def enter(self, block: str, slot: int) -> None: ...
    def leave(self, block: str) -> None: ...
    def renew(self, block: str) -> None: ...
    def swap(self, bucket: str) -> None: ...


class Interpreter:
    """Runs operations of the program, which knows no tensor, on lanes, which know no block.

    Attributes:
        cut: the exception that cut operations short. The program assumes that all of them ran, so
            nothing more runs until the step is given up and both restart from memory at rest.
        torn: weights or state may be between two steps then: a restart is impossible.
    """

    def __init__(
        self, lanes: Lanes, memory: MemoryMap, functions: Functions, residents: Residents
    ) -> None:
        self._lanes = lanes
        self._memory = memory
        self._functions = functions
        self.cut: BaseException | None = None
        self.torn = False
        self._how: dict[type, Callable[..., object]] = {
            Launch: self._launch,
            Record: self._record,
            Wait: self._wait,
            HostWait: self._host_wait,
            Undefined: lambda op: lanes.alloc(memory[op.ref], op.lane),
            # Compute has waited for the copy: the allocator may give the memory out again.
            Free: lambda op: memory.free(op.ref),
            # Parameters change their views when the operations are launched, not when the lanes
            # run them. Compute waits for the load before it reads through a new view.
            Enter: lambda op: residents.enter(op.block, op.slot),
            Leave: lambda op: residents.leave(op.block),
            Renew: lambda op: residents.renew(op.block),
            Swap: lambda op: residents.swap(op.bucket),
        }

    def run(self, operations: Iterable[Operation], *, updates: bool = False) -> None:
        """Run the operations in order; returns when the last one is launched.

        Args:
            updates: they change weights or state in ways that cannot be repeated.

        Raises:
            CutShortError: earlier operations were cut short.
        """
        if self.cut is not None:
            remedy = "close() and offload again" if self.torn else "zero_grad() gives the step up"
            raise CutShortError(
                f"{type(self.cut).__name__} ({self.cut}) cut the operations of a step short: "
                f"{remedy}"
            )
        try:
            for op in operations:
                self._how[type(op)](op)
        # Waits and records may be missing from here on: what is launched next could race.
        except BaseException as error:
            self.cut, self.torn = error, updates
            raise

    def _launch(self, op: Launch) -> None:
        found = self._memory.__getitem__
        reads, writes = list(map(found, op.reads)), list(map(found, op.writes))
        self._lanes.launch(op.lane, op.name, self._functions.of(op), reads, writes)

    def _record(self, op: Record) -> None:
        # The event keeps the lanes' own one, for the waits that may name it later.
        op.event.real = self._lanes.record(op.event.lane)

    def _wait(self, op: Wait) -> None:
        real = op.event.real
        assert isinstance(real, LaneEvent)
        self._lanes.wait(op.lane, real, op)

    def _host_wait(self, op: HostWait) -> None:
        real = op.event.real
        assert isinstance(real, LaneEvent)
        self._lanes.host_wait(real, op.why)
