"""Curves in braille: two by four dots per character, the least and greatest per column of dots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offloadtrain_tui.series import NOTHING, Extent

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800


class Canvas:
    """Characters of `width` by `height`; each holds dots and the number of the curve that drew
    there last."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._dots = [[0] * width for _ in range(height)]
        self._curve = [[-1] * width for _ in range(height)]

    def draw(self, extents: Sequence[Extent], low: float, high: float, curve: int) -> None:
        """A curve of one extent per column of dots (2 * width of them), joined where they touch.

        `low` is the lowest row of dots, `high` the highest.
        """
        rows = self.height * 4
        scale = (rows - 1) / (high - low) if high > low else 0.0
        before: tuple[int, int] | None = None
        for column, extent in enumerate(extents[: self.width * 2]):
            if extent == NOTHING:
                before = None
                continue
            top = rows - 1 - _row(extent[1], low, scale, rows)
            bottom = rows - 1 - _row(extent[0], low, scale, rows)
            first, last = top, bottom
            if before is not None:  # up or down to where the last column ended
                first, last = min(first, before[1] + 1), max(last, before[0] - 1)
            self._column(column, min(first, top), max(last, bottom), curve)
            before = (top, bottom)

    def _column(self, column: int, top: int, bottom: int, curve: int) -> None:
        x, side = divmod(column, 2)
        for row in range(top, bottom + 1):
            y, part = divmod(row, 4)
            self._dots[y][x] |= _DOTS[part][side]
            self._curve[y][x] = curve

    def row(self, y: int) -> list[tuple[str, int]]:
        """Runs of characters of one curve: (text, curve), -1 where nothing is drawn."""
        runs: list[tuple[str, int]] = []
        for dots, curve in zip(self._dots[y], self._curve[y], strict=True):
            character = chr(_BLANK + dots) if dots else " "
            if runs and runs[-1][1] == curve:
                runs[-1] = (runs[-1][0] + character, curve)
            else:
                runs.append((character, curve))
        return runs


def _row(value: float, low: float, scale: float, rows: int) -> int:
    if scale == 0.0:
        return rows // 2
    return min(max(round((value - low) * scale), 0), rows - 1)


def logarithmic(extent: Extent) -> Extent:
    """Of what is above zero."""
    low, high = extent
    if high <= 0:
        return NOTHING
    return math.log10(low) if low > 0 else math.log10(high), math.log10(high)


def bounds(extents: Sequence[Sequence[Extent]]) -> Extent:
    """Least and greatest of several curves, a little wider where they are one value."""
    known = [extent for curve in extents for extent in curve if extent != NOTHING]
    if not known:
        return 0.0, 1.0
    low, high = min(low for low, _ in known), max(high for _, high in known)
    if low == high:
        room = abs(low) * 0.05 or 0.5
        return low - room, high + room
    return low, high
