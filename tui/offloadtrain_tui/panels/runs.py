"""9: the runs in a folder; a run can be opened, or its curves overlaid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import DataTable, Static

from offloadtrain_tui.panels.base import Panel
from offloadtrain_tui.reading.log_reader import COLUMNS, RunRow
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.drawn import STATE_COLORS
from offloadtrain_tui.widgets.table import Cell, fill, tell


class RunsPanel(Panel):
    """The list of runs; Enter opens a run, `o` overlays it."""

    @dataclass
    class Chosen(Message):
        """A run was selected; `overlay`: draw its curves over those of the open run; False: open
        it."""

        folder: Path
        overlay: bool

    BINDINGS: ClassVar[list[BindingType]] = [Binding("o", "choose(True)", "overlay")]

    _rows: Sequence[RunRow] = ()
    _runs_dir = Path()

    def compose(self) -> ComposeResult:
        yield Static(id="runs-text", markup=False)
        yield DataTable(id="runs-rows", cursor_type="row", zebra_stripes=True)

    def list_runs(self, rows: list[RunRow], runs_dir: Path) -> None:
        """Display the listed runs at once; `runs_dir`: the folder that was listed."""
        self._rows, self._runs_dir = rows, runs_dir
        self.show_again()

    def display_state(self, shown: ViewState) -> None:
        drawn = {other.folder for other in shown.other_runs}
        cells = [
            _cells(row, shown, row.folder in drawn, self.ink(STATE_COLORS[row.state]))
            for row in self._rows
        ]
        fill(self.query_one(DataTable), ("", *COLUMNS), cells)
        self._describe()

    def on_data_table_row_highlighted(self) -> None:
        self._describe()

    def _describe(self) -> None:
        """Show the folder of the runs, and how to continue the run at the cursor."""
        row = self.query_one(DataTable).cursor_row
        ending = self._rows[row].ending if 0 <= row < len(self._rows) else None
        where = f"runs in {self._runs_dir}" if self._rows else nothing_in(self._runs_dir)
        facts = (where, *((ending.saved, ending.next) if ending else ()))
        tell(self.query_one("#runs-text", Static), "\n".join(f" {line}" for line in facts if line))

    def on_data_table_row_selected(self) -> None:
        self.action_choose(False)

    def action_choose(self, overlay: bool) -> None:
        row = self.query_one(DataTable).cursor_row
        if 0 <= row < len(self._rows):
            self.post_message(self.Chosen(self._rows[row].folder, overlay=overlay))


def nothing_in(runs_dir: Path) -> str:
    """Return a message that a folder has no runs, and how to start one."""
    return f"no runs in {runs_dir.absolute()}: offloadtrain train demo starts one"


def _cells(row: RunRow, shown: ViewState, drawn: bool, color: str) -> tuple[Cell, ...]:
    sign = "▶" if row.folder == shown.snapshot.folder else "+" if drawn else ""
    name, state, *figures = row.cells(shown.now_s)
    return (sign, name, Text(state, color), *figures)
