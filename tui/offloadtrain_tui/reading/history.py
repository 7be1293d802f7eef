"""The parsed log of a rank: columns of its steps, and growing lists of all other records.

[Note: Columns]
There may be 100,000 steps. One call extracts the values of all columns from the JSON of a step.
After the current lines are read, values are appended one column at a time. The JSON is dropped at
once: thousands of dicts would not stay in the CPU's caches.
"""

from __future__ import annotations

import math
import re
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from typing import Any, TypeVar

import orjson

from offloadtrain.config import units
from offloadtrain.events import log_lines, schema
from offloadtrain.events.log_lines import Record
from offloadtrain.events.schema import Json
from offloadtrain.events.set_up_file import SetUpNow
from offloadtrain_tui.reading.columns import (
    LiveMemory,
    Measured,
    Series,
    Smoothed,
    Timed,
    TimedLines,
    Timelines,
    Times,
)
from offloadtrain_tui.text import clean

_BULK = ("step", "system", "live_memory")
"""Kinds that are read without their event classes, because there are hundreds of thousands."""
_EVENTS = (
    *(schema.RunStarted, schema.SetUp, schema.RunEnded, schema.Memory, schema.StepMemory),
    *(schema.Eval, schema.Checkpoint, schema.Alert, schema.Control),
)
"""Kinds whose records are stored as event objects."""
E = TypeVar("E", bound=schema.Event)
_SPAN = re.compile(
    rb'\{"v":\d+,"k":"span","t":(\d{1,12}\.?\d*),"m":(\d{1,19}),"r":\d+,"step":(\d{1,15}),'
)
"""Prefix of a span's line; the rest is parsed only for display."""


GPU_FIELDS = (
    "utilization_percent", "power_w", "temperature_c", "clock_mhz", "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s",
)  # fmt: skip

MAIN_LANES = ("compute", "d2h", "host", "h2d")
"""Lanes that are always shown."""
LANES = (
    *MAIN_LANES,
    *("load", "comm", "ortho", "update", "write", "disk_read", "disk_write", "disk_load"),
)
"""All lanes. The additional ones are shown only with work: streamed blocks, ranks, rules on
complete matrices, state on the device, checkpoints, state and weights on the disk."""
STEP_FIELDS = (
    "loss", "lr", "grad_norm", "loss_scale", "tokens", "tokens_per_s", "step_ms", "data_ms",
    "forward_ms", "backward_ms", "optimizer_ms", "exposed_ms", "d2h_bytes", "h2d_bytes", "mfu",
    "comm_bytes", "disk_read_bytes", "disk_written_bytes", "own_ms", "device_peak_bytes",
    "host_peak_bytes", "speculation_hit",
)  # fmt: skip
_NO_LANES = (None,) * len(LANES)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
DERIVED = ("h2d_gbps", "d2h_gbps", "exposed_share", "host_ms")
_DERIVED_FROM = ("h2d_bytes", "d2h_bytes", "exposed_ms", "step_ms")


def _parsed(line: bytes) -> Any:
    """Parse a line of JSON. Lone surrogates, which represent bytes of a path that are not UTF-8,
    become the replacement character. Raise ValueError for anything that is not JSON."""
    try:
        return orjson.loads(line)
    except ValueError:
        return orjson.loads(_SURROGATE.sub(rb"\\ufffd", line))


def number_of(value: Any) -> float | None:
    """Convert a parsed JSON value; the strings "nan", "inf" and "-inf" are numbers."""
    if type(value) is float or type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return float(value) if value in ("nan", "inf", "-inf") else None


def _floats(values: Sequence[Any]) -> array[float]:
    """Convert values to numbers, with NaN for missing values."""
    packed = array("d")
    with suppress(struct.error, OverflowError):  # some values are missing or not numbers
        packed.frombytes(struct.pack(f"{len(values)}d", *values))  # 3 times as fast as array()
        return packed
    if values.count(None) == len(values):
        return array("d", [math.nan]) * len(values)
    numbers = map(number_of, values)
    return array("d", [math.nan if value is None else value for value in numbers])


def _ratios(over: Sequence[float], under: Sequence[float], factor: float = 1.0) -> list[float]:
    """Divide element by element; NaN for a denominator that is not positive."""
    pairs = zip(over, under, strict=True)
    return [factor * a / b if b > 0 else math.nan for a, b in pairs]


