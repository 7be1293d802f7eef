"""Tables updated cell by cell, which keeps cursor and scroll position."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widgets import DataTable

Cell = str | Text


def fill(table: DataTable[Text], columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Make the table show these rows. Plain strings are shown as they are: they are no markup."""
    if [key.value for key in table.columns] != list(columns):
        table.clear(columns=True)
        for column in columns:
            table.add_column(column, key=column)
    while table.row_count > len(rows):
        table.remove_row(str(table.row_count - 1))
    for number, row in enumerate(map(_texts, rows)):
        if number >= table.row_count:
            table.add_row(*row, key=str(number))
            continue
        for shown, cell in zip(table.ordered_columns, row, strict=True):
            known = table.get_cell(str(number), shown.key)
            if known != cell or known.style != cell.style:  # equal texts may differ in their style
                # A change of widths lays out the screen: columns only grow.
                wider = cell.cell_len > shown.content_width
                table.update_cell(str(number), shown.key, cell, update_width=wider)


def _texts(row: Sequence[Cell]) -> list[Text]:
    return [Text(cell) if isinstance(cell, str) else cell for cell in row]
