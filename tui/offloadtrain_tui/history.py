"""A rank's log as append-only columns and lists.

A `View` is an immutable snapshot: it does not change when the log grows.
"""

from __future__ import annotations

import math
import re
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any, TypeVar

import orjson

from offloadtrain.events import schema
from offloadtrain.events.schema import Json, Record
from offloadtrain_tui.gpu_history import GpuHistory
from offloadtrain_tui.live_memory import Live, LiveMemory
from offloadtrain_tui.moments import Moment, moment_of
from offloadtrain_tui.packed import TimedLines
from offloadtrain_tui.series import Measured, Series, Smoothed
from offloadtrain_tui.text import clean
from offloadtrain_tui.timelines import SAMPLED_STEPS, Spans, Timelines

LANES = (
    *("compute", "d2h", "host", "h2d", "load", "comm", "ortho", "update"),
    *("write", "disk_read", "disk_write", "disk_load"),
)
STEP_FIELDS = (
    "loss", "lr", "grad_norm", "loss_scale", "tokens", "tokens_per_s", "step_ms", "data_ms",
    "forward_ms", "backward_ms", "optimizer_ms", "exposed_ms", "d2h_bytes", "h2d_bytes", "mfu",
    "comm_bytes", "disk_read_bytes", "disk_written_bytes", "own_ms", "device_peak_bytes",
    "host_peak_bytes",
)  # fmt: skip
_ALL_COLUMNS = itemgetter(*STEP_FIELDS)
_NO_LANES = (None,) * len(LANES)
DERIVED = ("h2d_gbps", "d2h_gbps", "exposed_share", "host_ms")
_DERIVED_FROM = ("h2d_bytes", "d2h_bytes", "exposed_ms", "step_ms")
_T = TypeVar("_T")
_BULK = (schema.Step, schema.System, schema.LiveMemory)
"""Kinds read without their classes, since there are hundreds of thousands."""
_SPAN = re.compile(rb'\{"v":\d+,"k":"span","t":(\d{1,12}\.?\d*),"m":\d+,"r":\d+,"step":(\d{1,15}),')
"""Prefix of a span's line; spans are parsed only for display."""


@dataclass(slots=True)
class Timed:
    """Values with the time from which each is valid."""

    times: list[float] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, time_s: float, value: Any) -> None:
        self.values.append(value)  # first: another thread counts the times
        # A clock set back must not make the newest value unreachable.
        self.times.append(max(time_s, self.times[-1]) if self.times else time_s)

    def count(self, time_s: float) -> int:
        """Return the number of values valid at a time."""
        return bisect_right(self.times, time_s)

    def at(self, time_s: float, default: _T) -> _T | Any:
        count = self.count(time_s)
        return self.values[count - 1] if count else default


