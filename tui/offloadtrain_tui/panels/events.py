"""7: the list of events with a filter, newest first, and the raw record of each event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import DataTable, Input

from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.reading.history import Moment
from offloadtrain_tui.text import local_time
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.table import Cell, fill

COLUMNS = ("time", "step", "rank", "kind", "what")
MOST = 500
_COLORS = {"good": "success", "warning": "warning", "error": "error", "info": ""}


class EventsPanel(Panel):
    """The events of all ranks; Enter shows the record, `j` jumps to its step."""

    @dataclass
    class Chosen(Message):
        """An event was selected; `jump`: move the cursor of all screens to it."""

        moment: Moment
        jump: bool

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter"),
        Binding("j", "choose(True)", "go to its step"),
        Binding("escape", "leave", show=False),
    ]

    _moments: Sequence[Moment] = ()

    def compose(self) -> ComposeResult:
        yield Input(placeholder="filter: words, kinds or levels", id="events-filter")
        yield DataTable(id="events-rows", cursor_type="row", zebra_stripes=True)

    def display_state(self, shown: ViewState) -> None:
        words = self.query_one(Input).value.lower().split()
        moments = [moment for view in shown.views for moment in view.moments]
        moments.sort(key=lambda moment: -moment.time_s)
        self._moments = [moment for moment in moments if matches(moment, words)][:MOST]
        inks = {level: self.ink(color) for level, color in _COLORS.items()}
        rows = [_cells(moment, inks.get(moment.level, "")) for moment in self._moments]
        fill(self.query_one(DataTable), COLUMNS, rows)

    def action_filter(self) -> None:
        self.query_one(Input).focus()

    def action_leave(self) -> None:
        self.query_one(DataTable).focus()

    def on_input_changed(self) -> None:
        self.show_again()

    def on_input_submitted(self) -> None:
        self.action_leave()

    def on_data_table_row_selected(self) -> None:
        self.action_choose(False)

    def action_choose(self, jump: bool) -> None:
        row = self.query_one(DataTable).cursor_row
        if 0 <= row < len(self._moments):
            self.post_message(self.Chosen(self._moments[row], jump=jump))


def matches(moment: Moment, words: list[str]) -> bool:
    """Return True if every word occurs in the event."""
    text = f"{moment.kind} {moment.level} {moment.text} {moment.step} rank{moment.rank}".lower()
    return all(word in text for word in words)


def _cells(moment: Moment, color: str) -> tuple[Cell, ...]:
    time = local_time(moment.time_s, "%m-%d %H:%M:%S")
    step = "" if moment.step is None else str(moment.step)
    return time, step, str(moment.rank), moment.kind, Text(moment.text, color)
