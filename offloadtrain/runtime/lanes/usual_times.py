"""How long operations usually take: what stands for their time where it is not measured.

[Note: Timing events]
Two events around each operation are three quarters of the events of a step, and the thread that
launches pays for them. So an operation of a stream is timed the first few times that its name
occurs, of which the very first does not count, and again in sampled steps. Otherwise it counts as
long as its name took on average when it was timed last. Waits of compute are timed always: they
differ from step to step, and they are what the report is read for.
"""

from __future__ import annotations

from dataclasses import dataclass

from offloadtrain.step.program.operations import Lane

_LEARNT_RUNS = 4
"""Runs of a name that are timed before the first sampled step."""


@dataclass(slots=True)
class _Mean:
    """The runs of one name in one sample."""

    sample: int
    runs: int = 0
    total_ms: float = 0.0


class UsualTimes:
    """Means by lane and name, of the newest sample that has the name."""

    def __init__(self) -> None:
        self._sample = 0
        self._means: dict[tuple[Lane, str], _Mean] = {}

    def begin_sample(self) -> None:
        """What is timed from here on replaces what was timed before."""
        self._sample += 1

    def timed(self, lane: Lane, name: str, ms: float) -> None:
        """Note a run."""
        mean = self._means.get((lane, name))
        # The first run of all loads kernels and touches memory.
        if mean is None:
            self._means[lane, name] = _Mean(self._sample)
            return
        if mean.sample != self._sample:
            mean = self._means[lane, name] = _Mean(self._sample)
        mean.runs += 1
        mean.total_ms += ms

    def of(self, lane: Lane, name: str) -> float | None:
        """Return the usual milliseconds; None where runs should be timed. From any thread."""
        mean = self._means.get((lane, name))
        if mean is None or mean.runs < (1 if mean.sample else _LEARNT_RUNS):
            return None
        return mean.total_ms / mean.runs
