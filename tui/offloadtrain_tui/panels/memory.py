"""2: memory by owner and tier, planned and actual, and over time."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable

from offloadtrain.config import units
from offloadtrain_tui import memory
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.plots import sample_plot
from offloadtrain_tui.text import clean
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.bars import StackBar, Tier
from offloadtrain_tui.widgets.chart import Chart, Plot
from offloadtrain_tui.widgets.table import fill

COLUMNS = ("tier", "owner", "now", "peak", "planned", "peak/plan")


class MemoryPanel(Panel):
    """Bars, a table, and the history of the process and of the machine."""

    def compose(self) -> ComposeResult:
        with Vertical(id="memory-bars"):
            yield StackBar(Tier("DEVICE"), id="memory-device")
            yield StackBar(Tier("HOST"), id="memory-host")
        with Horizontal(id="memory-rest"):
            yield DataTable(id="memory-rows", cursor_type="row", zebra_stripes=True)
            with Vertical(id="memory-history"):
                yield Chart(Plot("host"), id="memory-samples", pickable=False)
                yield Chart(Plot("GPUs"), id="memory-gpus", pickable=False)

    def show(self, shown: ViewState) -> None:
        view = shown.view
        machine = shown.machine if shown.is_live else None
        self.query_one("#memory-device", StackBar).show(memory.devices(view, machine)[0])
        self.query_one("#memory-host", StackBar).show(memory.host(view, machine))
        fill(self.query_one(DataTable), COLUMNS, [_cells(row) for row in memory.rows(view)])
        names = {"rss_bytes": "this run", "host_available_bytes": "available"}
        samples = sample_plot("host memory", names, view, shown.now_s)
        self.query_one("#memory-samples", Chart).show(samples)
        gpus = sample_plot("GPU memory, all processes", {"gpu_bytes": ""}, view, shown.now_s)
        self.query_one("#memory-gpus", Chart).show(gpus)


def _cells(row: memory.Row) -> tuple[str, ...]:
    planned = "-" if row.planned is None else units.format_bytes(row.planned)
    share = f"{row.peak / row.planned:.2f}" if row.planned else "-"
    now, peak = units.format_bytes(row.nbytes), units.format_bytes(row.peak)
    return row.tier, clean(row.owner), now, peak, planned, share
