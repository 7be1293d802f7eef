"""Files that the monitor writes for the user: requests to a run, and exports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from textual.notifications import SeverityLevel

from offloadtrain.boundary.safe_write import replace_file
from offloadtrain_tui import exports, labels, requests
from offloadtrain_tui.dialogs import Ask, Confirm
from offloadtrain_tui.display import Display
from offloadtrain_tui.panels.runs import RunsPanel
from offloadtrain_tui.plots import KINDS
from offloadtrain_tui.reading import runs
from offloadtrain_tui.view_state import ViewState

_CHARTS = ", ".join(KINDS)
_FORMS: dict[str, Callable[[str, ViewState], str | bytes]] = {
    ".csv": exports.as_csv,
    ".svg": exports.as_svg,
    ".png": exports.as_png,
}


class RunActions(Display):
    """The part of the monitor that writes: requests confirmed by the user, exports."""

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

    def on_runs_panel_pinned(self, message: RunsPanel.Pinned) -> None:
        """Pin a run, or unpin it; the list shows it when it is read again."""
        row = message.row
        if self.shown.readonly:
            self.tell("--readonly: nothing is written", "warning")
            return
        pinned = not row.labels.pinned
        try:
            labels.write(row.folder, replace(row.labels, pinned=pinned))
        except OSError as error:
            self.tell(f"{row.folder}/labels.json cannot be written: {error.strerror}", "error")
        else:
            self.tell(f"{row.folder.name}: {'pinned' if pinned else 'no longer pinned'}")

    # ---- exports

    def action_export(self) -> None:
        """Export the sampled steps as a Chrome trace, with the trace command."""
        folder = self.shown.snapshot.folder
        if folder is None or self.shown.readonly:
            why = "--readonly: nothing is written" if folder else "only run folders are exported"
            self.tell(why, "warning")
            return

        def export() -> None:
            command = [sys.executable, "-m", "offloadtrain", "trace", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            failed = done.returncode != 0
            text = done.stderr if failed else f"{done.stdout.strip()}: for ui.perfetto.dev"
            level: SeverityLevel = "error" if failed else "information"
            self.call_from_thread(self.tell, text.strip(), level)

        self.run_worker(export, thread=True, group="export", exit_on_error=False)

    def action_chart_file(self) -> None:
        """Write a chart as a file whose name says which, and how."""

        def write(answer: str | None) -> None:
            if answer:
                self._write_chart(Path(answer).expanduser())

        if self.shown.readonly:
            self.tell("--readonly: nothing is written", "warning")
        else:
            self.push_screen(
                Ask(f"chart, as .csv, .svg or .png, such as loss.csv: {_CHARTS}"), write
            )

    def _write_chart(self, path: Path) -> None:
        if path.stem not in KINDS or path.suffix not in _FORMS:
            known = ", ".join(_FORMS)
            self.tell(f"{path.name}: give a chart's name and {known}: {_CHARTS}", "warning")
            return
        if path.exists():
            self.tell(f"{path} exists: it is left as it is", "warning")
            return
        try:
            replace_file(path, _FORMS[path.suffix](path.stem, self.shown))
        except ImportError:
            self.tell("a .png needs Pillow: pip install 'offloadtrain[plots]'", "error")
        except OSError as error:
            self.tell(f"{path} cannot be written: {error.strerror}", "error")
        else:
            self.tell(f"saved {path.absolute()}")

    def action_copy(self) -> None:
        """Copy a chart's numbers to the terminal's clipboard, by OSC 52."""

        def copy(answer: str | None) -> None:
            if answer in KINDS:
                self.copy_to_clipboard(exports.as_csv(answer, self.shown))
                self.tell(f"{answer}: copied as CSV, if the terminal allows it")
            elif answer:
                self.tell(f"{answer}: give a chart's name: {_CHARTS}", "warning")

        self.push_screen(Ask(f"copy the numbers of a chart: {_CHARTS}"), copy)
