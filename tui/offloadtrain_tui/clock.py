"""The monitor's clock: live, or of a replay."""

from __future__ import annotations

import time


class Clock:
    """Returns the machine's time, in Unix seconds."""

    def now_s(self) -> float:
        return time.time()


class ReplayClock(Clock):
    """Runs through a recorded interval at a speed; can be paused and moved."""

    def __init__(self, start_s: float, end_s: float, *, speed: float = 1.0) -> None:
        self.start_s, self.end_s, self.speed = start_s, end_s, speed
        self.paused = False
        self._at_s = start_s
        self._since = time.monotonic()

    def now_s(self) -> float:
        moved = 0.0 if self.paused else (time.monotonic() - self._since) * self.speed
        return min(self._at_s + moved, self.end_s)

    def move(self, to_s: float) -> None:
        """Continue from this time."""
        self._at_s, self._since = min(max(to_s, self.start_s), self.end_s), time.monotonic()

    def pause(self, paused: bool) -> None:
        self.move(self.now_s())
        self.paused = paused
