"""The log of a rank, parsed: columns of its steps, and lists of all else that only grow."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import orjson

from offloadtrain.events import log_lines, schema
from offloadtrain.events.log_lines import Record
from offloadtrain.events.schema import Json
from offloadtrain_tui.moments import Moment, moment_of
from offloadtrain_tui.reading.live_memory import LiveMemory
from offloadtrain_tui.reading.series import Series
from offloadtrain_tui.reading.step_columns import StepColumns, number_of
from offloadtrain_tui.reading.timed import Timed, TimedLines, Times
from offloadtrain_tui.reading.timelines import Timelines
from offloadtrain_tui.text import clean

_BULK = (schema.Step, schema.System, schema.LiveMemory)
"""Kinds read without their classes, since there are hundreds of thousands."""
_EVENTS = (
    *(schema.RunStarted, schema.SetUp, schema.RunEnded, schema.Memory, schema.StepMemory),
    *(schema.Eval, schema.Checkpoint, schema.Alert, schema.Control),
)
"""Kinds whose records are kept as they are."""
E = TypeVar("E", bound=schema.Event)
_SPAN = re.compile(
    rb'\{"v":\d+,"k":"span","t":(\d{1,12}\.?\d*),"m":(\d{1,19}),"r":\d+,"step":(\d{1,15}),'
)
"""Prefix of a span's line; spans are parsed only for display."""


GPU_FIELDS = (
    "utilization_percent", "power_w", "temperature_c", "clock_mhz", "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s",
)  # fmt: skip


class GpuHistory(Times):
    """The samples of a rank's own GPU over time: columns that only grow."""

    def __init__(self) -> None:
        super().__init__()
        self.series = {name: Series() for name in GPU_FIELDS}

    def add(self, time_s: float, gpus: list[Any], uuid: object) -> None:
        """Add a parsed sample of the machine: of this GPU, or of the only one."""
        known = [gpu for gpu in gpus if isinstance(gpu, dict)]
        named = [gpu for gpu in known if gpu.get("uuid") == uuid]
        samples = named or (known if len(known) == 1 else [])
        if not samples:
            return
        for name, series in self.series.items():
            series.append(_number(samples[0].get(name)))
        self.stamp(time_s)


def _number(value: Any) -> float | None:
    if type(value) not in (int, float) or not abs(value) < 1e18:
        return None
    return float(value) if math.isfinite(value) else None


class History(StepColumns):
    """The parsed log of one rank."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.skipped: list[int] = []
        """Positions of steps that were skipped, or whose loss was not finite."""
        self._events: dict[type, Timed[Any]] = {kind: Timed() for kind in _EVENTS}
        self.moments = Timed[Moment]()
        self.live = LiveMemory()
        self.systems = TimedLines()
        """Samples of the machine, which are read only for display."""
        self.gpu = GpuHistory()
        self.sampled = Timed[int]()
        """Step numbers whose lanes were sampled."""
        self.timelines = Timelines()
        self._shown_system: tuple[int, schema.System | None] = (0, None)
        self.last_time_s = 0.0
        self.unreadable = 0
        self._offset_s = 0.0
        """Of Unix time to the monotonic clock of the newest start; it never decreases."""

    def of(self, kind: type[E]) -> Timed[E]:
        """Return the records of one of the kinds that are kept whole."""
        return self._events[kind]

    def feed_lines(self, lines: Iterable[bytes]) -> None:
        """Add lines of the log; unreadable ones are counted."""
        for line in lines:
            self._feed_line(line)
        self.extend_columns()

    def _feed_line(self, line: bytes) -> None:
        if (span := _SPAN.match(line)) is not None:
            self._span(int(span[3]), self._in_order(float(span[1]), int(span[2])), line)
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
        record = log_lines.from_values(values)
        if record is None or not math.isfinite(record.time_s) or isinstance(record.event, _BULK):
            self.unreadable += 1
        else:
            self.feed(record, line)

    def feed(self, record: Record, line: bytes = b"") -> None:
        """Add a record other than a step."""
        if isinstance(record.event, schema.RunStarted):
            # Another process, whose monotonic clock may be that of another boot.
            self._offset_s = self.last_time_s + 1e-3 - record.monotonic_ns / 1e9
        time_s = self._in_order(record.time_s, record.monotonic_ns)
        self.last_time_s = max(self.last_time_s, time_s)
        if isinstance(record.event, schema.LaneSpan):
            stored = line or log_lines.to_line(record.event, record.rank, record.time_s).strip()
            self._span(record.event.step, time_s, stored)
        if type(record.event) in self._events:
            self._events[type(record.event)].add(time_s, record.event)
        if isinstance(record.event, schema.Eval):
            self.val_loss.measure(max(self.step_count - 1, 0), record.event.val_loss)
        if (moment := moment_of(record, line)) is not None:
            self.moments.add(time_s, moment)

    def _in_order(self, time_s: float, monotonic_ns: object) -> float:
        """Return a record's time, unchanged by a clock that was set back since the start began.

        Args:
            monotonic_ns: by the writer's monotonic clock, which stands still while a machine
                sleeps; other values than whole numbers count as 0.
        """
        monotonic_s = 0.0
        if type(monotonic_ns) is int and 0 <= monotonic_ns < 1 << 63:
            monotonic_s = monotonic_ns / 1e9
        if time_s - monotonic_s >= self._offset_s:
            self._offset_s = time_s - monotonic_s
            return time_s
        return monotonic_s + self._offset_s

    @property
    def first_time_s(self) -> float:
        columns = (self.of(schema.RunStarted), self.steps, self.moments)
        return min((column.times[0] for column in columns if column.times), default=0.0)

    # ---- one kind each

    def _step(self, values: Json, line: bytes) -> bool:
        """Add a step; False if it is not valid."""
        number, time_s = values.get("step"), number_of(values.get("t"))
        if type(number) is not int or time_s is None or not math.isfinite(time_s):
            return False
        time_s = self._in_order(time_s, values.get("m"))
        self.add_step(number, time_s, values)
        self._odd(values, number, time_s, line)
        self.last_time_s = max(self.last_time_s, time_s)
        return True

    def _odd(self, values: Json, number: int, time_s: float, line: bytes) -> None:
        """Mark and list skipped steps and non-finite losses."""
        loss = values.get("loss")
        loss = loss if type(loss) is float else number_of(loss)
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
        time_s = number_of(values.get("t"))
        if time_s is None or not math.isfinite(time_s) or type(values.get("gpus", [])) is not list:
            return False
        time_s = self._in_order(time_s, values.get("m"))
        self.last_time_s = max(self.last_time_s, time_s)
        self.systems.add(time_s, line)
        start = self.of(schema.RunStarted).at(math.inf)
        uuid = str(start.plan.get("gpu_uuid", "")) if start else ""
        self.gpu.add(time_s, values.get("gpus", []), uuid)
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
        known, sample = self._shown_system
        if count != known:
            record = log_lines.from_line(self.systems[count - 1])
            sample = record.event if record and isinstance(record.event, schema.System) else None
            self._shown_system = (count, sample)
        return sample


def fold(lines: Iterable[bytes], rank: int = 0) -> History:
    """Read a whole log."""
    history = History(rank)
    history.feed_lines(lines)
    return history
