"""For which device the losses choose the size of their pieces.

Fake tensors of a trace are the CPU's, and may stand for those of another device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_stands_for_cpu: ContextVar[bool] = ContextVar("the CPU's tensors are the CPU's", default=True)


def pieces_of_cpu(tensor: Tensor) -> bool:
    """Return whether what is computed from this tensor takes pieces of the size for a CPU."""
    return tensor.device.type == "cpu" and _stands_for_cpu.get()


@contextmanager
def cpu_stands_for(*, on_cpu: bool) -> Iterator[None]:
    """Let the CPU's tensors of this thread stand for another device's, unless `on_cpu`."""
    token = _stands_for_cpu.set(on_cpu)
    try:
        yield
    finally:
        _stands_for_cpu.reset(token)