class GpuHistory(Times):
    """Samples of the rank's GPU over time, in columns that only grow."""

    def __init__(self) -> None:
        super().__init__()
        self.series = {name: Series() for name in GPU_FIELDS}

    def add(self, time_s: float, gpus: list[Any], uuid: object) -> None:
        """Add a parsed sample of the GPU with this UUID, or of the machine's only GPU."""
        known = [gpu for gpu in gpus if isinstance(gpu, dict)]
        named = [gpu for gpu in known if gpu.get("uuid") == uuid]
        samples = named or (known if len(known) == 1 else [])
        if not samples:
            return
        for name, series in self.series.items():
            value = number_of(samples[0].get(name))
            series.append(value if value is not None and math.isfinite(value) else None)
        self.stamp(time_s)


class SystemSamples(TimedLines):
    """The samples of the machine, which are parsed only for display.

    Attributes:
        gpu: samples of the rank's own GPU, as columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gpu = GpuHistory()

    def at(self, time_s: float) -> schema.System | None:
        """Return the newest sample at a time."""
        count = self.count(time_s)
        return _system(self[count - 1]) if count else None


@lru_cache(maxsize=16)  # each part of a screen asks for the same sample
def _system(line: bytes) -> schema.System | None:
    record = log_lines.from_line(line)
    return record.event if record and isinstance(record.event, schema.System) else None


class RecordTimes:
    """Corrects the times of records, so that a writer's clock that is set back changes no order.

    Attributes:
        last_s: Unix time of the newest record; 0 without any.
    """

    def __init__(self) -> None:
        self.last_s = 0.0
        self._offset_s = 0.0
        """Unix time minus monotonic clock, in seconds; never decreases within a start."""

    def restart(self, monotonic_ns: int) -> None:
        """Begin a new start: its monotonic clock may count from another boot of the machine."""
        self._offset_s = self.last_s + 1e-3 - monotonic_ns / 1e9

    def add(self, time_s: float, monotonic_ns: object) -> float:
        """Return a record's Unix time, corrected if the clock was set back since the start began.

        Args:
            monotonic_ns: time of the writer's monotonic clock, which stops while the machine
                sleeps; invalid values count as 0.
        """
        monotonic_s = 0.0
        if type(monotonic_ns) is int and 0 <= monotonic_ns < 1 << 63:
            monotonic_s = monotonic_ns / 1e9
        time_s = max(time_s, monotonic_s + self._offset_s)
        self._offset_s = max(self._offset_s, time_s - monotonic_s)
        self.last_s = max(self.last_s, time_s)
        return time_s


# ---- the event list: a record as a line of text


@dataclass(frozen=True, slots=True)
class Moment:
    """A line of the event list.

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


def moment_of(record: Record, line: bytes) -> Moment | None:
    """Return the line of the event list for a record; None for kinds that are not listed."""
    describe = _DESCRIBE.get(type(record.event))
    if describe is None:
        return None
    level, text = describe(record.event)
    if not text:
        return None
    step = getattr(record.event, "step", None)
    kind = record.event.KIND
    return Moment(record.time_s, step, kind, level, clean(text), record.rank, line)


