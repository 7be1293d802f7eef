"""The cost of a checkpoint, which is written while the next steps run."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE = 0.03
"""Of the time of a run: what checkpoints should cost less than."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """The cost of a checkpoint.

    Attributes:
        write_s: time of its writing.
        stall_s: time that training stands still: the next update waits for the writes.
        interval: the smallest number of steps between checkpoints that costs less than `SHARE`.
    """

    write_s: float
    stall_s: float
    interval: int


def save_cost(write_s: float, step_s: float, spill_s: float = 0.0) -> SaveCost:
    """Return the cost of a checkpoint, of which one step and the spill hide what they can.

    Args:
        write_s: the checkpoint's bytes over the disk's rate.
        spill_s: the spill's bytes over it; no update waits for these.
    """
    stall_s = max(0.0, write_s - step_s - spill_s)
    # One checkpoint at a time: the next one begins behind it.
    spent_s = max(stall_s / SHARE, write_s)
    return SaveCost(write_s, stall_s, max(1, math.ceil(spent_s / step_s)))
