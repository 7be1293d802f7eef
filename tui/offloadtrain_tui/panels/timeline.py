"""4: the lanes of the newest sampled step, which can be zoomed."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from offloadtrain_tui import memory
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.bars import Area, AreaChart
from offloadtrain_tui.widgets.lanes import Lanes, Timeline

_FURTHEST = 64.0


class TimelinePanel(Panel):
    """The timeline of all lanes, and the waits of compute."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "stretch(2)", "zoom in", show=False),
        Binding("down,j", "stretch(0.5)", "zoom out", show=False),
        Binding("left,h", "shift(-1)", "earlier", show=False),
        Binding("right,l", "shift(1)", "later", show=False),
    ]
    can_focus = True

    def compose(self) -> ComposeResult:
        yield Timeline(Lanes(0), waits=12, id="timeline-lanes")
        yield AreaChart(Area(""), id="timeline-memory")

    def display_state(self, shown: ViewState) -> None:
        lanes, spans = self.query_one(Timeline).content, shown.view.spans
        step = spans[0].step if spans else 0
        self._draw(replace(lanes, step=step, spans=spans, start=shown.view.start))

    def _draw(self, lanes: Lanes) -> None:
        """Draw the lanes, and below them the memory in the same interval."""
        self.query_one(Timeline).show(lanes)
        if self.shown is not None:
            self.query_one(AreaChart).show(memory.within_step(self.shown.view, *lanes.shown))

    def action_stretch(self, factor: float) -> None:
        widget = self.query_one(Timeline)
        zoom = min(max(widget.content.zoom * factor, 1.0), _FURTHEST)
        self._draw(replace(widget.content, zoom=zoom))

    def action_shift(self, direction: int) -> None:
        widget = self.query_one(Timeline)
        if widget.content.zoom > 1:
            step = direction * 0.25 / (widget.content.zoom - 1)
            offset = min(max(widget.content.offset + step, 0.0), 1.0)
            self._draw(replace(widget.content, offset=offset))
