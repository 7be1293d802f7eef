"""The learning rate as a pure function of the step, so that a resume needs no scheduler state."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: Schedule,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
) -> float:
    """Return the rate of optimizer step `step`, counted from 0.

    The warm-up is linear and reaches `peak` in its last step (step `warmup_steps - 1`). Then the
    rate falls to `peak * min_ratio`, which the last step (`total_steps - 1`) uses. It follows half
    a cosine (SGDR, arXiv:1608.03983, without restarts) or a straight line. "constant" stays at
    `peak`. Steps after the end use the last rate.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    first, last = max(warmup_steps - 1, 0), total_steps - 1
    progress = (min(step, last) - first) / max(last - first, 1)
    # Remaining share of the decay: 1 at the start, 0 in the last step.
    left = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1.0 - min_ratio) * left)
