"""What all screens are."""

from __future__ import annotations

from textual.containers import Container

from offloadtrain_tui.view_state import ViewState


class Panel(Container):
    """A screen: shows what it is given."""

    DEFAULT_CSS = "Panel { height: 1fr; }"

    def show(self, shown: ViewState) -> None:
        """Only called while the panel is seen."""
        raise NotImplementedError
