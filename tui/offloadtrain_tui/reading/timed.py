"""Growing columns that know from when each of their values is valid. Lines of a log are compressed
by the block: samples of a long run take little memory."""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from collections.abc import MutableSequence
from typing import Generic, TypeVar

T = TypeVar("T")
BLOCK = 256
"""Lines of a block; JSON of one kind shrinks to a tenth or less."""


class Times:
    """The times from which the entries of a column are valid. One thread adds, another reads."""

    def __init__(self) -> None:
        self.times: MutableSequence[float] = array("d")

    def stamp(self, time_s: float) -> None:
        """Add the time of an entry, after the entry: another thread counts the times. A clock set
        back must not make the newest entry unreachable."""
        self.times.append(max(time_s, self.times[-1]) if self.times else time_s)

    def count(self, time_s: float) -> int:
        """Return the number of entries valid at a time."""
        return bisect_right(self.times, time_s)


class Timed(Times, Generic[T]):
    """Values with the time from which each is valid."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.values: list[T] = []

    def add(self, time_s: float, value: T) -> None:
        self.values.append(value)
        self.stamp(time_s)

    def at(self, time_s: float) -> T | None:
        """Return the newest value at a time."""
        count = self.count(time_s)
        return self.values[count - 1] if count else None


class TimedLines(Times):
    """Lines with the time from which each is valid, compressed but for the newest block.

    One thread appends; others read what was there when they asked for the count.
    """

    def __init__(self, block: int = BLOCK) -> None:
        super().__init__()
        self._block = block
        self._packed: list[bytes] = []
        self._open: list[bytes] = []

    def add(self, time_s: float, line: bytes) -> None:
        self._open.append(line)
        if len(self._open) == self._block:
            # In this order: a reader finds each line in one of the two at any time.
            self._packed.append(pack(self._open))
            self._open = []
        self.stamp(time_s)

    def __getitem__(self, index: int) -> bytes:
        number, place = divmod(index, self._block)
        open_lines = self._open
        if number >= len(self._packed):
            return open_lines[place]
        return unpack(self._packed[number])[place]


def pack(lines: list[bytes]) -> bytes:
    return zlib.compress(b"\n".join(lines), 1)


def unpack(packed: bytes) -> list[bytes]:
    return zlib.decompress(packed).split(b"\n")
