"""Text that is drawn only if it changed, and laid out again only if it may need other lines."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static


def tell(widget: Static, text: Text | str) -> None:
    """Show a text; plain strings are no markup."""
    shown, before = Text(text) if isinstance(text, str) else text, widget.content
    if before != shown:
        widget.update(shown, layout=not _same_lines(before, shown, widget.content_size.width))


def _same_lines(before: object, shown: Text, width: int) -> bool:
    """Return whether both texts have the same number of lines, and no line wraps at this width. A
    layout of the screen takes longer than drawing it."""
    if not isinstance(before, Text) or before.plain.count("\n") != shown.plain.count("\n"):
        return False
    lines = (line for text in (before, shown) for line in text.split("\n", allow_blank=True))
    return all(line.cell_len <= width for line in lines)
