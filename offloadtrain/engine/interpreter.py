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
    """Whose parameters change with what is in memory."""

    def enter(self, block: str, slot: int) -> None: ...
    def leave(self, block: str) -> None: ...
    def renew(self, block: str) -> None: ...
    def swap(self, bucket: str) -> None: ...


class Interpreter:
    """Between the program, which knows no tensor, and the lanes, which know no block.

    Attributes:
        cut: what has cut operations short. The program goes by all of them; so nothing more runs
            until the step is given up and both begin anew from memory at rest.
        torn: weights or state may be between two steps then: there is nothing to begin from.
    """

    def __init__(
        self, lanes: Lanes, memory: MemoryMap, functions: Functions, residents: Residents
    ) -> None:
        self._lanes = lanes
        self._memory = memory
        self._functions = functions
        self.cut: BaseException | None = None
        self.torn = False
        self._how: dict[type, Callable[..., None]] = {
            Launch: self._launch,
            Record: self._record,
            Wait: self._wait,
            HostWait: self._host_wait,
            Undefined: self._undefined,
            Enter: lambda op: residents.enter(op.block, op.slot),
            Leave: lambda op: residents.leave(op.block),
            Renew: lambda op: residents.renew(op.block),
            Swap: lambda op: residents.swap(op.bucket),
        }

    def run(self, operations: Iterable[Operation], *, updates: bool = False) -> None:
        """One after the other; returns when the last one is launched.

        Args:
            updates: they change weights or state in ways that cannot be done again.

        Raises:
            CutShortError: those before were cut short.
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
        except BaseException as error:
            self.cut, self.torn = error, updates
            raise

    def _launch(self, op: Launch) -> None:
        reads = [self._memory.range(ref) for ref in op.reads]
        writes = [self._memory.range(ref) for ref in op.writes]
        self._lanes.launch(op.lane, op.name, self._functions.of(op), reads, writes)

    def _record(self, op: Record) -> None:
        op.event.real = self._lanes.record(op.event.lane)

    def _wait(self, op: Wait) -> None:
        self._lanes.wait(op.lane, _real(op), op.why)

    def _host_wait(self, op: HostWait) -> None:
        self._lanes.host_wait(_real(op), op.why)

    def _undefined(self, op: Undefined) -> None:
        self._lanes.alloc(self._memory.range(op.ref), op.lane)


def _real(op: Wait | HostWait) -> LaneEvent:
    assert isinstance(op.event.real, LaneEvent)
    return op.event.real
