"""What a rank's log says, folded into columns and lists that only grow.

Who has a `View` has a run as it was at one moment: it never changes, however the log goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from offloadtrain import events
from offloadtrain.events import Record
from offloadtrain_tui.series import Series, Smoothed
from offloadtrain_tui.text import clean

LANES = ("compute", "d2h", "host", "h2d", "load")
STEP_FIELDS = (
    "loss", "lr", "grad_norm", "loss_scale", "tokens", "tokens_per_s", "step_ms", "data_ms",
    "forward_ms", "backward_ms", "optimizer_ms", "exposed_ms", "d2h_bytes", "h2d_bytes", "mfu",
)  # fmt: skip
DERIVED = ("val_loss", "h2d_gbps", "d2h_gbps", "exposed_share")
SAMPLES = ("rss_bytes", "host_available_bytes", "cpu_percent", "swap_used_bytes", "gpu_bytes")
SAMPLED_STEPS = 256
"""Timelines that are kept: the newest."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened, as a line of the event list.

    Attributes:
        level: "info", "good", "warning" or "error".
        raw: the record's line in the log.
    """

    time_s: float
    step: int | None
    kind: str
    level: str
    text: str
    rank: int = 0
    raw: bytes = b""


@dataclass(slots=True)
class Timed:
    """Values with the time from which each one holds."""

    times: list[float] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, time_s: float, value: Any) -> None:
        # A clock that was set back must not make the newest value unreachable.
        self.times.append(max(time_s, self.times[-1]) if self.times else time_s)
        self.values.append(value)

    def count(self, time_s: float) -> int:
        """How many values hold at a time."""
        return bisect_right(self.times, time_s)

    def at(self, time_s: float, default: _T) -> _T | Any:
        count = self.count(time_s)
        return self.values[count - 1] if count else default


class History:
    """One rank's log, folded."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.steps = Timed()
        """Step numbers; position i in it is position i in every series."""
        self.series: dict[str, Series] = {name: Series() for name in (*STEP_FIELDS, *DERIVED)}
        self.samples: dict[str, Series] = {name: Series() for name in SAMPLES}
        """One number per sample of the machine: as long as `systems`."""
        self.busy: dict[str, Series] = {lane: Series() for lane in LANES}
        self.smoothed = {
            name: Smoothed(self.series[name], span=20.0) for name in ("loss", "tokens_per_s")
        }
        self.skipped: list[int] = []
        """Positions of steps that were skipped, or whose loss was not finite."""
        self.starts = Timed()
        self.ends = Timed()
        self.memory = Timed()
        self.systems = Timed()
        self.evals = Timed()
        self.checkpoints = Timed()
        self.alerts = Timed()
        self.controls = Timed()
        self.moments = Timed()
        self.sampled = Timed()
        """Step numbers whose lanes were sampled."""
        self.spans: OrderedDict[int, list[events.Span]] = OrderedDict()
        self.last_time_s = 0.0
        self.unreadable = 0

    def feed_line(self, line: bytes) -> None:
        """A line of the log; one that cannot be read is counted."""
        if not line.strip():
            return
        record = events.from_line(line)
        if record is None:
            self.unreadable += 1
        else:
            self.feed(record, line)

    def feed(self, record: Record, line: bytes = b"") -> None:
        self.last_time_s = max(self.last_time_s, record.time_s)
        fold = _FOLDS.get(type(record.event))
        if fold is not None:
            fold(self, record.event, record.time_s)
        moment = _moment(record, line)
        if moment is not None:
            self.moments.add(record.time_s, moment)

    @property
    def first_time_s(self) -> float:
        known = [timed.times[0] for timed in (self.starts, self.steps, self.moments) if timed.times]
        return min(known, default=0.0)

    # ---- one kind each

    def _step(self, event: events.Step, time_s: float) -> None:
        for name in STEP_FIELDS:
            self.series[name].append(getattr(event, name))
        val = self.evals.values[-1].val_loss if self.evals.values else None
        self.series["val_loss"].append(val)
        up_ms = event.busy_ms.get("h2d", 0.0) + event.busy_ms.get("load", 0.0)
        self.series["h2d_gbps"].append(_gbps(event.h2d_bytes, up_ms))
        self.series["d2h_gbps"].append(_gbps(event.d2h_bytes, event.busy_ms.get("d2h", 0.0)))
        share = event.exposed_ms / event.step_ms if event.step_ms > 0 else None
        self.series["exposed_share"].append(share)
        for lane, series in self.busy.items():
            series.append(event.busy_ms.get(lane))
        loss = event.loss
        if event.skipped or loss != loss or abs(loss) == float("inf"):
            self.skipped.append(len(self.steps.values))
        self.steps.add(time_s, event.step)  # last: who sees the length finds all columns as long

    def _system(self, event: events.System, time_s: float) -> None:
        used = [gpu.memory_used_bytes for gpu in event.gpus if gpu.memory_used_bytes is not None]
        for name in SAMPLES[:-1]:
            self.samples[name].append(getattr(event, name))
        self.samples["gpu_bytes"].append(sum(used) if used else None)
        self.systems.add(time_s, event)

    def _span(self, event: events.Span, time_s: float) -> None:
        if event.step not in self.spans:
            self.spans[event.step] = []
            self.sampled.add(time_s, event.step)
            while len(self.spans) > SAMPLED_STEPS:
                self.spans.popitem(last=False)
        self.spans[event.step].append(event)


