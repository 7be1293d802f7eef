"""The state of the screen: a run, a moment, and settings of charts."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from typing import Any

from offloadtrain.events import schema
from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.columns import Window
from offloadtrain_tui.reading.log_reader import Snapshot
from offloadtrain_tui.reading.view import View

MOST_MARKS, MOST_GOOD_MARKS = 100, 24
SPANS = (20, 100, 500, 0)
ZOOMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class ViewState:
    """Everything that determines the screen: equal states are drawn equally.

    Attributes:
        snapshot: newest snapshot of the displayed run.
        other_runs: runs whose curves are overlaid.
        now_s: current Unix time of the monitor's clock.
        cursor: selected position in the steps of rank 0; None: the newest.
        at_s: current time of a replay; None if live.
        speed: speed of a replay, relative to the run.
        zoom: index into ZOOMS.
        log: True if charts of positive numbers have a logarithmic axis.
        span: number of steps of the moving averages that are drawn over raw curves; 0: none.
        machine: the monitor's last sample of this machine.
    """

    snapshot: Snapshot
    now_s: float
    other_runs: tuple[Snapshot, ...] = ()
    cursor: int | None = None
    at_s: float | None = None
    speed: float = 1.0
    zoom: int = 0
    log: bool = False
    span: int = 20
    machine: schema.System | None = None
    readonly: bool = False

    @property
    def newest(self) -> View:
        """Rank 0 with all steps so far; the cursor is ignored."""
        first = self.snapshot.first
        return first if self.at_s is None else View.at(first.history, self.at_s)

    @property
    def view(self) -> View:
        """Rank 0 at the cursor."""
        return self.of(self.snapshot.first)

    @property
    def views(self) -> list[View]:
        """All ranks at the cursor."""
        return [self.of(view) for view in self.snapshot.views]

    @property
    def is_live(self) -> bool:
        return self.cursor is None and self.at_s is None

    @property
    def is_newest(self) -> bool:
        """True if the selected moment is not before the end of the log."""
        moment = self.moment_s
        return moment is None or moment >= self.snapshot.first.history.last_time_s

    @property
    def state(self) -> str:
        """State of the run at the selected moment, one of `runs.STATES`."""
        moment = self.moment_s
        if moment is None or self.is_newest:
            return self.snapshot.state
        return runs.state_of(self.view, None, moment)

    @property
    def window(self) -> Window:
        """The displayed positions: the newest, or those around the cursor."""
        length = self.newest.length
        size = max(length // ZOOMS[self.zoom], min(length, 16))
        hi = length
        if self.cursor is not None:
            hi = min(max(self.cursor + size // 2, size), length)
        return Window(max(hi - size, 0), hi)

    def of(self, view: View) -> View:
        """Return a rank's view at the selected moment."""
        moment = self.moment_s
        return view if moment is None else View.at(view.history, moment)

    @property
    def moment_s(self) -> float | None:
        """The selected Unix time; None: the newest."""
        if self.cursor is None or not self.newest.length:
            return self.at_s
        position = min(self.cursor, self.newest.length - 1)
        return self.newest.history.steps.times[position]

    # ---- moves of the cursor

    def moved(self, by: int) -> ViewState:
        """Move the cursor by `by` steps; beyond the newest step it becomes live."""
        length = self.newest.length
        if not length:
            return self
        position = (length - 1 if self.cursor is None else self.cursor) + by
        return replace(self, cursor=None if position >= length - 1 else max(position, 0))

    def jumped(self, direction: int) -> ViewState:
        """Move the cursor to the next mark (`direction` > 0) or the previous one."""
        positions = sorted({position for position, _, _ in marks(self.newest)})
        here = self.newest.length - 1 if self.cursor is None else self.cursor
        if direction < 0:
            index = bisect_left(positions, here) - 1
            return replace(self, cursor=positions[index]) if index >= 0 else self
        index = bisect_right(positions, here)
        return replace(self, cursor=positions[index] if index < len(positions) else None)

    def to_time(self, time_s: float) -> ViewState:
        """Move the cursor to the newest step at a Unix time."""
        count = self.newest.history.steps.count(time_s)
        return replace(self, cursor=max(min(count, self.newest.length) - 1, 0))

    def zoomed(self, by: int) -> ViewState:
        return replace(self, zoom=min(max(self.zoom + by, 0), len(ZOOMS) - 1))


def marks(view: View, window: Window | None = None) -> list[tuple[int, str, str]]:
    """Return (position, sign, color) of events until the view's moment.

    If a window has too many marks, they are thinned out evenly, or omitted for checkpoints.
    """
    window = window or Window(0, view.length)
    history, times = view.history, view.history.steps.times
    if not view.length or window.lo >= window.hi:
        return []
    lo, hi = bisect_left(history.skipped, window.lo), bisect_left(history.skipped, window.hi)
    placed = [(position, "✗", "error") for position in _thinned(history.skipped, lo, hi)]
    begin_s = times[window.lo] if window.lo else -math.inf
    end_s = times[window.hi] if window.hi < view.length else view.time_s
    for kind, sign, color in (
        (schema.Checkpoint, "▾", "success"),
        (schema.RunStarted, "▸", "secondary"),
        (schema.Alert, "!", "warning"),
    ):
        at_s = history.of(kind).times
        lo, hi = bisect_left(at_s, begin_s), bisect_right(at_s, end_s)
        if sign == "▾" and hi - lo > MOST_GOOD_MARKS:
            continue
        for time_s in _thinned(at_s, lo, hi):
            position = max(bisect_right(times, time_s, hi=view.length) - 1, 0)
            placed.append((position, sign, color))
    return placed


def _thinned(values: list[Any], lo: int, hi: int) -> list[Any]:
    return values[lo : hi : max((hi - lo) // MOST_MARKS, 1)]
