"""2: memory by owner and tier, planned and actual, over time, and the processes on each GPU."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Static

from offloadtrain.config import units
from offloadtrain.events import schema
from offloadtrain_tui import memory
from offloadtrain_tui.panels.base import RankPanel
from offloadtrain_tui.text import clean, owner_word
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.bars import Area, AreaChart, MemoryBars
from offloadtrain_tui.widgets.table import fill, tell

COLUMNS = ("now", "peak", "planned", "peak/plan")
PROCESSES = ("GPU", "pid", "user", "memory", "command")


class MemoryPanel(RankPanel):
    """Bars, tables of owners and processes, and histories of a GPU and of the host; `v` shows the
    owners of the next rank."""

    def compose(self) -> ComposeResult:
        yield MemoryBars(legend=4, id="memory-bars")
        with Horizontal(id="memory-rest"):
            with Vertical(id="memory-tables"):
                yield DataTable(id="memory-rows", cursor_type="row", zebra_stripes=True)
                yield Static(id="memory-processes-text", markup=False)
                yield DataTable(id="memory-processes", cursor_type="row", zebra_stripes=True)
            with Vertical(id="memory-history"):
                yield AreaChart(Area("GPU"), id="memory-gpu")
                yield AreaChart(Area("HOST"), id="memory-host")

    def display_state(self, shown: ViewState) -> None:
        tiers = memory.bars(shown)
        self.query_one(MemoryBars).show(tiers)
        on_device = "CPU" if shown.view.on_cpu else "GPU"
        view = self.view_of_rank(shown)
        rows = [_cells(*row, on_device) for row in memory.rows(view)]
        owner = f"owner on rank {view.history.rank} (v)" if len(shown.views) > 1 else "owner"
        fill(self.query_one("#memory-rows", DataTable), ("where", owner, *COLUMNS), rows)
        on_gpu = self.query_one("#memory-gpu", AreaChart)
        on_gpu.display = len(tiers) > 1 and shown.view.start is not None
        if on_gpu.display:
            on_gpu.show(memory.device_history(shown.view, tiers[0]))
        host = memory.host_history(shown.views, tiers[-1])
        self.query_one("#memory-host", AreaChart).show(host)
        local_system = memory.sample_if_run_is_here(shown)
        gpus = local_system.gpus if local_system else ()
        processes = [_process(gpu, process) for gpu in gpus for process in gpu.processes]
        table = self.query_one("#memory-processes", DataTable)
        table.display = bool(processes)
        fill(table, PROCESSES, processes)
        text = _about_processes(shown, local_system)
        tell(self.query_one("#memory-processes-text", Static), text)


def _about_processes(shown: ViewState, local_system: schema.System | None) -> str:
    """Return the title of the list of processes, or the reason why it is empty."""
    if shown.view.on_cpu:
        return ""
    if local_system is None:
        return " processes on the GPU: seen only on the run's own host, while it lives"
    if not local_system.gpus:
        return f" processes on the GPU: {clean(local_system.gpu_state)}"
    return " processes on each GPU"


def _process(gpu: schema.GpuSample, process: schema.GpuProcess) -> tuple[str, ...]:
    size = "-" if process.num_bytes is None else f"{process.num_bytes >> 20} MiB"
    user, command = (
        clean(process.user, 20) or "-",
        clean(process.command, 60) or "not of this container",
    )
    return str(gpu.index), str(process.pid), user, size, command


def _cells(row: schema.MemoryRow, planned: int | None, on_device: str) -> tuple[str, ...]:
    return (
        on_device if row.tier == "device" else row.tier,
        clean(owner_word(row.owner)),
        units.format_bytes(row.num_bytes),
        units.format_bytes(row.peak_bytes),
        "-" if planned is None else units.format_bytes(planned),
        f"{row.peak_bytes / planned:.2f}" if planned else "-",
    )