def _gbps(nbytes: int, spent_ms: float) -> float | None:
    """Bandwidth of a lane while it worked, 10^9 bytes per second."""
    return nbytes / spent_ms / 1e6 if spent_ms > 0 else None


def _kept(name: str) -> Callable[[History, Any, float], None]:
    def keep(history: History, event: Any, time_s: float) -> None:
        getattr(history, name).add(time_s, event)

    return keep


_FOLDS: dict[type, Callable[[History, Any, float], None]] = {
    events.Step: History._step,
    events.Span: History._span,
    events.RunStarted: _kept("starts"),
    events.RunEnded: _kept("ends"),
    events.Memory: _kept("memory"),
    events.System: History._system,
    events.Eval: _kept("evals"),
    events.Checkpoint: _kept("checkpoints"),
    events.Alert: _kept("alerts"),
    events.Control: _kept("controls"),
}


def _moment(record: Record, line: bytes) -> Moment | None:
    """The line of the event list that a record makes, if it makes one."""
    tell = _TOLD.get(type(record.event))
    if tell is None:
        return None
    level, text = tell(record.event)
    if not text:
        return None
    step = getattr(record.event, "step", None)
    kind = record.event.KIND
    return Moment(record.time_s, step, kind, level, clean(text), record.rank, line)


def _told_step(event: events.Step) -> tuple[str, str]:
    if event.skipped:
        return "warning", f"skipped: gradient norm {event.grad_norm}"
    finite = event.loss == event.loss and abs(event.loss) != float("inf")
    return ("info", "") if finite else ("error", f"loss is {event.loss}")


def _told_start(event: events.RunStarted) -> tuple[str, str]:
    what = "started" if not event.start_step else f"goes on after step {event.start_step}"
    return "good", f"{event.name} {what}, pid {event.pid}"


def _told_end(event: events.RunEnded) -> tuple[str, str]:
    level = {"done": "good", "stopped": "warning"}.get(event.status, "error")
    return level, f"{event.status} at step {event.step}" + (
        f": {event.message}" if event.message else ""
    )


def _told_checkpoint(event: events.Checkpoint) -> tuple[str, str]:
    return "error" if event.state == "failed" else "good", f"{event.state} {event.path}"


def _told_alert(event: events.Alert) -> tuple[str, str]:
    if event.state == "cleared":
        return "good", f"{event.code} is over: {event.message}"
    return event.level, f"{event.code}: {event.message}"


def _told_control(event: events.Control) -> tuple[str, str]:
    level = {"done": "good", "refused": "error"}.get(event.state, "info")
    return level, f"{event.action} {event.state}" + (f": {event.message}" if event.message else "")


