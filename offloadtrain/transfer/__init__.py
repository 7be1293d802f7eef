"""The lanes of a step (compute, d2h, host, h2d) and the order between them."""

import torch

from offloadtrain.transfer.base import (
    Buffer,
    Event,
    Interval,
    Lane,
    LaneError,
    Lanes,
    LaneTotals,
    Range,
    Span,
    copy,
)
from offloadtrain.transfer.cuda import CudaLanes
from offloadtrain.transfer.sequential import SequentialLanes

__all__ = [
    "Buffer",
    "CudaLanes",
    "Event",
    "Interval",
    "Lane",
    "LaneError",
    "LaneTotals",
    "Lanes",
    "Range",
    "SequentialLanes",
    "Span",
    "copy",
    "lanes_for",
]


def lanes_for(device: torch.device) -> Lanes:
    """The backend that overlaps where the device can: streams on CUDA, in order on the CPU."""
    return CudaLanes(device) if device.type == "cuda" else SequentialLanes()