def set_up_words(event: schema.SetUp) -> str:
    """Return, for example, "set up in 1m32s (reading weights 40 s, page-locking memory 22 s)"."""
    longest = sorted(event.parts_s.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{clean(what, 60)} {units.format_seconds(s)}" for what, s in longest)
    text = f"set up in {units.format_duration(event.duration_s)}"
    return f"{text} ({parts})" if parts else text


def set_up_line(now: SetUpNow, now_s: float, *, is_over: bool) -> str:
    """Return, for example, "setting up: reading weights 40% (10.4 GiB of 26.0 GiB), 1m02s so far".

    Args:
        is_over: the process has died, or has stopped reporting.
    """
    spent = units.format_duration(max((now.time_s if is_over else now_s) - now.since_s, 1.0))
    progress = clean(now.phase, 100)
    if now.part:
        done, total = units.format_bytes(now.done_bytes), units.format_bytes(now.total_bytes)
        share = 100 * now.done_bytes // now.total_bytes if now.total_bytes else 100
        progress = f"{clean(now.part, 60)} {share}% ({done} of {total})"
    if is_over:
        return f"set-up, last seen after {spent}: {progress}"
    return f"setting up: {progress}, {spent} so far"


def _with_message(text: str, message: str) -> str:
    return f"{text}: {message}" if message else text


_DESCRIBE: dict[type, Callable[[Any], tuple[str, str]]] = {
    schema.RunStarted: lambda event: (
        "good",
        f"{event.name} "
        + (f"resumes after step {event.start_step}" if event.start_step else "started")
        + f", pid {event.pid}",
    ),
    schema.SetUp: lambda event: ("info", set_up_words(event)),
    schema.RunEnded: lambda event: (
        {"done": "good", "stopped": "warning"}.get(event.status, "error"),
        _with_message(f"{event.status} at step {event.step}", event.message),
    ),
    schema.Checkpoint: lambda event: (
        "error" if event.state == "failed" else "good",
        f"{event.state} {event.path.rpartition('/')[2]}",
    ),
    schema.Alert: lambda event: (
        ("good", f"{event.code} is over: {event.message}")
        if event.state == "cleared"
        else (event.level, f"{event.code}: {event.message}")
    ),
    schema.Control: lambda event: (
        {"done": "good", "refused": "error"}.get(event.state, "info"),
        _with_message(f"{event.action} {event.state}", event.message),
    ),
    schema.Warning_: lambda event: ("warning", f"{event.code}: {event.message}"),
    schema.Eval: lambda event: ("info", f"validation loss {event.val_loss:.4f}"),
    schema.PlanCompared: lambda event: ("info", event.message),
    schema.Decided: lambda event: ("info", event.message),
    schema.Sample: lambda event: ("info", " ".join(f"{event.prompt}{event.text}".split())),
}
"""Event class → function that returns (level, text) of its line."""


# ---- the log


class History:
    """The parsed log of one rank: a column of its steps for each quantity, and all other
    records."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.steps = Timed[int]()
        """Step numbers; the same position in every series belongs to the same step."""
        self.series: dict[str, Series] = {name: Series() for name in (*STEP_FIELDS, *DERIVED)}
        self.val_loss = self.series["val_loss"] = Measured()
        self.busy: dict[str, Series] = {lane: Series() for lane in LANES}
        self._smoothed: dict[tuple[str, int], Smoothed] = {}
        self._pending: list[tuple[Any, ...]] = []
        self.skipped: list[int] = []
        """Positions of steps that were skipped or whose loss is not finite."""
        self._events: dict[type, Timed[Any]] = {kind: Timed() for kind in _EVENTS}
        self.moments = Timed[Moment]()
        self.live = LiveMemory()
        self.systems = SystemSamples()
        self.timelines = Timelines()
        self.unreadable = 0
        self._times = RecordTimes()

    @property
    def step_count(self) -> int:
        """Number of steps read so far, including those that are not in the columns yet."""
        return len(self.steps.values) + len(self._pending)

    def smoothed(self, name: str, span: int) -> Smoothed:
        """Return a series' moving average over `span` steps; it is extended when it is read."""
        smoothed = self._smoothed.get((name, span))
        if smoothed is None:
            smoothed = self._smoothed[name, span] = Smoothed(self.series[name], float(span))
        return smoothed

    def add_step(self, number: int, time_s: float, values: Json) -> None:
        """Store the values of a step until `extend_columns` appends them to the columns."""
        if (hit := values.get("speculation_hit")) is not None:
            values = values | {"speculation_hit": float(hit is True)}
        busy = values.get("busy_ms")
        worked = map(busy.get, LANES) if isinstance(busy, dict) else _NO_LANES
        self._pending.append((number, time_s, *map(values.get, STEP_FIELDS), *worked))

    def extend_columns(self) -> None:
        """Append the stored steps to the columns."""
        rows, self._pending = self._pending, []
        if not rows:
            return
        numbers, times, *columns = zip(*rows, strict=True)
        series = (*(self.series[name] for name in STEP_FIELDS), *self.busy.values())
        for target, column in zip(series, columns, strict=True):
            target.extend(_floats(column))
        self._derive(len(rows))
        last_s = self.steps.times[-1] if self.steps.times else 0.0
        self.steps.values += numbers  # before the times, which other threads count
        # Times never decrease, so that a clock set back does not hide earlier steps.
        self.steps.times += islice(accumulate(times, max, initial=last_s), 1, None)

    def _derive(self, count: int) -> None:
        """Compute derived columns for the last `count` steps."""
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

    def of(self, kind: type[E]) -> Timed[E]:
        """Return the records of a kind in `_EVENTS`."""
        return self._events[kind]

    def feed_lines(self, lines: Iterable[bytes]) -> None:
        """Add lines of the log, and count unreadable ones."""
        for line in lines:
            self._feed_line(line)
        self.extend_columns()

    def _feed_line(self, line: bytes) -> None:
        if (span := _SPAN.match(line)) is not None:
            time_s = self._times.add(float(span[1]), int(span[2]))
            self.timelines.add_line(time_s, int(span[3]), line)
            return
        try:
            values = _parsed(line)
        except ValueError:
            self.unreadable += bool(line.strip())
            return
        kind = values.get("k") if isinstance(values, dict) else None
        if kind in _BULK:
            self.unreadable += not self._one_of_many(kind, values, line)
            return
        record = log_lines.from_values(values)
        if record is None or not math.isfinite(record.time_s):
            self.unreadable += 1
        else:
            self.feed(record, line)

    def feed(self, record: Record, line: bytes = b"") -> None:
        """Add a record of any kind except a step."""
        if isinstance(record.event, schema.RunStarted):
            self._times.restart(record.monotonic_ns)
        time_s = self._times.add(record.time_s, record.monotonic_ns)
        if isinstance(record.event, schema.LaneSpan):
            stored = line or log_lines.to_line(record.event, record.rank, record.time_s).strip()
            self.timelines.add_line(time_s, record.event.step, stored)
        if type(record.event) in self._events:
            self._events[type(record.event)].add(time_s, record.event)
        if isinstance(record.event, schema.Eval):
            self.val_loss.measure(max(self.step_count - 1, 0), record.event.val_loss)
        if (moment := moment_of(record, line)) is not None:
            self.moments.add(time_s, moment)

    @property
    def last_time_s(self) -> float:
        """Time of the newest record; 0 without any."""
        return self._times.last_s

    @property
    def first_time_s(self) -> float:
        columns = (self.of(schema.RunStarted), self.steps, self.moments)
        return min((column.times[0] for column in columns if column.times), default=0.0)

    # ---- methods for single kinds

    def _one_of_many(self, kind: str, values: Json, line: bytes) -> bool:
        """Add a step, or a sample of memory or of the machine; return False if it is invalid."""
        if kind == "live_memory":
            return self.live.add(values)
        number: Any = values.get("step")
        time_s = number_of(values.get("t"))
        is_valid = type(number) is int if kind == "step" else type(values.get("gpus", [])) is list
        if not is_valid or time_s is None or not math.isfinite(time_s):
            return False
        time_s = self._times.add(time_s, values.get("m"))
        if kind == "step":
            self.add_step(number, time_s, values)
            self._odd(values, number, time_s, line)
        else:
            self.systems.add(time_s, line)
            start = self.of(schema.RunStarted).at(math.inf)
            uuid = str(start.plan.get("gpu_uuid", "")) if start else ""
            self.systems.gpu.add(time_s, values.get("gpus", []), uuid)
        return True

    def _odd(self, values: Json, number: int, time_s: float, line: bytes) -> None:
        """Mark and list a step that was skipped or whose loss is not finite."""
        loss = number_of(values.get("loss"))
        finite = loss is not None and math.isfinite(loss)
        if finite and values.get("skipped") is not True:
            return
        self.skipped.append(self.step_count - 1)
        rank = logged if isinstance(logged := values.get("r"), int) else self.rank
        norm = clean(str(values.get("grad_norm")), 40)
        text = f"skipped: gradient norm {norm}" if finite else f"loss is {loss}"
        level = "warning" if finite else "error"
        self.moments.add(time_s, Moment(time_s, number, "step", level, text, rank, line))


def fold(lines: Iterable[bytes], rank: int = 0) -> History:
    """Read a complete log."""
    history = History(rank)
    history.feed_lines(lines)
    return history
