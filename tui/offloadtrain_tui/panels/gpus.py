"""0: each GPU now, and one of them over time: load, power, temperature, clock, PCIe, NVLink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, VerticalScroll
from textual.widgets import Static

from offloadtrain.config import units
from offloadtrain.events import schema
from offloadtrain_tui import memory
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.reading.series import Window
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, short
from offloadtrain_tui.view_state import ZOOMS, ViewState
from offloadtrain_tui.widgets.chart import Chart, Curve, Plot
from offloadtrain_tui.widgets.rows import Rows, Table
from offloadtrain_tui.widgets.tell import tell

COLUMNS = ("GPU", "name", "busy", "power", "heat", "clock", "memory", "link")
_LEAST_WINDOW = 16
NARROW = 100


@dataclass(frozen=True, slots=True)
class Kind:
    """A chart: (field, label, color, mirrored) of each curve, and its unit."""

    title: str
    fields: tuple[tuple[str, str, str, bool], ...]
    unit: str
    scale: float = 1.0
    least_range: float = 0.2
    from_zero: bool = False

    def form(self, value: float | None) -> str:
        return "-" if value is None else short(value * self.scale)


KINDS = {
    "busy": Kind("busy", (("utilization_percent", "", "success", False),), "%", from_zero=True),
    "power": Kind("power", (("power_w", "", "warning", False),), " W"),
    "heat": Kind("temperature", (("temperature_c", "", "error", False),), " °C"),
    "clock": Kind("clock", (("clock_mhz", "", "secondary", False),), " MHz"),
    "pcie": Kind(
        "PCIe",
        (
            ("pcie_rx_bytes_per_s", "in", "primary", False),
            ("pcie_tx_bytes_per_s", "out", "warning", True),
        ),
        " GB/s",
        1e-9,
    ),
    "nvlink": Kind(
        "NVLink",
        (
            ("nvlink_rx_bytes_per_s", "in", "primary", False),
            ("nvlink_tx_bytes_per_s", "out", "warning", True),
        ),
        " GB/s",
        1e-9,
    ),
}
_ALWAYS = ("busy", "power", "heat", "pcie")


class Gpus(Panel):
    """A row per GPU, and charts of one; `v` shows the next."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("v", "next_gpu", "next GPU", show=False)]
    can_focus = True

    _rank = 0
    _shown: ViewState | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="gpus-text", markup=False)
        with VerticalScroll(id="gpus-all"):
            yield Rows(id="gpus-rows")
        with Grid(id="gpus-charts"):
            for name, kind in KINDS.items():
                yield Chart(Plot(kind.title), id=f"gpus-{name}", pickable=False)

    def action_next_gpu(self) -> None:
        self._rank += 1
        if self._shown is not None:
            self.show(self._shown)

    def show(self, shown: ViewState) -> None:
        self._shown = shown
        local_system = memory.local(shown)
        # This machine's while the run lives here, otherwise the logged ones.
        system = local_system or shown.view.system
        gpus = system.gpus if system and not memory.is_on_cpu(shown.view) else ()
        view = shown.views[self._rank % len(shown.views)]
        tell(self.query_one("#gpus-text", Static), _about(shown, local_system, gpus, view))
        # A narrow terminal has no room for the links.
        count = len(COLUMNS) - (self.app.size.width < NARROW)
        rows = tuple(_row(gpu)[:count] for gpu in gpus)
        self.query_one("#gpus-rows", Rows).show(Table(COLUMNS[:count] if gpus else (), rows))
        there = bool(view.history.gpu.times) and not memory.is_on_cpu(shown.view)
        self.query_one("#gpus-charts", Grid).display = there
        for name, kind in KINDS.items():
            chart = self.query_one(f"#gpus-{name}", Chart)
            chart.display = there and (name in _ALWAYS or _is_known(view, kind))
            if chart.display:
                chart.show(plot(kind, view, ZOOMS[shown.zoom]))


def plot(kind: Kind, view: View, zoom: int = 1) -> Plot:
    """Return a chart of the rank's GPU until the moment of the view."""
    history = view.history.gpu
    length = history.count(view.time_s)
    size = max(length // zoom, min(length, _LEAST_WINDOW))
    window = Window(length - size, length)
    curves = tuple(
        Curve(label, history.series[field], length, color, mirrored)
        for field, label, color, mirrored in kind.fields
    )
    spent_s = history.times[length - 1] - history.times[window.lo] if length else 0.0
    form: Callable[[float | None], str] = kind.form
    return Plot(
        title=kind.title,
        curves=curves,
        window=window,
        unit=kind.unit,
        axis=(f"{units.format_duration(spent_s)} before" if spent_s else "", "last sample"),
        form=form,
        least_range=kind.least_range,
        from_zero=kind.from_zero,
    )


def _is_known(view: View, kind: Kind) -> bool:
    history = view.history.gpu
    length = history.count(view.time_s)
    return any(history.series[field].last(length) is not None for field, *_ in kind.fields)


def _about(
    shown: ViewState,
    local_system: schema.System | None,
    gpus: tuple[schema.GpuSample, ...],
    view: View,
) -> str:
    if memory.is_on_cpu(shown.view):
        return " this run uses no GPU"
    if not gpus:
        system = local_system or shown.view.system
        return f" no GPU to show: {clean(system.gpu_state) if system else ''}".rstrip(": ")
    title = f" GPUs, {'live' if local_system is not None else 'as logged'}"
    if not view.history.gpu.times:
        return f"{title}; over time: only with a run that has logged it"
    more = " (v: the next)" if len(shown.views) > 1 else ""
    return f"{title}; below: that of rank {view.history.rank} over time{more}"


def _row(gpu: schema.GpuSample) -> tuple[str, ...]:
    most = f"/{gpu.clock_max_mhz}" if gpu.clock_max_mhz else ""
    return (
        str(gpu.index),
        clean(gpu.name, 24),
        _of(gpu.utilization_percent, " %"),
        _of(gpu.power_w, " W"),
        _of(gpu.temperature_c, " °C"),
        _of(gpu.clock_mhz, f"{most} MHz"),
        _used_of_total(gpu.memory_used_bytes, gpu.memory_total_bytes),
        "  ".join(filter(None, (_pcie(gpu), _nvlink(gpu), clean(gpu.throttle)))),
    )


def _used_of_total(used: int | None, total: int | None) -> str:
    if used is None or not total:
        return "-" if used is None else units.format_bytes(used)
    return f"{used / 2**30:.1f}/{total / 2**30:.1f} GiB"


def _of(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


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
