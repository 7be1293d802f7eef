"""5: all curves, with one cursor."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll

from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.plots import KINDS, plot
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.chart import Chart, Plot

CHARTS = (
    "loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "phases", "mfu", "loss_scale", "exposed",
    "bus", "bytes", "host_ms",
)  # fmt: skip
_ALWAYS = ("loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "phases", "exposed")


class PlotsPanel(Panel):
    """A grid of charts; empty ones are hidden. On a low terminal it scrolls."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="plots-charts"):
            for name in CHARTS:
                yield Chart(Plot(KINDS[name]), id=f"plots-{name}")

    def display_state(self, shown: ViewState) -> None:
        for name in CHARTS:
            chart = self.query_one(f"#plots-{name}", Chart)
            field = KINDS[name].fields[0][0]
            chart.display = name in _ALWAYS or shown.newest.last(field) is not None
            chart.show(plot(name, shown))
