"""6: ranks and GPUs: lag and slowness."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from offloadtrain.config import units
from offloadtrain.events import schema
from offloadtrain_tui import memory
from offloadtrain_tui.history import View
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.text import clean, milliseconds, short
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.table import Cell, fill
from offloadtrain_tui.widgets.tell import tell

RANKS = (
    "rank",
    "step",
    "behind",
    "step time",
    "own part",
    "skew",
    "waits",
    "CPU Adam",
    "loss",
    "memory",
)
GPUS = ("GPU", "name", "memory", "busy", "power", "heat")


class Ranks(Panel):
    """A row per rank, and a row per GPU of the machine."""

    def compose(self) -> ComposeResult:
        yield Static(id="ranks-text", markup=False)
        yield DataTable(id="ranks-rows", cursor_type="row", zebra_stripes=True)
        yield Static(id="ranks-gpu-text", markup=False)
        yield DataTable(id="ranks-gpus", cursor_type="row", zebra_stripes=True)

    def show(self, shown: ViewState) -> None:
        views = shown.views
        tell(self.query_one("#ranks-text", Static), skew(views))
        fill(self.query_one("#ranks-rows", DataTable), RANKS, rank_rows(views))
        own = memory.local(shown)
        system = own or shown.view.system
        gpus = system.gpus if system and not memory.is_on_cpu(shown.view) else ()
        state = clean(system.gpu_state) if system and not gpus else ""
        state = "this run uses none" if memory.is_on_cpu(shown.view) else state
        where = "live" if own is not None else "as logged"
        text = f" GPUs, {where}" if gpus else f" no GPU to show: {state or 'none was sampled'}"
        tell(self.query_one("#ranks-gpu-text", Static), text)
        fill(self.query_one("#ranks-gpus", DataTable), GPUS, [_gpu(gpu) for gpu in gpus])


def rank_rows(views: Sequence[View]) -> list[tuple[Cell, ...]]:
    newest = max((view.step for view in views), default=0)
    middle = _middle(views)
    rows: list[tuple[Cell, ...]] = []
    for view in views:
        own = view.median_own_ms()
        apart = f"{100 * (own / middle - 1):+.1f} %" if own and middle else "-"
        behind = newest - view.step
        held = sum(row.num_bytes for row in view.memory if row.tier == "device")
        rows.append(
            (
                str(view.history.rank),
                str(view.step),
                f"{behind} steps" if behind else "",
                milliseconds(view.median_step_ms()),
                milliseconds(own),
                apart,
                milliseconds(view.last("exposed_ms")),
                milliseconds(view.busy_ms("host")),
                short(view.last("loss")),
                units.format_bytes(held),
            )
        )
    return rows


def skew(views: Sequence[View]) -> str:
    """The slowest rank against the median, in a line."""
    middle = _middle(views)
    if len(views) < 2 or not middle:
        return " one rank"
    slowest = max(views, key=lambda view: view.median_own_ms() or 0.0)
    over = (slowest.median_own_ms() or 0.0) / middle - 1
    return (
        f" {len(views)} ranks; the slowest is rank {slowest.history.rank}, {100 * over:.1f} % over"
    )


def _middle(views: Sequence[View]) -> float:
    known = [found for view in views if (found := view.median_own_ms()) is not None]
    return statistics.median(known) if known else 0.0


def _gpu(gpu: schema.GpuSample) -> tuple[Cell, ...]:
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    held = "-" if used is None else units.format_bytes(used)
    return (
        str(gpu.index),
        clean(gpu.name),
        f"{held} of {units.format_bytes(total)}" if total else held,
        "-" if gpu.utilization_percent is None else f"{gpu.utilization_percent:.0f} %",
        "-" if gpu.power_w is None else f"{gpu.power_w:.0f} W",
        "-" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C",
    )
