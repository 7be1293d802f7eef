"""Requests to a run: dialogs, and a file in the run's folder."""

from __future__ import annotations

from textual.app import App
from textual.notifications import SeverityLevel

from offloadtrain_tui import requests, runs
from offloadtrain_tui.dialogs import Ask, Confirm
from offloadtrain_tui.text import clean
from offloadtrain_tui.view_state import ViewState


class RunActions(App[None]):
    """The part of the monitor that writes: requests confirmed by the user."""

    shown: ViewState

    def tell(self, text: str, severity: SeverityLevel = "information") -> None:
        """Show a notice for a moment; names and messages in it are no markup."""
        self.notify(clean(text, 300), severity=severity, markup=False)

    def action_checkpoint(self) -> None:
        self._request("save a checkpoint after this step?", {"checkpoint": "save"})

    def action_stop(self) -> None:
        choices = {"stop": "stop after this step, with a checkpoint", "abort": "abort, without"}
        self._request("end the run?", choices)

    def action_note(self) -> None:
        def send(text: str | None) -> None:
            if text:
                self._send("note", text)

        if self._may_ask():
            self.push_screen(Ask("a note for the run's log"), send)

    def action_acknowledge(self) -> None:
        alerts = self.shown.view.active_alerts()
        if alerts and self._may_ask():
            self._send("acknowledge", alerts[-1].code)

    def _request(self, question: str, choices: dict[str, str]) -> None:
        def send(answer: str | None) -> None:
            if answer:
                self._send(answer)

        if self._may_ask():
            name = self.shown.snapshot.name
            self.push_screen(Confirm(f"{name}: {question}", choices), send)

    def _may_ask(self) -> bool:
        snapshot = self.shown.snapshot
        if self.shown.readonly:
            self.tell("--readonly: requests are disabled", "warning")
        elif snapshot.folder is None or snapshot.state not in runs.ALIVE:
            self.tell(f"the run is not running ({snapshot.state})", "warning")
        else:
            return True
        return False

    def _send(self, action: str, message: str = "") -> None:
        folder = self.shown.snapshot.folder
        if folder is None:
            return
        try:
            requests.write(folder, action, message)
        except requests.RequestError as error:
            self.tell(str(error), "error")
        else:
            self.tell(f"{action}: requested; the answer appears as an event")
