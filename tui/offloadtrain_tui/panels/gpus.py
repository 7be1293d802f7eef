"""0: current state of each GPU, and one GPU's load, power, temperature, clock and links over
time."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Grid
from textual.widgets import DataTable, Static

from offloadtrain.config import units
from offloadtrain.events import schema
from offloadtrain_tui import memory
from offloadtrain_tui.panels.base import RankPanel
from offloadtrain_tui.plots import STEADY, single_curve
from offloadtrain_tui.reading.columns import Window
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, short
from offloadtrain_tui.view_state import ZOOMS, ViewState
from offloadtrain_tui.widgets.chart import Chart, Curve, Kind, Plot
from offloadtrain_tui.widgets.table import fill, tell

COLUMNS = ("GPU", "name", "busy", "power", "heat", "clock", "memory", "link")
_LEAST_WINDOW = 16
NARROW = 100


KINDS = {
    "busy": Kind(
        "busy",
        single_curve("utilization_percent", "success"),
        "%",
        from_zero=True,
        least_range=STEADY,
    ),
    "power": Kind("power", single_curve("power_w", "warning"), " W", least_range=STEADY),
    "heat": Kind("temperature", single_curve("temperature_c", "error"), " °C", least_range=STEADY),
    "clock": Kind("clock", single_curve("clock_mhz", "secondary"), " MHz", least_range=STEADY),
    "pcie": Kind(
        "PCIe",
        (
            ("pcie_rx_bytes_per_s", "in", "primary", False),
            ("pcie_tx_bytes_per_s", "out", "warning", True),
        ),
        " GB/s",
        form=lambda value: short(value * 1e-9),
        least_range=STEADY,
    ),
    "nvlink": Kind(
        "NVLink",
        (
            ("nvlink_rx_bytes_per_s", "in", "primary", False),
            ("nvlink_tx_bytes_per_s", "out", "warning", True),
        ),
        " GB/s",
        form=lambda value: short(value * 1e-9),
        least_range=STEADY,
    ),
}
_ALWAYS = ("busy", "power", "heat", "pcie")


class Gpus(RankPanel):
    """A row per GPU, and charts for one GPU; `v` selects the next."""

    can_focus = True

    def compose(self) -> ComposeResult:
        yield Static(id="gpus-text", markup=False)
        yield DataTable(id="gpus-rows", cursor_type="none", zebra_stripes=True)
        with Grid(id="gpus-charts"):
            for name, kind in KINDS.items():
                yield Chart(Plot(kind), id=f"gpus-{name}", pickable=False)

    def display_state(self, shown: ViewState) -> None:
        view, live = self.view_of_rank(shown), memory.sample_if_run_is_here(shown)
        system = live or shown.view.system
        gpus = system.gpus if system and not shown.view.on_cpu else ()
        text = _about(shown, view, system, is_live=live is not None)
        tell(self.query_one("#gpus-text", Static), text)
        # A narrow terminal has no room for the links.
        count = len(COLUMNS) - (self.app.size.width < NARROW)
        rows = [_row(gpu)[:count] for gpu in gpus]
        fill(self.query_one(DataTable), COLUMNS[:count] if rows else (), rows)
        is_logged = bool(view.history.systems.gpu.times) and not shown.view.on_cpu
        self.query_one("#gpus-charts", Grid).display = is_logged
        length = view.history.systems.gpu.count(view.time_s)
        for name, kind in KINDS.items():
            series = [view.history.systems.gpu.series[field] for field, *_ in kind.fields]
            is_known = any(column.last(length) is not None for column in series)
            chart = self.query_one(f"#gpus-{name}", Chart)
            chart.display = is_logged and (name in _ALWAYS or is_known)
            if chart.display:
                chart.show(plot(kind, view, ZOOMS[shown.zoom]))


def plot(kind: Kind, view: View, zoom: int = 1) -> Plot:
    """Return a chart of the rank's GPU until the moment of the view."""
    history, length = view.history.systems.gpu, view.history.systems.gpu.count(view.time_s)
    size = max(length // zoom, min(length, _LEAST_WINDOW))
    window = Window(length - size, length)
    curves = tuple(
        Curve(label, history.series[field], length, color, mirrored)
        for field, label, color, mirrored in kind.fields
    )
    spent_s = history.times[length - 1] - history.times[window.lo] if length else 0.0
    return Plot(
        kind,
        curves,
        window,
        axis=(f"{units.format_duration(spent_s)} before" if spent_s else "", "last sample"),
    )


def _about(shown: ViewState, view: View, system: schema.System | None, *, is_live: bool) -> str:
    if shown.view.on_cpu:
        return " this run uses no GPU"
    if system is None or not system.gpus:
        return f" no GPU to show: {clean(system.gpu_state if system else '')}".rstrip(": ")
    title = f" GPUs, {'live' if is_live else 'as logged'}"
    if not view.history.systems.gpu.times:
        return f"{title}; over time: only with a run that has logged it"
    more = " (v: the next)" if len(shown.views) > 1 else ""
    return f"{title}; below: that of rank {view.history.rank} over time{more}"


def _row(gpu: schema.GpuSample) -> tuple[str, ...]:
    most = f"/{gpu.clock_max_mhz}" if gpu.clock_max_mhz else ""
    return (
        str(gpu.index),
        clean(gpu.name, 24),
        memory.rounded(gpu.utilization_percent, "%"),
        memory.rounded(gpu.power_w, " W"),
        memory.rounded(gpu.temperature_c, " °C"),
        memory.rounded(gpu.clock_mhz, f"{most} MHz"),
        _used_of_total(gpu.memory_used_bytes, gpu.memory_total_bytes),
        "  ".join(filter(None, (_pcie(gpu), _nvlink(gpu), clean(gpu.throttle)))),
    )


def _used_of_total(used: int | None, total: int | None) -> str:
    if used is None or not total:
        return "-" if used is None else units.format_bytes(used)
    return f"{used / 2**30:.1f}/{total / 2**30:.1f} GiB"


def _pcie(gpu: schema.GpuSample) -> str:
    if gpu.pcie_generation is None:
        return "-"
    now = gpu.pcie_generation, gpu.pcie_width
    most = gpu.pcie_generation_max, gpu.pcie_width_max
    less = f" of {most[0]} x{most[1]}" if most != now and most[0] is not None else ""
    return f"PCIe {now[0]} x{now[1]}{less}"


def _nvlink(gpu: schema.GpuSample) -> str:
    rates = gpu.nvlink_rx_bytes_per_s, gpu.nvlink_tx_bytes_per_s
    if rates[0] is None or rates[1] is None:
        return ""
    return f"NVLink in {rates[0] / 1e9:.1f}, out {rates[1] / 1e9:.1f} GB/s"
