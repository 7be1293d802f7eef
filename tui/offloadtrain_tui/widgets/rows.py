"""A table that is only looked at: no cursor, and only changed lines are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rich.segment import Segment
from textual.strip import Strip

from offloadtrain_tui.widgets.drawn import Drawn


@dataclass(frozen=True, slots=True)
class Table:
    """Columns, and rows with as many cells; texts are clean."""

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


class Rows(Drawn[Table]):
    """A widget that draws a `Table`, as high as it is; columns only grow."""

    DEFAULT_CSS = "Rows { height: auto; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(Table(), id=id)
        self._widths: list[int] = []

    def show(self, content: Table) -> None:
        before = self._content
        if content.columns != before.columns:
            self._widths = [0] * len(content.columns)
        lines = zip(*(content.columns, *content.rows), strict=True)
        longest = (max(map(len, column)) for column in lines)
        self._widths = [max(pair) for pair in zip(self._widths, longest, strict=True)]
        super().show(content)
        if len(content.rows) != len(before.rows):
            self.refresh(layout=True)

    def get_content_height(self, *_: object) -> int:
        return len(self._content.rows) + bool(self._content.columns)

    def draw(self, width: int, height: int) -> list[Strip]:
        lines = (self._content.columns, *self._content.rows)
        return [
            self.line((cells, *self._widths, y == 0), partial(self._cells, cells, is_head=y == 0))
            for y, cells in enumerate(lines)
        ]

    def _cells(self, cells: tuple[str, ...], *, is_head: bool) -> list[Segment]:
        padded = (f" {cell:<{size}} " for cell, size in zip(cells, self._widths, strict=True))
        return [Segment("".join(padded), self.style("foreground", bold=is_head))]
