"""The timeline of one sampled step by lane, and the waits of compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.segment import Segment
from textual.strip import Strip

from offloadtrain.events import schema
from offloadtrain.events.waits import Wait
from offloadtrain_tui.reading.columns import Spans
from offloadtrain_tui.reading.history import LANES, MAIN_LANES
from offloadtrain_tui.text import clean, lane_word, milliseconds, percent
from offloadtrain_tui.widgets.drawn import EIGHTHS, LANE_COLORS, Drawn

_NAME_WIDTH = 11
NO_SPANS = Spans()
_BUSY_WIDTH = 16
LEAST_MS = 0.05
"""Shorter waits of compute are not listed, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Content of a timeline.

    Attributes:
        start: record of the run's start, which determines the names of lanes.
        zoom: magnification of the step.
        offset: position of the left edge in the hidden part, from 0 to 1.
    """

    step: int
    spans: Spans = NO_SPANS
    start: schema.RunStarted | None = None
    zoom: float = 1.0
    offset: float = 0.0

    @property
    def shown(self) -> tuple[float, float]:
        """Start and end of the displayed interval, in milliseconds."""
        width = self.spans.end_ms / self.zoom
        start = self.offset * (self.spans.end_ms - width)
        return start, start + width

    def by_lane(self) -> dict[str, list[schema.LaneSpan]]:
        """Return the lanes from top to bottom, with their spans in order of time. Additional lanes
        are included only if they have spans."""
        spans_by_lane: dict[str, list[schema.LaneSpan]] = {}
        for span in sorted(self.spans, key=lambda span: span.start_ms):
            spans_by_lane.setdefault(span.lane, []).append(span)
        names = (LANES[0], schema.WAIT, *LANES[1:])
        return {
            name: spans_by_lane.get(name, [])
            for name in names
            if name in MAIN_LANES or name in spans_by_lane
        }


class Timeline(Drawn[Lanes]):
    """One row per lane, an axis, and the longest waits of compute."""

    DEFAULT_CSS = "Timeline { height: 1fr; min-height: 6; }"

    def __init__(self, lanes: Lanes, *, waits: int = 0, id: str | None = None) -> None:
        """`waits`: largest number of listed waits of compute."""
        super().__init__(lanes, id=id)
        self._most_waits = waits

    def draw(self, width: int, height: int) -> list[Strip]:
        if not self.content.spans:
            return [self.strip([Segment(" no step has been sampled yet")])]
        interval = self.content.shown
        lanes = self.content.by_lane().items()
        rows = [self._row(lane, spans, interval, width) for lane, spans in lanes]
        return [*map(self.strip, (self._axis(interval, width), *rows, *self._waits()))]

    def _axis(self, interval: tuple[float, float], width: int) -> list[Segment]:
        start, end = interval
        left, right = f" sampled step {self.content.step}", f"{milliseconds(end)}"
        middle = f"from {milliseconds(start)}" if self.content.zoom > 1 else ""
        room = max(width - len(left) - len(right) - 1, 0)
        return [Segment(f"{left}{middle:^{room}}{right}", self.style("foreground", dim=True))]

    def _row(
        self,
        lane: str,
        spans: Sequence[schema.LaneSpan],
        interval: tuple[float, float],
        width: int,
    ) -> list[Segment]:
        busy_ms, end_ms = union_ms(spans), self.content.spans.end_ms
        share = percent(busy_ms / end_ms) if end_ms else ""
        style = self.style(LANE_COLORS[lane])
        bar = labelled(spans, *interval, max(width - _NAME_WIDTH - _BUSY_WIDTH, 1))
        return [
            Segment(f" {lane_word(lane, self.content.start):<{_NAME_WIDTH - 2}} ", style),
            Segment(bar, style),
            Segment(f" {milliseconds(busy_ms):>9} {share:>5}", self.style("foreground", dim=True)),
        ]

    def _waits(self) -> list[list[Segment]]:
        if not self._most_waits:
            return []
        waits = sorted(self.content.spans.waits, key=lambda wait: -wait.duration_ms)
        total = sum(wait.duration_ms for wait in waits)
        title = [Segment(f" compute waited {milliseconds(total)}", self.style("foreground"))]
        longest = [wait for wait in waits[: self._most_waits] if wait.duration_ms >= LEAST_MS]
        return [title, *map(self._wait, longest)]

    def _wait(self, wait: Wait) -> list[Segment]:
        text = f"   {milliseconds(wait.duration_ms):>8} at {milliseconds(wait.start_ms):>8}"
        lane = lane_word(wait.lane, self.content.start)
        operation = f": {clean(wait.name)}" if wait.name else ""
        why = f"  for {lane}{operation}" if wait.lane else "  nothing ran"
        color = LANE_COLORS.get(wait.lane, "foreground")
        return [Segment(text), Segment(why, self.style(color))]


def union_ms(spans: Sequence[schema.LaneSpan]) -> float:
    """Return the time in which at least one of the sorted spans ran; compute spans may be
    nested."""
    total = done_ms = 0.0
    for span in spans:
        end_ms = span.start_ms + span.duration_ms
        total += max(end_ms - max(span.start_ms, done_ms), 0.0)
        done_ms = max(done_ms, end_ms)
    return total


def labelled(spans: Sequence[schema.LaneSpan], start: float, end: float, width: int) -> str:
    """Draw a lane as `width` characters, filled where spans ran, with their names if they fit."""
    scale = width / (end - start) if end > start else 0.0
    filled = [0.0] * width
    for span in spans:
        _fill(filled, (span.start_ms - start) * scale, span.duration_ms * scale)
    cells = [EIGHTHS[min(int(part * 8 + 0.5), 8)] for part in filled]
    for span in spans:
        first = round((span.start_ms - start) * scale)
        room = round(span.duration_ms * scale) - 2
        text = clean(span.name)
        if 0 <= first and first + room + 2 <= width and len(text) <= room:
            begin = first + 1 + (room - len(text)) // 2
            cells[begin : begin + len(text)] = text
    return "".join(cells)


def _fill(cells: list[float], start: float, length: float) -> None:
    stop = min(start + length, float(len(cells)))
    start = max(start, 0.0)
    for cell in range(int(start), min(int(stop) + 1, len(cells))):
        covered = min(stop, cell + 1.0) - max(start, float(cell))
        cells[cell] = min(cells[cell] + max(covered, 0.0), 1.0)
