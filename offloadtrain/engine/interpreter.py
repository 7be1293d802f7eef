"""Runs the program's operations: kind → function, ref → memory, lane → stream or thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import RLock
from typing import ParamSpec, Protocol

import torch

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.buffers import Ranges
from offloadtrain.engine.functions import Functions
from offloadtrain.engine.salvage import Call, UpdateJournal
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.lanes import LaneEvent, Lanes, Range, views
from offloadtrain.runtime.lanes import Operation as Function
from offloadtrain.runtime.lost_ranks import LostRankError, is_of_exchange
from offloadtrain.step.program.operations import (
    Allocate,
    Enter,
    Flip,
    Free,
    HostWait,
    Kind,
    Lane,
    Launch,
    Leave,
    Operations,
    Record,
    Renew,
    Swap,
    Undefined,
    Wait,
)

P = ParamSpec("P")


class CutShortError(OffloadTrainError):
    """An exception cut the operations of a step short."""


class Residents(Protocol):
    """Carries out the residence changes that the program orders."""

    def enter(self, block: str, slot: int) -> None: ...
    def leave(self, block: str) -> None: ...
    def renew(self, block: str, by: int) -> None: ...
    def swap(self, bucket: str) -> None: ...
    def flip(self, bucket: str) -> None: ...
    def describe_lost_rank(self, exchange: str) -> str: ...


class Interpreter:
    """Runs operations of the program, which knows no tensor, on lanes, which know no block.

    Attributes:
        cut: the exception that cut operations short. The program assumes that all of them ran, so
            nothing more runs until the step is given up and both restart from memory at rest.
        torn: weights or state may be between two steps then: a restart is impossible.
        lock: is held from an event of the program until its operations are launched.
        journal: the updates that may be unfinished; see [Note: Salvage] in `engine.salvage`.
    """

    def __init__(
        self, lanes: Lanes, memory: Ranges, functions: Functions, residents: Residents
    ) -> None:
        self._lanes = lanes
        self._memory = memory
        self._functions = functions
        self._residents = residents
        self._updating = False
        self.lock = RLock()
        self.journal = UpdateJournal()
        self.failure: BaseException | None = None
        self.is_inconsistent = False
        self._how: dict[type, Callable[..., object]] = {
            Launch: self._launch,
            Record: self._record,
            Wait: self._wait,
            HostWait: self._host_wait,
            Undefined: lambda op: lanes.alloc(memory[op.ref], op.lane),
            Allocate: lambda op: memory.inputs.allocate(op.ref, lanes),
            # Compute has waited for the copy: the allocator may give the memory out again.
            Free: lambda op: memory.inputs.free(op.ref),
            # Parameters change their views when the operations are launched, not when the lanes
            # run them. Compute waits for the load before it reads through a new view.
            Enter: lambda op: residents.enter(op.block, op.slot),
            Leave: lambda op: residents.leave(op.block),
            Renew: lambda op: residents.renew(op.block, op.by),
            Swap: lambda op: self._swap(op.bucket),
            # Loads that were launched read the version before; later ones name the other.
            Flip: lambda op: residents.flip(op.bucket),
        }

    def run(self, event: Callable[P, Operations], *args: P.args, **kwargs: P.kwargs) -> None:
        """Report an event to the program and run its operations in order; returns when the last one
        is launched.

        Raises:
            CutShortError: earlier operations were cut short.
            LostRankError: an exchange has failed.
        """
        # Other threads may read parameters: what one event returns is launched before the next.
        with self.lock:
            self._run(event(*args, **kwargs), updates=False)

    def run_update(self, event: Callable[P, Operations], *args: P.args, **kwargs: P.kwargs) -> None:
        """The same for operations that change weights or state in ways that cannot be repeated."""
        with self.lock:
            self._run(event(*args, **kwargs), updates=True)

    def _run(self, operations: Operations, *, updates: bool) -> None:
        if self.failure is not None:
            self.require_intact()
        # torch's selective checkpoint would take loads on this thread for operations of the model.
        modes = torch.utils._python_dispatch
        if torch._C._len_torch_dispatch_stack() and (
            type(modes._get_current_dispatch_mode()).__module__ == "torch.utils.checkpoint"
        ):
            with modes._pop_mode_temporarily():
                return self._run(operations, updates=updates)
        todo = iter(operations)
        self._updating = updates
        try:
            for op in todo:
                self._how[type(op)](op)
        # Waits and records may be missing from here on: what is launched next could race.
        except BaseException as error:
            self.failure, self.is_inconsistent = error, updates
            if updates:
                self.journal.cut(tuple(todo))
            raise

    def require_intact(self) -> None:
        """Raises CutShortError if earlier operations were cut short."""
        if self.failure is not None:
            remedy = (
                "close() and offload again"
                if self.is_inconsistent
                else "zero_grad() gives the step up"
            )
            raise CutShortError(
                f"{type(self.failure).__name__} ({self.failure}) cut the operations of a step "
                f"short: {remedy}"
            )

    def salvage(self, failure: BaseException) -> None:
        """Finish the updates that were decided, without the device. Nothing is launched any more.

        Raises:
            SalvageError: the state is between two steps; nothing was run.
        """
        self.failure, self.is_inconsistent = self.failure or failure, True
        # Waits for the host lane alone: its last operation may still write the state.
        self._lanes.abandon()
        self.journal.finish(self._lanes.host_progress(), self._call_of, self._residents.swap)

    def close(self) -> None:
        """Nothing is launched any more: drop the functions, which refer to this object."""
        self._how.clear()
        self._functions.close()

    def _launch(self, op: Launch) -> None:
        lookup = self._memory.__getitem__
        reads, writes = list(map(lookup, op.reads)), list(map(lookup, op.writes))
        function = self._functions.of(op)
        # Updates on the device are lost with it: the journal is of those that outlive it.
        if op.kind is Kind.DIRECTION and op.lane is Lane.HOST:
            self.journal.needs_device(op.owner)
        if op.kind is Kind.ADAM and op.lane is Lane.HOST:
            progress, call = self._lanes.host_progress(), partial(_call, function, reads, writes)
            self.journal.launches(op, call, progress, decided=self._updating)
        HEARTBEAT.beats += 1
        try:
            self._lanes.launch(op.lane, op.name, function, reads, writes)
        except RuntimeError as error:
            if not is_of_exchange(error):
                raise
            raise LostRankError(self._residents.describe_lost_rank(op.name)) from error

    def _swap(self, bucket: str) -> None:
        self.journal.swapped(bucket)
        self._residents.swap(bucket)

    def _call_of(self, op: Launch) -> Call:
        reads, writes = ([self._memory[ref] for ref in refs] for refs in (op.reads, op.writes))
        return partial(_call, self._functions.of(op), reads, writes)

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


def _call(function: Function, reads: Sequence[Range], writes: Sequence[Range]) -> None:
    function(*views(reads, writes))
