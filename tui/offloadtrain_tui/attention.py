"""News: an alert is raised, a run ends. Each is reported once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.log_reader import Snapshot

_ENDS = ("done", "stopped", "failed", "killed")


@dataclass(slots=True)
class Watched:
    """The last known state of each run. The state at the first complete reading is no news."""

    _previous: dict[Path | None, tuple[str, frozenset[str]]] = field(default_factory=dict)

    def news(self, snapshots: Sequence[Snapshot]) -> int:
        """Return the number of alerts that were raised and runs that ended since the last call."""
        count = 0
        for snapshot in snapshots:
            if not snapshot.is_complete:
                continue
            codes = frozenset(alert.code for alert in snapshot.first.active_alerts())
            before = self._previous.get(snapshot.folder)
            self._previous[snapshot.folder] = snapshot.state, codes
            if before is not None:
                state, known = before
                count += len(codes - known) + (state in runs.ALIVE and snapshot.state in _ENDS)
        return count
