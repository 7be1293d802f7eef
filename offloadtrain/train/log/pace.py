"""How fast a run goes on, and what holds it up between steps: the time that it has left."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

from offloadtrain.config.job import TrainConfig
from offloadtrain.events.time_left import Pause, seconds_left

_RECENT_STEPS = 50


class Pace:
    """Steps, evaluations and pauses for checkpoints, as they were last."""

    def __init__(self, train: TrainConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._train, self._clock = train, clock
        self._step_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._evaluation_s = self._save_s = 0.0
        self._since_s: float | None = None

    @property
    def is_first_step(self) -> bool:
        return not self._step_s

    def begin_step(self, done: int) -> None:
        """Note what a checkpoint after step `done` has held the run up since then."""
        since_s, self._since_s = self._since_s, None
        if since_s is not None and self._is_due(self._train.checkpoint_every, done):
            evaluated = self._is_due(self._train.eval_every, done)
            paused_s = self._clock() - since_s - (self._evaluation_s if evaluated else 0.0)
            self._save_s = max(paused_s, 0.0)

    def end_step(self, seconds: float) -> None:
        self._step_s.append(seconds)
        self._since_s = self._clock()

    def evaluated(self, seconds: float) -> None:
        self._evaluation_s = seconds

    def seconds_left(self, step: int) -> float:
        """Return the time from the end of `step` to the end of the run; NaN before a step."""
        if self.is_first_step:
            return math.nan
        evaluations = Pause(self._train.eval_every, self._evaluation_s)
        saves = Pause(self._train.checkpoint_every, self._save_s)
        usual_s = statistics.median(self._step_s)
        return seconds_left(step, self._train.steps, usual_s, (evaluations, saves))

    @staticmethod
    def _is_due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0
