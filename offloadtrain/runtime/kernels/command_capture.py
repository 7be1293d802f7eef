"""Kernel calls captured for later, for a thread that does not need the GIL.

[Note: Without the interpreter]
A thread that runs Python between two kernels waits for the GIL each time, after a training thread
that launches a forward. The measured loss is a tenth of the time of Adam over a bucket of 7M
parameters. An operation that only calls kernels is therefore marked (`KernelCalls`) and *captured*
at launch: the kernels check their operands, and the native module records the calls. A native queue
makes them later. Other backends have no queue; there such an operation is an ordinary function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from offloadtrain.runtime.kernels.native import Native
from offloadtrain.runtime.kernels.selection import active_backend


class KernelCalls:
    """An operation that only calls kernels, and reads no value that they write."""

    __slots__ = ("_call", "_captured", "_keeps")

    def __init__(self, call: Callable[..., object], *, keeps: bool = False) -> None:
        """`keeps`: it is launched again and again over a few sets of operands, and never stands for
        other calls: they are captured once, and the operands stay alive as long as it does."""
        self._call = call
        self._keeps = keeps
        self._captured: dict[tuple[int, ...], tuple[Native, Sequence[Tensor], Any]] = {}
        """Ids of operands → the kernels, the operands, which keep the ids theirs, and the calls."""

    def __call__(self, *operands: Tensor) -> None:
        self._call(*operands)

    def captured(self, kernels: Native, operands: Sequence[Tensor]) -> Any:
        """Return its calls over these operands."""
        if not self._keeps:
            return kernels.capture(lambda: self._call(*operands))
        key = tuple(map(id, operands))
        entry = self._captured.get(key)
        if entry is None or entry[0] is not kernels:
            calls = kernels.capture(lambda: self._call(*operands))
            entry = self._captured[key] = (kernels, operands, calls)
        return entry[2]


def capture(operation: Callable[..., object], operands: Sequence[Tensor]) -> Any | None:
    """Return the operation as checked native calls, not executed yet; None if it does more than
    call kernels, or the active kernels are not native."""
    kernels = active_backend()
    if not (isinstance(operation, KernelCalls) and isinstance(kernels, Native)):
        return None
    return operation.captured(kernels, operands)


def native_lane() -> Native | None:
    """Return the factory of queues and flags; None if the active kernels are not native."""
    kernels = active_backend()
    return kernels if isinstance(kernels, Native) else None
