"""The monitor's screens and keys: bindings, command palette, footer and help page."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import zip_longest

from rich.style import Style
from rich.text import Text
from textual.binding import Binding

from offloadtrain.events import schema
from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.panels.events import EventsPanel
from offloadtrain_tui.panels.gpus import Gpus
from offloadtrain_tui.panels.job import JobPanel
from offloadtrain_tui.panels.memory import MemoryPanel
from offloadtrain_tui.panels.overview import Overview
from offloadtrain_tui.panels.plots import PlotsPanel, Transfers
from offloadtrain_tui.panels.ranks import Ranks
from offloadtrain_tui.panels.runs import RunsPanel
from offloadtrain_tui.panels.timeline import TimelinePanel
from offloadtrain_tui.text import lane_word

PANELS: dict[str, type[Panel]] = {
    "overview": Overview,
    "memory": MemoryPanel,
    "transfers": Transfers,
    "timeline": TimelinePanel,
    "plots": PlotsPanel,
    "ranks": Ranks,
    "events": EventsPanel,
    "job": JobPanel,
    "runs": RunsPanel,
    "gpus": Gpus,
}


def with_keys(panels: Collection[str]) -> list[tuple[str, str]]:
    """Return pairs (key, panel), with keys 1 to 9 and 0 in order. Panels after the tenth have the
    key "" and are opened by name, with Ctrl+P."""
    return list(zip_longest("1234567890"[: len(panels)], panels, fillvalue=""))


KEYS = (
    Binding("question_mark", "help", "help", key_display="?"),
    Binding("q", "quit", "quit"),
    *(Binding(key, f"panel('{name}')", name) for key, name in with_keys(PANELS) if key),
    Binding("left_square_bracket", "move(-1)", "step back", key_display="[", show=False),
    Binding("right_square_bracket", "move(1)", "step on", key_display="]", show=False),
    Binding("comma", "move(-100)", "100 back", show=False),
    Binding("full_stop", "move(100)", "100 on", show=False),
    Binding("left_curly_bracket", "jump(-1)", "last mark", key_display="{", show=False),
    Binding("right_curly_bracket", "jump(1)", "next mark", key_display="}", show=False),
    Binding("g", "step", "go to step", show=False),
    Binding("end", "live", "live", show=False, priority=True),
    Binding("space", "pause", "pause", show=False),
    Binding("plus,equals_sign", "zoom(1)", "zoom in", show=False),
    Binding("minus", "zoom(-1)", "zoom out", show=False),
    Binding("y", "log_axis", "log axis", show=False),
    Binding("m", "mean", "mean", show=False),
    Binding("r", "next_run", "next run", show=False),
    Binding("c", "checkpoint", "checkpoint"),
    Binding("S", "stop", "stop"),
    Binding("x", "export", "export the timeline", show=False),
    Binding("e", "chart_file", "chart file", show=False),
    Binding("n", "note", "note", show=False),
    Binding("a", "acknowledge", "acknowledge", show=False),
    Binding("ctrl+s", "screenshot", "screenshot", show=False),
    Binding("b", "attention", "attention", show=False),
)
COMMANDS = (
    ("Save a checkpoint", "checkpoint"),
    ("Stop or abort the run", "stop"),
    ("Write a note into the log", "note"),
    ("Go to a step", "step"),
    ("Export the timeline for Perfetto", "export"),
    ("Write or copy a chart's numbers", "chart_file"),
    ("Back to live", "live"),
    ("Bell on or off", "attention"),
    ("Save the settings", "save_settings"),
)
"""(title, action) for the command palette, which also lists the panels."""

_SHORT = {
    "overview": "over", "memory": "mem", "transfers": "bus", "timeline": "time", "plots": "plot",
    "ranks": "rank", "events": "event", "gpus": "gpu",
}  # fmt: skip
_REQUESTS = ("checkpoint", "stop")


def _place(binding: Binding) -> int:
    """Return the position of a binding in the footer: screens, help, the screen's keys,
    requests."""
    if binding.action.startswith("panel("):
        return 0
    return {"help": 1, "quit": 3, "checkpoint": 3, "stop": 3}.get(binding.action, 2)


def footer(bindings: Iterable[tuple[str, Binding]], width: int, *, can_ask: bool) -> Text:
    """Return the footer: all screens, then as many other keys as fit. A click presses the key.

    Args:
        bindings: (displayed key, binding).
        can_ask: True if the run accepts requests.
    """
    shown = [
        (key, binding)
        for key, binding in bindings
        if binding.show and (can_ask or binding.action not in _REQUESTS)
    ]
    shown.sort(key=lambda item: _place(item[1]))
    full = " ".join(f"{key} {bound.description}" for key, bound in shown if _place(bound) < 2)
    text = Text(no_wrap=True)
    for key, binding in shown:
        name = binding.description if len(full) <= width else _SHORT.get(binding.description, "")
        label = f"{key} {name or binding.description}"
        if len(text) + len(label) + bool(text) <= width:
            click = Style(meta={"@click": f"app.simulate_key('{binding.key}')"})
            text.append(" " if text else "").append(key, Style(bold=True) + click)
            text.append(label.removeprefix(key), click)
    return text


# ---- the help page

_KEYS = (
    ("1 … 9, 0", "the ten screens that the last line names"),
    ("[ ]  , .", "one step back or on, a hundred steps"),
    ("{ }", "to the mark before, or the next one"),
    ("g  End", "go to a step by its number; back to live"),
    ("Space", "hold, go on"),
    ("+ -", "charts: zoom;  y logarithmic axis,  m moving average"),
    ("e", "write a chart's numbers into a file (CSV), or copy them"),
    ("arrows", "timeline: zoom, move;  x writes it for ui.perfetto.dev"),
    ("r  o", "next run;  on 9: overlay the curves of the chosen run"),
    ("v", "memory and gpus: the next rank"),
    ("/  Enter  j", "events: filter, show the record, go to its step"),
    ("c  S", "ask the run for a checkpoint; to stop, or to abort"),
    ("n  a", "write a note into the log; acknowledge the newest alert"),
    ("b", "a bell at an alert and at the end: on or off"),
    ("Ctrl+S  Ctrl+P", "save a picture; find every action by its name"),
    ("?  Esc", "open and close this page;  q leaves, the run goes on"),
)
_WORDS = (
    ("waits", "time that compute waited for the CPU or for a copy"),
    ("d2h", "gradients on their way to the host's memory"),
    ("host", "the optimizer's update, on the CPU"),
    ("h2d", "updated weights on their way to compute"),
    ("Adam m, v", "the optimizer's first and second moments"),
    ("MFU", "the model's FLOP/s as a share of the device's peak"),
    ("peak, plan", "the most that an owner has held; what the plan predicted"),
)
_MARKS = (("▾", "checkpoint"), ("▸", "start"), ("✗", "skipped, or not finite"), ("!", "alert"))


def help_page(start: schema.RunStarted | None) -> Text:
    """Return the help page, with the run's names of lanes. A terminal of 24 lines shows most."""
    text = Text()
    for title, lines in (("Keys", _KEYS), ("Words", _WORDS)):
        text.append(f"{title}\n", "bold")
        for key, what in lines:
            text.append(f"{lane_word(key, start):>14}", "bold").append(f"  {what}\n")
    text.append("Marks", "bold")
    text.append("    " + "   ".join(f"{sign} {what}" for sign, what in _MARKS))
    return text
