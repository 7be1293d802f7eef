"""1: everything at a glance."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Grid

from offloadtrain_tui import memory
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.plots import KINDS, plot
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.bars import MemoryBars
from offloadtrain_tui.widgets.chart import Chart, Plot
from offloadtrain_tui.widgets.lanes import Lanes, Timeline

CHARTS = ("loss", "tokens_per_s", "exposed", "grad_norm")


class Overview(Panel):
    """Memory, the lanes of the newest sampled step, four charts."""

    def compose(self) -> ComposeResult:
        yield MemoryBars(legend=2, id="overview-bars")
        yield Timeline(Lanes(0), id="overview-lanes")
        with Grid(id="overview-charts"):
            for name in CHARTS:
                yield Chart(Plot(KINDS[name].title), id=f"overview-{name}")

    def display_state(self, shown: ViewState) -> None:
        view = shown.view
        self.query_one(MemoryBars).show(memory.bars(shown))
        spans = view.spans
        lanes = Lanes(spans[0].step if spans else 0, spans)
        self.query_one("#overview-lanes", Timeline).show(lanes)
        for name in CHARTS:
            self.query_one(f"#overview-{name}", Chart).show(plot(name, shown))
