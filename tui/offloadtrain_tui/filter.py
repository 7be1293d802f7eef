"""The last thing before the terminal: what is drawn, whoever drew it, is printable text."""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from offloadtrain.boundary.sanitize import one_line


class Sanitized(LineFilter):
    """Replaces what is unprintable in every line of every widget.

    Textual sends the text of a widget as it is, so an escape sequence in a name would reach the
    terminal. Panels clean their texts as well, to keep columns straight; this one forgets none.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(one.text.isprintable() for one in segments):
            return segments
        return [one if one.control else Segment(one_line(one.text), one.style) for one in segments]
