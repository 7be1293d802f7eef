"""1: overview. While compute hardly waits and the gradient norm is steady, memory over time
replaces the charts of both."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Grid

from offloadtrain_tui import memory
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.panels.plots import charts, show_charts
from offloadtrain_tui.verdict import is_calm
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.bars import Area, AreaChart, MemoryBars
from offloadtrain_tui.widgets.lanes import Lanes, Timeline

CHARTS = ("loss", "tokens_per_s", "exposed", "grad_norm")
AREAS = ("exposed", "grad_norm")
"""Charts that may be replaced by memory of the GPU and of the host, in this order."""


class Overview(Panel):
    """Memory, the lanes of the newest sampled step, two charts, and memory or two more."""

    def compose(self) -> ComposeResult:
        yield MemoryBars(legend=2, id="overview-bars")
        yield Timeline(Lanes(0), id="overview-lanes")
        with Grid(id="overview-charts"):
            yield from charts(self, CHARTS)
            for name in AREAS:
                yield AreaChart(Area(""), id=f"overview-area-{name}")

    def display_state(self, shown: ViewState) -> None:
        view, tiers = shown.view, memory.bars(shown)
        self.query_one(MemoryBars).show(tiers)
        spans = view.spans
        for widget in ("lanes", "charts"):
            self.query_one(f"#overview-{widget}").display = bool(shown.snapshot.state)
        lanes = Lanes(spans[0].step if spans else 0, spans, view.start)
        self.query_one("#overview-lanes", Timeline).show(lanes)
        show_charts(self, CHARTS, shown)
        areas: dict[str, Area] = {}
        if view.live and is_calm(view):
            areas["grad_norm"] = memory.host_history(shown.views, tiers[-1])
            if len(tiers) > 1:
                areas["exposed"] = memory.device_history(view, tiers[0])
        for name in AREAS:
            self.query_one(f"#overview-{name}").set_class(name in areas, "replaced")
            chart = self.query_one(f"#overview-area-{name}", AreaChart)
            chart.set_class(name not in areas, "replaced")
            chart.show(areas.get(name, Area("")))