class History:
    """The parsed log of one rank."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.steps = Timed()
        """Step numbers; position i is position i in every series."""
        self.series: dict[str, Series] = {name: Series() for name in (*STEP_FIELDS, *DERIVED)}
        self.val_loss = self.series["val_loss"] = Measured()
        self.busy: dict[str, Series] = {lane: Series() for lane in LANES}
        self._smoothed: dict[tuple[str, int], Smoothed] = {}
        self.skipped: list[int] = []
        """Positions of steps that were skipped, or whose loss was not finite."""
        self.starts = Timed()
        self.set_ups = Timed()
        self.ends = Timed()
        self.memory = Timed()
        self.live = LiveMemory()
        self.curves = Timed()
        self.systems = TimedLines()
        """Samples of the machine, which are read only for display."""
        self.gpu = GpuHistory()
        self.evals = Timed()
        self.checkpoints = Timed()
        self.alerts = Timed()
        self.controls = Timed()
        self.moments = Timed()
        self.sampled = Timed()
        """Step numbers whose lanes were sampled."""
        self.timelines = Timelines()
        self._shown_system: tuple[int, schema.System | None] = (0, None)
        self._pending: list[tuple[Any, ...]] = []
        self.last_time_s = 0.0
        self.unreadable = 0

    def smoothed(self, name: str, span: int) -> Smoothed:
        """Return a series' moving average over `span` steps; reading it extends it."""
        found = self._smoothed.get((name, span))
        if found is None:
            found = self._smoothed[name, span] = Smoothed(self.series[name], float(span))
        return found

    def feed_lines(self, lines: Iterable[bytes]) -> None:
        """Add lines of the log; unreadable ones are counted."""
        for line in lines:
            self._feed_line(line)
        self._flush()

    def _feed_line(self, line: bytes) -> None:
        if (span := _SPAN.match(line)) is not None:
            self._span(int(span[2]), float(span[1]), line)
            return
        try:
            values = orjson.loads(line)
        except ValueError:
            self.unreadable += bool(line.strip())
            return
        kind = values.get("k") if isinstance(values, dict) else None
        if (
            (kind == "step" and self._step(values, line))
            or (kind == "system" and self._system(values, line))
            or (kind == "live_memory" and self.live.add(values))
        ):
            return
        record = schema.from_values(values)
        if record is None or not math.isfinite(record.time_s) or isinstance(record.event, _BULK):
            self.unreadable += 1
        else:
            self.feed(record, line)

    def feed(self, record: Record, line: bytes = b"") -> None:
        """Add a record other than a step."""
        self.last_time_s = max(self.last_time_s, record.time_s)
        if isinstance(record.event, schema.LaneSpan):
            kept = line or schema.to_line(record.event, record.rank, record.time_s).strip()
            self._span(record.event.step, record.time_s, kept)
        fold = _FOLDS.get(type(record.event))
        if fold is not None:
            fold(self, record.event, record.time_s)
        moment = moment_of(record, line)
        if moment is not None:
            self.moments.add(record.time_s, moment)

    @property
    def step_count(self) -> int:
        """Steps that have been read, those that are not in the columns yet too."""
        return len(self.steps.values) + len(self._pending)

    @property
    def first_time_s(self) -> float:
        known = [timed.times[0] for timed in (self.starts, self.steps, self.moments) if timed.times]
        return min(known, default=0.0)

    # ---- one kind each

    # [Note: Columns]
    # There may be 100,000 steps. Of each, the values of all columns are taken out of its JSON at
    # once, in one call. They enter the columns when the current lines are read, one column at a
    # time. The JSON itself is dropped at once: thousands of dicts would not stay in a cache.

    def _step(self, values: Json, line: bytes) -> bool:
        """Add a step; False if it is not valid."""
        number, time_s = values.get("step"), _number(values.get("t"))
        if type(number) is not int or time_s is None or not math.isfinite(time_s):
            return False
        busy = values.get("busy_ms")
        worked = map(busy.get, LANES) if isinstance(busy, dict) else _NO_LANES
        self._pending.append((number, time_s, *_taken(values), *worked))
        self._odd(values, number, time_s, line)
        self.last_time_s = max(self.last_time_s, time_s)
        return True

    def _flush(self) -> None:
        rows, self._pending = self._pending, []
        if not rows:
            return
        numbers, times, *columns = zip(*rows, strict=True)
        series = (*(self.series[name] for name in STEP_FIELDS), *self.busy.values())
        for one, column in zip(series, columns, strict=True):
            one.extend(_floats(column))
        self._derive(len(rows))
        last_s = self.steps.times[-1] if self.steps.times else 0.0
        self.steps.values += numbers  # the length that others go by is that of the times
        # A clock set back does not hide earlier steps.
        self.steps.times += islice(accumulate(times, max, initial=last_s), 1, None)

    def _derive(self, count: int) -> None:
        """Compute derived columns of the last `count` steps."""
        of = {name: self.series[name].values[-count:] for name in _DERIVED_FROM}
        worked = {lane: series.values[-count:] for lane, series in self.busy.items()}
        up_ms = [
            h + (load if load == load else 0.0)
            for h, load in zip(worked["h2d"], worked["load"], strict=True)
        ]
        self.series["h2d_gbps"].extend(_ratios(of["h2d_bytes"], up_ms, 1e-6))
        self.series["d2h_gbps"].extend(_ratios(of["d2h_bytes"], worked["d2h"], 1e-6))
        self.series["exposed_share"].extend(_ratios(of["exposed_ms"], of["step_ms"]))
        self.series["host_ms"].extend(list(worked["host"]))

    def _odd(self, values: Json, number: int, time_s: float, line: bytes) -> None:
        """Mark and list skipped steps and non-finite losses."""
        loss = values.get("loss")
        loss = loss if type(loss) is float else _number(loss)
        finite = loss is not None and math.isfinite(loss)
        if finite and values.get("skipped") is not True:
            return
        self.skipped.append(self.step_count - 1)
        rank = values.get("r")
        rank = rank if isinstance(rank, int) else self.rank
        norm = clean(str(values.get("grad_norm")), 40)
        text = f"skipped: gradient norm {norm}" if finite else f"loss is {loss}"
        level = "warning" if finite else "error"
        self.moments.add(time_s, Moment(time_s, number, "step", level, text, rank, line))

    def _system(self, values: Json, line: bytes) -> bool:
        """Add a sample of the machine; False if it is not valid."""
        time_s = _number(values.get("t"))
        if time_s is None or not math.isfinite(time_s) or type(values.get("gpus", [])) is not list:
            return False
        self.last_time_s = max(self.last_time_s, time_s)
        self.systems.add(time_s, line)
        start: schema.RunStarted | None = self.starts.values[-1] if self.starts.values else None
        self.gpu.add(
            time_s, values.get("gpus", []), str(start.plan.get("gpu_uuid", "")) if start else ""
        )
        return True

    def _span(self, step: int, time_s: float, line: bytes) -> None:
        if self.timelines.add(step, line):
            self.sampled.add(time_s, step)
        self.last_time_s = max(self.last_time_s, time_s)

    def system(self, time_s: float) -> schema.System | None:
        """Return the newest sample of the machine at a time."""
        count = self.systems.count(time_s)
        if not count:
            return None
        known, found = self._shown_system
        if count != known:
            record = schema.from_line(self.systems[count - 1])
            found = record.event if record and isinstance(record.event, schema.System) else None
            self._shown_system = (count, found)
        return found


