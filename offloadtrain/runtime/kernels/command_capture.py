"""Kernel calls that are made later, by a thread that needs no lock of the interpreter.

[Note: Without the interpreter]
A thread that runs Python between two kernels waits for the interpreter's lock each time, behind a
training thread that launches a forward: a tenth of the time of Adam over a bucket of 7M parameters,
measured. So an operation that only calls kernels says so (`KernelCalls`), is *captured* when it is
launched (the kernels check their operands then, and the native module keeps the calls), and the
calls are made by a native queue. Other backends have no queue; there such an operation is a
function as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from offloadtrain.runtime.kernels.native import Native
from offloadtrain.runtime.kernels.selection import active_backend


class KernelCalls:
    """An operation that does nothing but call kernels, and reads no value that they write."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *operands: Tensor) -> None:
        self._call(*operands)


def capture(operation: Callable[..., object], operands: Sequence[Tensor]) -> Any | None:
    """The operation as native calls that have been checked and not been made; None if it is more
    than kernels, or the kernels in force are not native."""
    kernels = active_backend()
    if not (isinstance(operation, KernelCalls) and isinstance(kernels, Native)):
        return None
    return kernels.capture(lambda: operation(*operands))


def native_lane() -> Native | None:
    """What makes queues and flags; None where the kernels in force are not native."""
    kernels = active_backend()
    return kernels if isinstance(kernels, Native) else None
