"""A rank at one moment: the records of a growing log up to that moment."""

from __future__ import annotations

import statistics
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from offloadtrain.events import schema
from offloadtrain_tui.reading.columns import SAMPLED_STEPS, Live, Spans
from offloadtrain_tui.reading.history import E, History, Moment
from offloadtrain_tui.text import is_on_cpu


@dataclass(frozen=True, slots=True)
class View:
    """A rank at `time_s`; its steps so far are positions [0, length) of each series."""

    history: History
    time_s: float
    length: int

    @classmethod
    def at(cls, history: History, time_s: float | None = None) -> View:
        """Return the view at a time; None: with all records."""
        if time_s is None:
            return cls(history, float("inf"), len(history.steps.times))
        return cls(history, time_s, history.steps.count(time_s))

    def newest(self, kind: type[E]) -> E | None:
        """Return the newest record of a kind."""
        return self.history.of(kind).at(self.time_s)

    @property
    def step(self) -> int:
        """Number of the last step; before the first step of a start, the step that it resumes
        from."""
        start = self.start
        if self.is_before_first_step:
            return start.start_step if start else 0
        return self.history.steps.values[self.length - 1]

    @property
    def is_before_first_step(self) -> bool:
        """True if the newest start has no step yet."""
        since_s = self.started_s
        step_s = self.step_time_s
        return step_s is None or (since_s is not None and step_s < since_s)

    @property
    def started_s(self) -> float | None:
        """Time of the newest start."""
        return self.history.of(schema.RunStarted).newest_s(self.time_s)

    @property
    def step_time_s(self) -> float | None:
        return self.history.steps.times[self.length - 1] if self.length else None

    @property
    def start(self) -> schema.RunStarted | None:
        return self.newest(schema.RunStarted)

    @property
    def plan(self) -> schema.Json:
        """The plan logged by the newest start; {} without one."""
        return self.start.plan if self.start else {}

    @property
    def on_cpu(self) -> bool:
        """True if the run uses no GPU."""
        return is_on_cpu(self.start)

    @property
    def end(self) -> schema.RunEnded | None:
        """The end of the newest start; None if it has not ended."""
        ended_s = self.history.of(schema.RunEnded).newest_s(self.time_s)
        is_earlier = ended_s is not None and ended_s < (self.started_s or 0.0)
        return None if is_earlier else self.newest(schema.RunEnded)

    @property
    def memory(self) -> tuple[schema.MemoryRow, ...]:
        memory = self.newest(schema.Memory)
        return memory.rows if memory else ()

    @property
    def system(self) -> schema.System | None:
        return self.history.systems.at(self.time_s)

    @property
    def system_time_s(self) -> float | None:
        return self.history.systems.newest_s(self.time_s)

    @property
    def live(self) -> Live | None:
        """The newest sample of the rank's memory."""
        return self.history.live.at(self.time_s)

    @property
    def val_loss(self) -> float | None:
        newest = self.newest(schema.Eval)
        return newest.val_loss if newest else None

    @property
    def total_steps(self) -> int | None:
        return self.setting("train", "steps") or None

    def setting(self, *keys: str) -> int:
        """Return an integer of the job's configuration; 0 if it is not set."""
        value: Any = self.start.config if self.start else None
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value if type(value) is int and value > 0 else 0

    @property
    def spans(self) -> Spans:
        """The timeline of the newest sampled step."""
        timelines = self.history.timelines
        count = timelines.count(self.time_s)
        for step in reversed(timelines.values[max(count - SAMPLED_STEPS, 0) : count]):
            if (spans := timelines.of(step)) is not None:
                return spans
        return Spans()

    @property
    def moments(self) -> list[Moment]:
        moments = self.history.moments
        return moments.values[: moments.count(self.time_s)]

    def last(self, name: str) -> float | None:
        """Return the newest value of a series; None if its last 64 steps have none."""
        return self.history.series[name].last(self.length)

    def newest_values(self, name: str, most: int) -> array[float]:
        """Return the last `most` values of a series, or fewer; NaN for missing values."""
        return self.history.series[name].values[max(self.length - most, 0) : self.length]

    def busy_ms(self, lane: str) -> float:
        return self.history.busy[lane].last(self.length) or 0.0

    def active_alerts(self) -> list[schema.Alert]:
        """Alerts of this start that are neither cleared nor acknowledged, the newest last."""
        if self.end is not None:
            return []
        alerts, since_s = self.history.of(schema.Alert), self.started_s
        active: dict[str, tuple[float, schema.Alert]] = {}
        first = 0 if since_s is None else bisect_left(alerts.times, since_s)
        for index in range(first, alerts.count(self.time_s)):
            alert = alerts.values[index]
            active.pop(alert.code, None)
            if alert.state == "raised":
                active[alert.code] = (alerts.times[index], alert)
        # Code of an alert → time of its last acknowledgement.
        controls = self.history.of(schema.Control)
        pairs = zip(controls.times, controls.values[: controls.count(self.time_s)], strict=False)
        acknowledged_s = {
            control.message: time_s
            for time_s, control in pairs
            if control.action == "acknowledge" and control.state == "done"
        }
        return [
            alert for code, (at_s, alert) in active.items() if acknowledged_s.get(code, -1.0) < at_s
        ]

    def median_step_ms(self, of: int = 50) -> float | None:
        values = self.newest_values("step_ms", of)
        return statistics.median_high(values) if values else None

    def median_own_ms(self, of: int = 50) -> float | None:
        """Median of the rank's step time without waits; with waits if these are unknown."""
        known = [value for value in self.newest_values("own_ms", of) if value > 0]
        return statistics.median_high(known) if known else self.median_step_ms(of)
