"""Dialogs: questions and long texts."""

from __future__ import annotations

import json
from typing import ClassVar

from rich.syntax import Syntax
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from offloadtrain_tui.reading.history import Moment
from offloadtrain_tui.text import clean


class Ask(ModalScreen[str]):
    """A dialog with one line of input; its result is "" if it was cancelled."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss('')", "cancel")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, markup=False)
            yield Input()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class Confirm(Ask):
    """A dialog with buttons; its result is the name of the chosen button, "" if it was
    cancelled."""

    AUTO_FOCUS = "#cancel"

    def __init__(self, question: str, choices: dict[str, str]) -> None:
        """`choices`: answer → button text; the first choice should be the least harmful."""
        super().__init__(question)
        self._choices = choices

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, markup=False)
            with Horizontal():
                for answer, text in self._choices.items():
                    danger = answer in ("stop", "abort")
                    yield Button(text, id=answer, variant="error" if danger else "primary")
                yield Button("cancel", id="cancel")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss("" if event.button.id == "cancel" else event.button.id or "")


class Page(ModalScreen[None]):
    """A dialog with texts that can be scrolled."""

    AUTO_FOCUS = "VerticalScroll"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,question_mark,q", "dismiss", "close")
    ]

    def __init__(self, *texts: Text | Syntax) -> None:
        super().__init__()
        self._texts = texts

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog wide"):
            yield from map(Static, self._texts)


def record_page(moment: Moment) -> Page:
    """Return a page with the raw record of an event."""
    title = Text(f"{moment.kind}, rank {moment.rank}", "bold")
    return Page(title, Syntax(pretty(moment.raw), "json", word_wrap=True))


def pretty(raw: bytes) -> str:
    """Return JSON in several lines, other data unchanged."""
    try:
        text = json.dumps(json.loads(raw), indent=2, ensure_ascii=True)
    except (ValueError, RecursionError):
        text = raw.decode(errors="replace")
    return "\n".join(clean(line, 4000) for line in text[:200_000].splitlines())
