"""Curves in braille: two by four dots per character, minimum and maximum per column of dots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offloadtrain_tui.reading.series import NOTHING, Extent

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the dots, by column and row within a character."""

_BARS = tuple(
    tuple(tuple(sum(side[first : last + 1]) for last in range(4)) for first in range(4))
    for side in _DOTS
)
"""Return the dots of a column from row `first` to row `last` of a character."""

_NO_CURVE = 255

_SIGNS = [" ", *(chr(0x2800 + dots) for dots in range(1, 256))]


class Canvas:
    """Characters of `width` by `height`; each stores dots and the number of the last curve drawn
    there."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._dots = [bytearray(width) for _ in range(height)]
        self._curve = [bytearray([_NO_CURVE] * width) for _ in range(height)]

    def draw(self, extents: Sequence[Extent], low: float, high: float, curve: int) -> None:
        """Draw a curve of one extent per column of dots (2 * width of them), joined to the next.

        `low` is the lowest row of dots, `high` the highest.
        """
        lowest = self.height * 4 - 1
        scale = lowest / (high - low) if high > low else 0.0
        last: tuple[int, int] | None = None
        for column, (least, greatest) in enumerate(extents[: self.width * 2]):
            if least > greatest:
                last = None
                continue
            top = lowest - _row(greatest, low, scale, lowest)
            bottom = lowest - _row(least, low, scale, lowest)
            if last is None:
                self._column(column, top, bottom, curve)
            else:  # up or down to the end of the last column
                first = min(top, last[1] + 1)
                self._column(column, first, max(bottom, last[0] - 1), curve)
            last = (top, bottom)

    def _column(self, column: int, top: int, bottom: int, curve: int) -> None:
        x, bars = column >> 1, _BARS[column & 1]
        first, last = top >> 2, bottom >> 2
        for y in range(first, last + 1):
            begin = top & 3 if y == first else 0
            end = bottom & 3 if y == last else 3
            self._dots[y][x] |= bars[begin][end]
            self._curve[y][x] = curve

    def drawn(self, y: int) -> tuple[bytes, bytes]:
        """Return what is drawn in a row; equal ones look the same."""
        return bytes(self._dots[y]), bytes(self._curve[y])

    def row(self, y: int) -> list[tuple[str, int | None]]:
        """Return runs of characters of one curve: (text, curve), None if nothing is drawn."""
        runs: list[tuple[list[str], int]] = []
        for dots, curve in zip(self._dots[y], self._curve[y], strict=True):
            if runs and runs[-1][1] == curve:
                runs[-1][0].append(_SIGNS[dots])
            else:
                runs.append(([_SIGNS[dots]], curve))
        return [("".join(signs), None if curve == _NO_CURVE else curve) for signs, curve in runs]


_HALF = 0.5 + 1e-9
"""What lies between two rows of dots, but for rounding, is in the upper one."""


def _row(value: float, low: float, scale: float, highest: int) -> int:
    """Return the row of dots, counted from below."""
    if scale == 0.0:
        return highest // 2
    row = int((value - low) * scale + _HALF)
    return 0 if row < 0 else highest if row > highest else row


def logarithmic(extent: Extent) -> Extent:
    """Return the logarithms of an extent's positive part."""
    low, high = extent
    if high <= 0:
        return NOTHING
    return math.log10(low) if low > 0 else math.log10(high), math.log10(high)


def bounds(extents: Sequence[Sequence[Extent]]) -> Extent | None:
    """Return minimum and maximum of several curves, slightly wider if they are equal; None if there
    is nothing to draw."""
    known = [extent for curve in extents for extent in curve if extent != NOTHING]
    if not known:
        return None
    low, high = min(low for low, _ in known), max(high for _, high in known)
    if low == high:
        room = abs(low) * 0.05 or 0.5
        return low - room, high + room
    return low, high
