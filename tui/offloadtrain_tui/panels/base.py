"""Base classes of all screens."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Container

from offloadtrain_tui.reading.view import View
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.drawn import rich_color, shade


class Panel(Container):
    """A screen that displays a `ViewState`."""

    DEFAULT_CSS = "Panel { height: 1fr; }"

    shown: ViewState | None = None
    """The last displayed state."""

    def show(self, shown: ViewState) -> None:
        """Display a state; called only while the panel is visible."""
        self.shown = shown
        self.display_state(shown)

    def show_again(self) -> None:
        """Display the last state again, after a setting of the panel has changed."""
        if self.shown is not None:
            self.show(self.shown)

    def display_state(self, shown: ViewState) -> None:
        raise NotImplementedError

    def ink(self, color: str) -> str:
        """Return Rich's name of a theme color, for text in a table."""
        return rich_color(shade(self.app.theme_variables, color))


class RankPanel(Panel):
    """A screen that shows one rank at a time; `v` selects the next rank."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("v", "next_rank", "next rank", show=False)]

    _rank = 0

    def action_next_rank(self) -> None:
        self._rank += 1
        self.show_again()

    def view_of_rank(self, shown: ViewState) -> View:
        return shown.views[self._rank % len(shown.views)]