def _number(value: Any) -> float | None:
    """Convert parsed JSON, in which non-finite numbers are strings."""
    if type(value) is float or type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return float(value) if value in ("nan", "inf", "-inf") else None


def _taken(values: Json) -> tuple[Any, ...]:
    """Return a step's value of each column; None for missing ones."""
    try:
        found: tuple[Any, ...] = _ALL_COLUMNS(values)
    except KeyError:
        return tuple(map(values.get, STEP_FIELDS))
    return found


def _floats(values: Sequence[Any]) -> array[float]:
    """Convert values to numbers, NaN for missing ones."""
    try:
        return _packed(values)
    except (struct.error, OverflowError):
        pass  # some are missing, or no numbers
    if values.count(None) == len(values):
        return array("d", [math.nan]) * len(values)
    numbers = map(_number, values)
    return array("d", [math.nan if value is None else value for value in numbers])


def _packed(values: Sequence[float]) -> array[float]:
    """Convert numbers; in a third of the time that array() takes."""
    found = array("d")
    found.frombytes(struct.pack(f"{len(values)}d", *values))
    return found


def _ratios(over: Sequence[float], under: Sequence[float], factor: float = 1.0) -> list[float]:
    """Divide element by element; NaN for zero time."""
    pairs = zip(over, under, strict=True)
    return [factor * a / b if b > 0 else math.nan for a, b in pairs]


def _evaluated(history: History, event: schema.Eval, time_s: float) -> None:
    history.evals.add(time_s, event)
    history.val_loss.measure(max(history.step_count - 1, 0), event.val_loss)


def _kept(name: str) -> Callable[[History, Any, float], None]:
    def keep(history: History, event: Any, time_s: float) -> None:
        getattr(history, name).add(time_s, event)

    return keep


_FOLDS: dict[type, Callable[[History, Any, float], None]] = {
    schema.RunStarted: _kept("starts"),
    schema.SetUp: _kept("set_ups"),
    schema.RunEnded: _kept("ends"),
    schema.Memory: _kept("memory"),
    schema.StepMemory: _kept("curves"),
    schema.Eval: _evaluated,
    schema.Checkpoint: _kept("checkpoints"),
    schema.Alert: _kept("alerts"),
    schema.Control: _kept("controls"),
}


