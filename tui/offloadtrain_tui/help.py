"""`?`: the keys, the words and the marks of the monitor, on one page."""

from __future__ import annotations

from rich.text import Text

from offloadtrain.events import schema
from offloadtrain_tui.text import lane_word

KEYS = (
    (
        "1 … 9, 0",
        "screens: overview, memory, transfers, timeline, plots, ranks, events, job, runs, gpus",
    ),
    ("[ ]  , .", "one step back or on, a hundred steps"),
    ("{ }", "to the mark before, or the next one"),
    ("g  End", "go to a step by its number; back to live"),
    ("Space", "hold, go on"),
    ("+ -", "charts: zoom in, zoom out;  y logarithmic axis,  m moving average"),
    ("e", "write a chart's numbers into a file (CSV), or copy them"),
    ("arrows", "timeline: zoom, move;  x writes it for ui.perfetto.dev"),
    ("r  o", "next run;  on 9: draw the chosen run beside this one"),
    ("/  Enter  j", "events: filter, show the record, go to its step"),
    ("c  S", "ask the run for a checkpoint; to stop, or to abort"),
    ("n  a", "write a note into the log; the newest alert is seen"),
    ("b", "a bell at an alert and at the end: on or off"),
    ("Ctrl+S  Ctrl+P", "save a picture; find every action by its name"),
    ("?  Esc", "open and close this page;  q leaves the monitor, the run goes on"),
)
WORDS = (
    ("waits", "time that compute waited for the CPU or for a copy"),
    ("d2h", "gradients on their way to the host's memory"),
    ("host", "the optimizer's update, on the CPU"),
    ("h2d", "updated weights on their way to compute"),
    ("Adam m, v", "the optimizer's first and second moments"),
    ("MFU", "floating-point operations of the model, of the device's peak"),
    ("peak, plan", "the most that an owner has held; what the plan said before the run"),
)
MARKS = (("▾", "checkpoint"), ("▸", "start"), ("✗", "skipped, or not finite"), ("!", "alert"))


def page(start: schema.RunStarted | None) -> Text:
    """Return the page, in the words of a run; 24 lines, of which a small terminal shows most."""
    text = Text()
    for title, lines in (("Keys", KEYS), ("Words", WORDS)):
        text.append(f"{title}\n", "bold")
        for key, what in lines:
            text.append(f"{lane_word(key, start):>14}", "bold").append(f"  {what}\n")
    text.append("Marks", "bold")
    text.append("    " + "   ".join(f"{sign} {what}" for sign, what in MARKS))
    return text