_TOLD: dict[type, Callable[[Any], tuple[str, str]]] = {
    events.Step: _told_step,
    events.RunStarted: _told_start,
    events.RunEnded: _told_end,
    events.Checkpoint: _told_checkpoint,
    events.Alert: _told_alert,
    events.Control: _told_control,
    events.Warning_: lambda event: ("warning", f"{event.code}: {event.message}"),
    events.Eval: lambda event: ("info", f"validation loss {event.val_loss:.4f}"),
    events.Sample: lambda event: ("info", f"sample: {event.prompt}{event.text}"),
}


@dataclass(frozen=True, slots=True)
class View:
    """A rank as it was at `time_s`: positions [0, length) of its series have happened."""

    history: History
    time_s: float
    length: int

    @classmethod
    def at(cls, history: History, time_s: float | None = None) -> View:
        """None: the newest."""
        if time_s is None:
            return cls(history, float("inf"), len(history.steps.values))
        return cls(history, time_s, history.steps.count(time_s))

    @property
    def step(self) -> int:
        """Number of the last step; 0 before the first."""
        return self.history.steps.values[self.length - 1] if self.length else 0

    @property
    def step_time_s(self) -> float | None:
        return self.history.steps.times[self.length - 1] if self.length else None

    @property
    def start(self) -> events.RunStarted | None:
        found: events.RunStarted | None = self.history.starts.at(self.time_s, None)
        return found

    @property
    def end(self) -> events.RunEnded | None:
        """How the newest start ended, if it has."""
        ends, starts = self.history.ends, self.history.starts
        ended, started = ends.count(self.time_s), starts.count(self.time_s)
        if not ended or (started and ends.times[ended - 1] < starts.times[started - 1]):
            return None
        found: events.RunEnded = ends.values[ended - 1]
        return found

    @property
    def memory(self) -> tuple[events.MemoryRow, ...]:
        found: events.Memory | None = self.history.memory.at(self.time_s, None)
        return found.rows if found else ()

    @property
    def system(self) -> events.System | None:
        found: events.System | None = self.history.systems.at(self.time_s, None)
        return found

    @property
    def val_loss(self) -> float | None:
        found: events.Eval | None = self.history.evals.at(self.time_s, None)
        return found.val_loss if found else None

    @property
    def total_steps(self) -> int | None:
        start = self.start
        steps = _dig(start.config, "train", "steps") if start else None
        return steps if isinstance(steps, int) else None

    @property
    def spans(self) -> list[events.Span]:
        """Of the newest sampled step."""
        sampled = self.history.sampled
        for step in reversed(sampled.values[: sampled.count(self.time_s)]):
            if step in self.history.spans:
                return self.history.spans[step]
        return []

    @property
    def moments(self) -> list[Moment]:
        moments = self.history.moments
        return moments.values[: moments.count(self.time_s)]

    def last(self, name: str) -> float | None:
        """Of a series; None if the last step had none."""
        return self.history.series[name].last(self.length)

    def busy_ms(self, lane: str) -> float:
        return self.history.busy[lane].last(self.length) or 0.0

    def active_alerts(self) -> list[events.Alert]:
        """Raised and not cleared, the newest last."""
        alerts = self.history.alerts
        active: dict[str, events.Alert] = {}
        for alert in alerts.values[: alerts.count(self.time_s)]:
            active.pop(alert.code, None)
            if alert.state == "raised":
                active[alert.code] = alert
        return list(active.values())

    def median_step_ms(self, of: int = 50) -> float | None:
        values = self.history.series["step_ms"].values[max(self.length - of, 0) : self.length]
        return sorted(values)[len(values) // 2] if values else None

    def seconds_left(self) -> float | None:
        """By the median of the last steps."""
        total, step_ms = self.total_steps, self.median_step_ms()
        if total is None or step_ms is None:
            return None
        return max(total - self.step, 0) * step_ms / 1e3


def fold(lines: Iterable[bytes], rank: int = 0) -> History:
    """A whole log."""
    history = History(rank)
    for line in lines:
        history.feed_line(line)
    return history


def _dig(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values
