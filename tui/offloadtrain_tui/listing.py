"""The list of a folder's runs, from the ends of their logs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offloadtrain_tui import runs
from offloadtrain_tui.history import History, View
from offloadtrain_tui.log_reader import glance


@dataclass(frozen=True, slots=True)
class RunRow:
    """A row of the list; None: not in the log."""

    folder: Path
    state: str
    step: int
    total: int | None
    loss: float | None
    val_loss: float | None
    tokens_per_s: float | None
    last_s: float | None


def list_runs(runs_dir: Path, now_s: float, most: int = 200) -> list[RunRow]:
    """Return the runs of a folder, the newest first."""
    return [row_of(folder, now_s) for folder in runs.all_runs(runs_dir)[:most]]


def row_of(folder: Path, now_s: float) -> RunRow:
    """Build a row from the first and the last records of rank 0."""
    logs = runs.open_run(folder).logs
    view = View.at(glance(logs[0]) if logs else History())
    return RunRow(
        folder=folder,
        state=runs.state_of(view, runs.is_alive(folder), now_s),
        step=view.step,
        total=view.total_steps,
        loss=view.last("loss"),
        val_loss=view.val_loss,
        tokens_per_s=view.last("tokens_per_s"),
        last_s=view.step_time_s,
    )
