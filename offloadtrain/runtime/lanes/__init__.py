"""The lanes of a step (compute, d2h, host, h2d, load, comm) and the order between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from offloadtrain.runtime.lanes.base import (
    PARKED,
    Buffer,
    Interval,
    LaneError,
    LaneEvent,
    Lanes,
    LaneTotals,
    Operation,
    Range,
    Span,
    copy,
)
from offloadtrain.runtime.lanes.cuda import CudaLanes
from offloadtrain.runtime.lanes.exposed_time import exposed_by_lane
from offloadtrain.runtime.lanes.sequential import SequentialLanes
from offloadtrain.step.operations import Lane

__all__ = [
    "PARKED",
    "Buffer",
    "CudaLanes",
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
    "copy",
    "exposed_by_lane",
    "lanes_for",
    "on_lanes",
]

_chosen: ContextVar[Lanes | None] = ContextVar("lanes", default=None)


def lanes_for(
    device: torch.device, *, among_ranks: bool = False, state_on_device: bool = False
) -> Lanes:
    """The backend that overlaps where the device can: streams on CUDA, in order on the CPU; or what
    `on_lanes` has chosen."""
    if (chosen := _chosen.get()) is not None:
        return chosen
    if device.type != "cuda":
        return SequentialLanes()
    return CudaLanes(device, among_ranks=among_ranks, state_on_device=state_on_device)


@contextmanager
def on_lanes(lanes: Lanes) -> Iterator[None]:
    """What is offloaded inside runs on these: for tests and measurements."""
    token = _chosen.set(lanes)
    try:
        yield
    finally:
        _chosen.reset(token)
