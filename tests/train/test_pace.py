"""The time that a run has left, from what it has measured so far."""

from __future__ import annotations

import math

import pytest

from offloadtrain.config.sections import TrainConfig
from offloadtrain.train.log.run_log import Pace


def test_the_trainer_counts_what_held_it_up() -> None:
    """Steps of 2 s, an evaluation of 5 s after every 4th, and 3 s for a checkpoint after it."""
    now_s = 0.0
    pace = Pace(TrainConfig(steps=12, eval_every=4, checkpoint_every=4), lambda: now_s)
    assert math.isnan(pace.seconds_left(0))
    for step in range(1, 9):
        pace.begin_step(step - 1)
        now_s += 2.0
        pace.end_step(2.0)
        if step % 4 == 0:
            now_s += 5.0 + 3.0
            pace.evaluated(5.0)
    pace.begin_step(8)
    assert pace.seconds_left(8) == pytest.approx(4 * 2.0 + 5.0 + 3.0)
    assert pace.seconds_left(12) == 0.0
