"""The list of a folder's runs, from the ends of their logs."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from offloadtrain.config import units
from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.history import History
from offloadtrain_tui.reading.log_reader import glance
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import clean, short

COLUMNS = ("run", "state", "step", "loss", "val", "tok/s", "ran", "last step")


@dataclass(frozen=True, slots=True)
class RunRow:
    """A row of the list; None: not in the log.

    Attributes:
        ending: how it has ended; None: it is alive, or not known to have ended.
    """

    folder: Path
    state: str
    step: int
    total: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_s: float | None
    last_s: float | None
    ending: runs.Ending | None = None

    def cells(self, now_s: float) -> tuple[str, ...]:
        """Return a text for each of `COLUMNS`; "-": not known."""
        lasted_s = self.ending.lasted_s if self.ending else None
        age_s = None if self.last_s is None else max(now_s - self.last_s, 0.0)
        return (
            clean(self.folder.name),
            self.state,
            f"{self.step}/{self.total}" if self.total else str(self.step),
            *map(short, (self.loss, self.val_loss, self.tokens_per_s)),
            "-" if lasted_s is None else units.format_duration(lasted_s),
            "-" if age_s is None else f"{units.format_duration(age_s)} ago",
        )


@dataclass(slots=True)
class Listing:
    """The runs of a folder, and others by name; of a log that has not grown, nothing is read
    again."""

    runs_dir: Path
    named: tuple[Path, ...] = ()
    _views: dict[Path, tuple[tuple[int, int], View]] = field(default_factory=dict)

    def rows(self, now_s: float, most: int = 200) -> list[RunRow]:
        """Return the named runs, then those of the folder, the newest first."""
        there = runs.all_runs(self.runs_dir)[:most]
        listed = {path.resolve() for path in there} if self.named else set()
        folders = [path for path in self.named if path.resolve() not in listed] + there
        self._views = {folder: self._read(folder) for folder in folders}
        return [_row(folder, view, now_s) for folder, (_, view) in self._views.items()]

    def _read(self, folder: Path) -> tuple[tuple[int, int], View]:
        """Return the first and the last records of rank 0, with the log's size and time."""
        logs = runs.open_run(folder).logs
        stamp = (0, 0)
        with suppress(OSError):
            status = os.lstat(logs[0]) if logs else None
            stamp = (status.st_size, status.st_mtime_ns) if status else stamp
        known = self._views.get(folder)
        if known is not None and known[0] == stamp:
            return known
        return stamp, View.at(glance(logs[0]) if logs else History())


def _row(folder: Path, view: View, now_s: float) -> RunRow:
    state = runs.life_of(folder, view, now_s).state
    return RunRow(
        folder=folder,
        state=state,
        step=view.step,
        total=view.total_steps,
        loss=view.last("loss"),
        val_loss=view.val_loss,
        tokens_per_s=view.last("tokens_per_s"),
        last_s=view.step_time_s,
        ending=runs.ending_of(folder, view, state),
    )


def list_runs(runs_dir: Path, now_s: float) -> list[RunRow]:
    """Return the runs of a folder, the newest first."""
    return Listing(runs_dir).rows(now_s)