@dataclass(frozen=True, slots=True)
class View:
    """A rank at `time_s`: positions [0, length) of its series have happened."""

    history: History
    time_s: float
    length: int

    @classmethod
    def at(cls, history: History, time_s: float | None = None) -> View:
        """Return the view at a time; None: the newest."""
        if time_s is None:
            return cls(history, float("inf"), len(history.steps.times))
        return cls(history, time_s, history.steps.count(time_s))

    @property
    def step(self) -> int:
        """Number of the last step; before the first one of a start, the one it goes on from."""
        start = self.start
        if self.is_before_first_step:
            return start.start_step if start else 0
        number: int = self.history.steps.values[self.length - 1]
        return number

    @property
    def is_before_first_step(self) -> bool:
        """True if the newest start has no step yet."""
        since_s = self.started_s
        step_s = self.step_time_s
        return step_s is None or (since_s is not None and step_s < since_s)

    @property
    def started_s(self) -> float | None:
        """Time of the newest start."""
        count = self.history.starts.count(self.time_s)
        return self.history.starts.times[count - 1] if count else None

    @property
    def step_time_s(self) -> float | None:
        return self.history.steps.times[self.length - 1] if self.length else None

    @property
    def start(self) -> schema.RunStarted | None:
        found: schema.RunStarted | None = self.history.starts.at(self.time_s, None)
        return found

    @property
    def end(self) -> schema.RunEnded | None:
        """The end of the newest start, if it has ended."""
        ends, starts = self.history.ends, self.history.starts
        ended, started = ends.count(self.time_s), starts.count(self.time_s)
        if not ended or (started and ends.times[ended - 1] < starts.times[started - 1]):
            return None
        found: schema.RunEnded = ends.values[ended - 1]
        return found

    @property
    def memory(self) -> tuple[schema.MemoryRow, ...]:
        found: schema.Memory | None = self.history.memory.at(self.time_s, None)
        return found.rows if found else ()

    @property
    def system(self) -> schema.System | None:
        return self.history.system(self.time_s)

    @property
    def system_time_s(self) -> float | None:
        found = self.history.systems
        count = found.count(self.time_s)
        return found.times[count - 1] if count else None

    @property
    def live(self) -> Live | None:
        """The newest sample of the rank's memory."""
        return self.history.live.at(self.time_s)

    @property
    def curve(self) -> schema.StepMemory | None:
        """Memory within the newest sampled step."""
        found: schema.StepMemory | None = self.history.curves.at(self.time_s, None)
        return found

    @property
    def val_loss(self) -> float | None:
        found: schema.Eval | None = self.history.evals.at(self.time_s, None)
        return found.val_loss if found else None

    @property
    def total_steps(self) -> int | None:
        return self.setting("train", "steps") or None

    def setting(self, *keys: str) -> int:
        """Return a whole number of the job; 0 if it has none."""
        found = _dig(self.start.config, *keys) if self.start else None
        return found if type(found) is int and found > 0 else 0

    @property
    def spans(self) -> Spans:
        """The timeline of the newest sampled step."""
        sampled = self.history.sampled
        count = sampled.count(self.time_s)
        for step in reversed(sampled.values[max(count - SAMPLED_STEPS, 0) : count]):
            if (found := self.history.timelines.of(step)) is not None:
                return found
        return Spans()

    @property
    def moments(self) -> list[Moment]:
        moments = self.history.moments
        return moments.values[: moments.count(self.time_s)]

    def last(self, name: str) -> float | None:
        """Return the last value of a series; None if the last step had none."""
        return self.history.series[name].last(self.length)

    def busy_ms(self, lane: str) -> float:
        return self.history.busy[lane].last(self.length) or 0.0

    def active_alerts(self) -> list[schema.Alert]:
        """Active alerts of this start: raised, not cleared, not acknowledged, the newest last."""
        if self.end is not None:
            return []
        alerts, since_s = self.history.alerts, self.started_s
        active: dict[str, tuple[float, schema.Alert]] = {}
        first = 0 if since_s is None else bisect_left(alerts.times, since_s)
        for index in range(first, alerts.count(self.time_s)):
            alert: schema.Alert = alerts.values[index]
            active.pop(alert.code, None)
            if alert.state == "raised":
                active[alert.code] = (alerts.times[index], alert)
        seen = self._acknowledged()
        return [alert for code, (at_s, alert) in active.items() if seen.get(code, -1.0) < at_s]

    def _acknowledged(self) -> dict[str, float]:
        """Code of an alert → time of its last acknowledgement."""
        controls = self.history.controls
        pairs = zip(controls.times, controls.values[: controls.count(self.time_s)], strict=False)
        return {
            one.message: time_s
            for time_s, one in pairs
            if one.action == "acknowledge" and one.state == "done"
        }

    def median_step_ms(self, of: int = 50) -> float | None:
        values = self.history.series["step_ms"].values[max(self.length - of, 0) : self.length]
        return sorted(values)[len(values) // 2] if values else None

    def median_own_ms(self, of: int = 50) -> float | None:
        """The rank's own step time, without waits; the whole step if waits are unknown."""
        values = self.history.series["own_ms"].values[max(self.length - of, 0) : self.length]
        known = sorted(value for value in values if value > 0)
        return known[len(known) // 2] if known else self.median_step_ms(of)


def fold(lines: Iterable[bytes], rank: int = 0) -> History:
    """Read a whole log."""
    history = History(rank)
    history.feed_lines(lines)
    return history


def _dig(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values
