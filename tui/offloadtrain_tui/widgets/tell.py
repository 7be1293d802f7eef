"""Text that is laid out again only if it changed."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static


def tell(widget: Static, text: Text | str) -> None:
    """Show a text; plain strings are no markup."""
    shown = Text(text) if isinstance(text, str) else text
    if widget.content != shown:
        widget.update(shown)
