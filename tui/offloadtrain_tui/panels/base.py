"""The base of all screens."""

from __future__ import annotations

from textual.containers import Container

from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.styles import rich_color, shade


class Panel(Container):
    """A screen that displays a `ViewState`."""

    DEFAULT_CSS = "Panel { height: 1fr; }"

    def show(self, shown: ViewState) -> None:
        """Display the state; called only while the panel is visible."""
        raise NotImplementedError

    def ink(self, color: str) -> str:
        """Return Rich's name of a theme's color, for text in a table."""
        return rich_color(shade(self.app.theme_variables, color))
