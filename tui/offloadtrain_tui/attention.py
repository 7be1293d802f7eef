"""Notifications: an alert is raised, a run ends. Each is reported once."""

from __future__ import annotations

import html
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.log_reader import Snapshot
from offloadtrain_tui.text import clean

_LIMIT_S = 5.0
_ENDS = ("done", "stopped", "failed", "killed")


@dataclass(slots=True)
class Watched:
    """The last known state of each run. The state at the first complete reading is no news."""

    _previous: dict[Path | None, tuple[str, frozenset[str]]] = field(default_factory=dict)

    def news(self, snapshots: Sequence[Snapshot]) -> Iterator[tuple[str, str]]:
        """Yield (title, text) of what has happened since the last call."""
        for snapshot in snapshots:
            if not snapshot.is_complete:
                continue
            alerts = {alert.code: alert.message for alert in snapshot.first.active_alerts()}
            before = self._previous.get(snapshot.folder)
            self._previous[snapshot.folder] = snapshot.state, frozenset(alerts)
            if before is None:
                continue
            state, codes = before
            for code in alerts.keys() - codes:
                yield f"{clean(snapshot.name)}: {clean(code)}", clean(alerts[code], 200)
            if state in runs.ALIVE and snapshot.state in _ENDS:
                yield f"{clean(snapshot.name)}: {snapshot.state}", f"at step {snapshot.first.step}"


def desktop(title: str, text: str) -> None:
    """Show a desktop notification where `notify-send` is; blocks for at most seconds.

    A desktop reads the text as markup, so that it is escaped.
    """
    if (program := shutil.which("notify-send")) is None:
        return
    command = [program, "--app-name=offloadtrain", "--", title, html.escape(text)]
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return  # without a desktop, the bell and the screen have told
