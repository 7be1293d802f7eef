"""3: bytes, rates and charts of bus and host. 5: all charts, with a common cursor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Grid, VerticalScroll
from textual.widgets import Static

from offloadtrain.config import units
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.plots import KINDS, plot
from offloadtrain_tui.reading.history import LANES, MAIN_LANES
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import lane_word, milliseconds
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.chart import Chart, Plot
from offloadtrain_tui.widgets.table import tell

CHARTS = (
    "loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "phases", "mfu", "loss_scale", "exposed",
    "bus", "bytes", "host_ms",
)  # fmt: skip
OF_TRANSFERS = ("bus", "bytes", "exposed", "host_ms")
_ALWAYS = ("loss", "grad_norm", "lr", "tokens_per_s", "step_ms", "phases", "exposed")


def charts(panel: Panel, names: Sequence[str]) -> Iterable[Chart]:
    """Return the widgets of a panel's charts."""
    return (Chart(Plot(KINDS[name]), id=f"{panel.id}-{name}") for name in names)


def show_charts(panel: Panel, names: Sequence[str], shown: ViewState) -> None:
    """Draw a panel's charts."""
    for name in names:
        panel.query_one(f"#{panel.id}-{name}", Chart).show(plot(name, shown))


class PlotsPanel(Panel):
    """A grid of charts without empty ones; scrolls on a low terminal."""

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="plots-charts"):
            yield from charts(self, CHARTS)

    def display_state(self, shown: ViewState) -> None:
        for name in (name for name in CHARTS if name not in _ALWAYS):
            is_known = shown.newest.last(KINDS[name].fields[0][0]) is not None
            self.query_one(f"#plots-{name}").display = is_known
        show_charts(self, CHARTS, shown)


class Transfers(Panel):
    """Charts of the bus, and a table of lanes as text."""

    def compose(self) -> ComposeResult:
        yield Static(id="transfers-text")
        with Grid(id="transfers-charts"):
            yield from charts(self, OF_TRANSFERS)

    def display_state(self, shown: ViewState) -> None:
        view, text = shown.view, Text()
        step_ms = view.last("step_ms") or 0.0
        for lane in LANES:
            busy_ms = view.busy_ms(lane)
            if lane not in MAIN_LANES and not busy_ms:
                continue
            share = f"{100 * busy_ms / step_ms:3.0f}% of step" if step_ms else ""
            name = lane_word(lane, view.start)
            text.append(f" {name:<9} {milliseconds(busy_ms):>9}  {share}  {_moved(lane, view)}\n")
        exposed = view.last("exposed_ms") or 0.0
        hidden = max(view.busy_ms("host") - exposed, 0.0)
        text.append(f" compute waited {milliseconds(exposed)}", "bold")
        if hidden:
            text.append(f"; at least {milliseconds(hidden)} of the CPU's work was hidden", "bold")
        tell(self.query_one("#transfers-text", Static), text)
        show_charts(self, OF_TRANSFERS, shown)


_FIELDS = {
    "d2h": "d2h_bytes",
    "h2d": "h2d_bytes",
    "comm": "comm_bytes",
    "disk_read": "disk_read_bytes",
    "disk_write": "disk_written_bytes",
}


_COUNTED_WITH = {"h2d": "load", "disk_read": "disk_load"}
"""Lane → lane whose bytes are included in its field."""


def _moved(lane: str, view: View) -> str:
    field = _FIELDS.get(lane)
    if field is None:
        return _adam(view) if lane == "host" else ""
    nbytes, busy_ms = view.last(field) or 0.0, view.busy_ms(lane)
    busy_ms += view.busy_ms(_COUNTED_WITH[lane]) if lane in _COUNTED_WITH else 0.0
    if not busy_ms:
        return units.format_bytes(nbytes)
    gbps = nbytes / busy_ms / 1e6
    most = calibrated(view).get(lane)
    share = f", {100 * gbps / most:.0f}% of calibrated" if most else ""
    return f"{units.format_bytes(nbytes)} at {gbps:.3g} GB/s{share}"


def calibrated(view: View) -> dict[str, float]:
    """Return lane → GB/s of a single copy on an idle bus, measured at the run's start."""
    rates = view.plan.get("calibrated_gbps")
    if not isinstance(rates, dict):
        return {}
    return {lane: rate for lane, rate in rates.items() if isinstance(rate, float) and rate > 0}


def _adam(view: View) -> str:
    """Return the memory traffic of updates, and its rate over the busy time of the host lane."""
    moved, rule = view.plan.get("adam_bytes_per_step"), view.plan.get("update_rule", "Adam")
    busy_ms = view.busy_ms("host")
    if not isinstance(moved, int) or not busy_ms:
        return ""
    return f"{rule} moves {units.format_bytes(moved)}, {moved / busy_ms / 1e6:.3g} GB/s or more"
