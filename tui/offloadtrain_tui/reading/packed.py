"""Lines of a log, compressed by the block: samples of a long run take little memory."""

from __future__ import annotations

import zlib

from offloadtrain_tui.reading.timed import Times

BLOCK = 256
"""Lines of a block; JSON of one kind shrinks to a tenth or less."""


class PackedLines:
    """A list of lines that only grows. The newest block is kept as it is.

    One thread appends; others read what was there when they asked for the length.
    """

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._packed: list[bytes] = []
        self._open: list[bytes] = []
        self._unpacked: tuple[int, list[bytes]] = (-1, [])

    def __len__(self) -> int:
        return len(self._packed) * self._block + len(self._open)

    def append(self, line: bytes) -> None:
        self._open.append(line)
        if len(self._open) == self._block:
            # In this order: a reader finds each line in one of the two at any time.
            full, packed = self._open, pack(self._open)
            self._packed.append(packed)
            self._unpacked = (len(self._packed) - 1, full)
            self._open = []

    def __getitem__(self, index: int) -> bytes:
        number, place = divmod(index, self._block)
        open_lines = self._open
        if number >= len(self._packed):
            return open_lines[place]
        known, lines = self._unpacked
        if known != number:
            lines = unpack(self._packed[number])
            self._unpacked = (number, lines)
        return lines[place]


class TimedLines(Times):
    """Packed lines with the time from which each is valid."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = PackedLines()

    def add(self, time_s: float, line: bytes) -> None:
        self._lines.append(line)
        self.stamp(time_s)

    def __getitem__(self, index: int) -> bytes:
        return self._lines[index]


def pack(lines: list[bytes]) -> bytes:
    return zlib.compress(b"\n".join(lines), 1)


def unpack(packed: bytes) -> list[bytes]:
    return zlib.decompress(packed).split(b"\n")
