"""The lanes of a step (`step.program.operations.Lane`) and the order between them.

One interface, `base.py`: streams and native threads on CUDA, threads or no threads on the CPU.
Lanes are independent of the operations that they run. Start at `base.Lanes`, then `cuda.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from offloadtrain.runtime.lanes.base import (
    Buffer,
    HostProgress,
    LaneError,
    LaneEvent,
    Lanes,
    LaneTotals,
    Operation,
    Range,
    SequentialLanes,
    Span,
    copy,
    views,
)
from offloadtrain.runtime.lanes.cuda import CudaLanes
from offloadtrain.runtime.lanes.timeline import Interval, Timeline
from offloadtrain.step.program.operations import Lane

__all__ = [
    "Buffer",
    "CudaLanes",
    "HostProgress",
    "Interval",
    "Lane",
    "LaneError",
    "LaneEvent",
    "LaneTotals",
    "Lanes",
    "Operation",
    "Range",
    "SequentialLanes",
    "Span",
    "Timeline",
    "copy",
    "lanes_for",
    "on_lanes",
    "views",
]

_chosen: ContextVar[Lanes | Callable[[], Lanes] | None] = ContextVar("lanes", default=None)


def lanes_for(device: torch.device, *, among_ranks: bool = False) -> Lanes:
    """Make the lanes of a device: streams on CUDA, sequential on the CPU; or those of
    `on_lanes`."""
    if (chosen := _chosen.get()) is not None:
        return chosen if isinstance(chosen, Lanes) else chosen()
    if device.type != "cuda":
        return SequentialLanes()
    return CudaLanes(device, among_ranks=among_ranks)


@contextmanager
def on_lanes(lanes: Lanes | Callable[[], Lanes]) -> Iterator[None]:
    """Models offloaded in this context run on these lanes, or each on new lanes that a function
    makes: for tests and measurements."""
    token = _chosen.set(lanes)
    try:
        yield
    finally:
        _chosen.reset(token)
