"""The end of a run is as far away as a simulation of it takes."""

from __future__ import annotations

import pytest

from offloadtrain.events.time_left import Pause, seconds_left


def walked(step: int, steps: int, step_s: float, every: int, pause_s: float) -> float:
    """Step by step, as the trainer goes: a pause after each multiple, and one at the end."""
    spent = 0.0
    for done in range(step + 1, steps + 1):
        spent += step_s
        spent += pause_s if done == steps or (every and done % every == 0) else 0.0
    return spent


def test_the_time_left_is_the_sum_of_steps_and_pauses() -> None:
    for steps in (1, 7, 20, 21):
        for step in range(steps + 1):
            for every in (1, 2, 5, 20, 30):
                left_s = seconds_left(step, steps, 3.0, [Pause(every, 10.0)])
                assert left_s == pytest.approx(walked(step, steps, 3.0, every, 10.0))
    assert seconds_left(3, 10, 2.0, [Pause(0, 99.0)]) == 14.0
