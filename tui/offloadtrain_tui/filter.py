"""The last filter before the terminal, which leaves only printable text."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from offloadtrain.boundary.sanitize import one_line

_ASCII = str.maketrans(
    {
        **dict.fromkeys("█▉▊▋▌", "#"),
        **dict.fromkeys("▍▎▏", "|"),
        **dict.fromkeys("▁▂▃▄▅▆▇", "_"),
        **dict(zip("▓▒▚▞·", "%+&$.", strict=True)),
        **dict(zip("│┃─━╭╮╰╯", "||--++++", strict=True)),
        **dict(zip("●◐○✔■✖▾▸✗▲▼⚠◀▶", "*o.+#xv>x^v!<>", strict=True)),
        **dict(zip("→↓↑…°", ">v^~o", strict=True)),
    }
)


class Sanitized(LineFilter):
    """Replaces unprintable characters in every line of every widget.

    Textual sends the text of a widget unchanged, so an escape sequence in a name would reach the
    terminal. Panels also clean their texts, to keep columns aligned; this filter covers all texts.
    """

    def __init__(self, *, ascii_only: bool = False) -> None:
        """`ascii_only`: draw fills, lines and dots with ASCII characters."""
        super().__init__()
        self._ascii_only = ascii_only

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(segment.text.isprintable() for segment in segments) and not self._ascii_only:
            return segments
        return [
            segment if segment.control else Segment(self._shown(segment.text), segment.style)
            for segment in segments
        ]

    def _shown(self, text: str) -> str:
        return as_ascii(one_line(text)) if self._ascii_only else one_line(text)


def as_ascii(text: str) -> str:
    """Return a text of the same length: braille by its number of dots, unknown characters as
    "?"."""
    if text.isascii():
        return text
    return "".join(map(_plain, text.translate(_ASCII)))


def _plain(character: str) -> str:
    if character.isascii():
        return character
    if "\u2800" <= character <= "\u28ff":
        return " .::|||##"[(ord(character) & 0xFF).bit_count()]
    return "?"


def is_unicode(stream: TextIO | None) -> bool:
    """Return True if the stream can encode all characters; None: the stream that Textual draws
    to."""
    encoding = getattr(stream or sys.__stderr__, "encoding", None) or "utf-8"
    return encoding.lower().replace("-", "").startswith("utf")
