"""Tables that are updated cell by cell, which preserves cursor and scroll position, and texts that
are updated only if they have changed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.widgets import DataTable, Static

Cell = str | Text


def fill(table: DataTable[Text], columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Display these rows in the table. Strings are not parsed as markup."""
    if [key.value for key in table.columns] != list(columns):
        table.clear(columns=True)
        for column in columns:
            table.add_column(column, key=column)
    while table.row_count > len(rows):
        table.remove_row(str(table.row_count - 1))
    for number, cells in enumerate(rows):
        row = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        if number >= table.row_count:
            table.add_row(*row, key=str(number))
            continue
        for shown, cell in zip(table.ordered_columns, row, strict=True):
            known = table.get_cell(str(number), shown.key)
            if known != cell or known.style != cell.style:  # `==` of texts ignores their style
                # A change of a column's width lays out the screen, so columns only grow.
                wider = cell.cell_len > shown.content_width
                table.update_cell(str(number), shown.key, cell, update_width=wider)


def tell(widget: Static, text: Text | str) -> None:
    """Display a text; strings are not parsed as markup. Lay out the screen only if necessary."""
    shown, before = Text(text) if isinstance(text, str) else text, widget.content
    if before != shown:
        widget.update(shown, layout=not _same_lines(before, shown, widget.content_size.width))


def _same_lines(before: object, shown: Text, width: int) -> bool:
    """Return True if both texts have the same number of lines, and no line wraps at this width. The
    layout of the screen, which takes longer than drawing it, is then unchanged."""
    if not isinstance(before, Text) or before.plain.count("\n") != shown.plain.count("\n"):
        return False
    lines = (line for text in (before, shown) for line in text.split("\n", allow_blank=True))
    return all(line.cell_len <= width for line in lines)
