"""Predicts when a run ends, from its steps, evaluations and pauses for checkpoints.

Used by the trainer's console and by the monitor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause after every `every_steps` steps (0: never), and once more at the end."""

    every_steps: int
    seconds: float

    def times(self, step: int, steps: int) -> int:
        """Return how many pauses follow after a step."""
        if not self.every_steps or step >= steps:
            return 0
        return (steps - 1) // self.every_steps - step // self.every_steps + 1


def seconds_left(step: int, steps: int, step_s: float, pauses: Iterable[Pause] = ()) -> float:
    """Return the seconds from the end of `step` to the end of the run."""
    paused_s = sum(pause.times(step, steps) * pause.seconds for pause in pauses)
    return max(steps - step, 0) * step_s + paused_s
