"""The columns of a log: a value of each of its steps, for each quantity and each lane.

[Note: Columns]
There may be 100,000 steps. One call takes the values of all columns out of the JSON of a step. They
are appended after the current lines are read, one column at a time. The JSON is dropped at once:
thousands of dicts would not stay in the CPU's caches.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, islice
from operator import itemgetter
from typing import Any

from offloadtrain.events.schema import Json
from offloadtrain_tui.reading.series import Measured, Series, Smoothed
from offloadtrain_tui.reading.timed import Timed

MAIN_LANES = ("compute", "d2h", "host", "h2d")
"""Lanes that every run has."""
LANES = (
    *MAIN_LANES,
    *("load", "comm", "ortho", "update", "write", "disk_read", "disk_write", "disk_load"),
)
"""With those shown while they work: streamed blocks, ranks, rules on whole matrices, state on the
device, checkpoints, state and weights on the disk."""
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


class StepColumns:
    """The steps of a log, a column for each quantity."""

    def __init__(self) -> None:
        self.steps = Timed[int]()
        """Step numbers; position i is position i in every series."""
        self.series: dict[str, Series] = {name: Series() for name in (*STEP_FIELDS, *DERIVED)}
        self.val_loss = self.series["val_loss"] = Measured()
        self.busy: dict[str, Series] = {lane: Series() for lane in LANES}
        self._smoothed: dict[tuple[str, int], Smoothed] = {}
        self._pending: list[tuple[Any, ...]] = []

    @property
    def step_count(self) -> int:
        """Steps that have been read, including those that are not in the columns yet."""
        return len(self.steps.values) + len(self._pending)

    def smoothed(self, name: str, span: int) -> Smoothed:
        """Return a series' moving average over `span` steps; reading it extends it."""
        smoothed = self._smoothed.get((name, span))
        if smoothed is None:
            smoothed = self._smoothed[name, span] = Smoothed(self.series[name], float(span))
        return smoothed

    def add_step(self, number: int, time_s: float, values: Json) -> None:
        """Read the values of a step; `extend_columns` appends them to the columns."""
        busy = values.get("busy_ms")
        worked = map(busy.get, LANES) if isinstance(busy, dict) else _NO_LANES
        self._pending.append((number, time_s, *_step_values(values), *worked))

    def extend_columns(self) -> None:
        """Append the steps that have been taken."""
        rows, self._pending = self._pending, []
        if not rows:
            return
        numbers, times, *columns = zip(*rows, strict=True)
        series = (*(self.series[name] for name in STEP_FIELDS), *self.busy.values())
        for target, column in zip(series, columns, strict=True):
            target.extend(_floats(column))
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


def number_of(value: Any) -> float | None:
    """Convert parsed JSON, in which non-finite numbers are strings."""
    if type(value) is float or type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return float(value) if value in ("nan", "inf", "-inf") else None


def _step_values(values: Json) -> tuple[Any, ...]:
    """Return a step's value of each column; None for missing ones."""
    try:
        row: tuple[Any, ...] = _ALL_COLUMNS(values)
    except KeyError:
        return tuple(map(values.get, STEP_FIELDS))
    return row


def _floats(values: Sequence[Any]) -> array[float]:
    """Convert values to numbers, NaN for missing ones."""
    packed = array("d")
    with suppress(struct.error, OverflowError):  # some are missing, or no numbers
        packed.frombytes(struct.pack(f"{len(values)}d", *values))  # a third of array()'s time
        return packed
    if values.count(None) == len(values):
        return array("d", [math.nan]) * len(values)
    numbers = map(number_of, values)
    return array("d", [math.nan if value is None else value for value in numbers])


def _ratios(over: Sequence[float], under: Sequence[float], factor: float = 1.0) -> list[float]:
    """Divide element by element; NaN for zero time."""
    pairs = zip(over, under, strict=True)
    return [factor * a / b if b > 0 else math.nan for a, b in pairs]
