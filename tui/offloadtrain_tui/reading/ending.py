"""How a run has ended, and how it goes on: duration, last checkpoint, steps lost, command."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from offloadtrain.boundary.safe_open import read_json
from offloadtrain.config import units
from offloadtrain.events.commands import resume_command
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import local_time

_CHECKPOINT = re.compile(r"step-\d{8,}")
_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run's newest start.

    Attributes:
        at_s: Unix time of its last record.
        lasted_s: seconds from its start to there; None: its start is not in the log.
        checkpoint: step of the newest checkpoint whose files have the sizes of its manifest; their
            bytes are verified when it is loaded. None: there is none.
        lost_steps: steps after the checkpoint, which a resume repeats.
        command: goes on from the checkpoint; a run that is done, to twice its steps. "": without a
            checkpoint.
        is_folder: a run folder, where checkpoints would be; False: a single log.
    """

    at_s: float
    lasted_s: float | None
    checkpoint: int | None = None
    lost_steps: int = 0
    command: str = ""
    is_folder: bool = True

    def words(self, now_s: float) -> str:
        """Return, for example, "11:52, after 34m12s"; of another day with the date."""
        day, then = (local_time(time_s, "%b %d ") for time_s in (now_s, self.at_s))
        spent = f", after {units.format_duration(self.lasted_s)}" if self.lasted_s else ""
        return f"{'' if day == then else then}{local_time(self.at_s, '%H:%M')}{spent}"

    @property
    def saved(self) -> str:
        """What is saved of it, such as "last checkpoint: step 480, 25 steps lost"."""
        if self.checkpoint is None:
            return "no checkpoint" if self.is_folder else ""
        steps = f"{self.lost_steps} step{'s' if self.lost_steps > 1 else ''} lost"
        return f"last checkpoint: step {self.checkpoint}" + (f", {steps}" * bool(self.lost_steps))

    @property
    def next(self) -> str:
        """The command that goes on, with its purpose; "" without one."""
        purpose = "train longer" if " --set train.steps=" in self.command else "resume"
        return f"{purpose}: {self.command}" if self.command else ""


def ending_of(folder: Path | None, view: View, state: str) -> Ending | None:
    """Return the end of a run in this state; None: it is alive, or not known to have ended."""
    if state not in ("done", "stopped", "failed", "killed") or not view.history.last_time_s:
        return None
    at_s, since_s, end = view.history.last_time_s, view.started_s, view.end
    lasted_s = None if since_s is None else at_s - since_s
    if end is not None and end.duration_s:
        lasted_s = end.duration_s
    if folder is None:
        return Ending(at_s, lasted_s, is_folder=False)
    if (step := newest_checkpoint(folder / "checkpoints")) is None:
        return Ending(at_s, lasted_s)
    total = view.total_steps or 0
    longer = 2 * total if state == "done" and view.step >= total else 0
    nearby = Path(os.path.relpath(folder))
    shortest = folder if ".." in nearby.parts else nearby  # a command that fits a line
    command = resume_command(shortest, view.start.nproc if view.start else 1, longer)
    return Ending(at_s, lasted_s, step, max(view.step - step, 0), command)


def newest_checkpoint(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in a folder whose files are all there."""
    with suppress(OSError):
        return _newest(folder, os.stat(folder).st_mtime_ns)
    return None


@lru_cache(maxsize=256)
def _newest(folder: Path, _changed_ns: int) -> int | None:
    """Look again only when a checkpoint has been added or removed."""
    names = filter(_CHECKPOINT.fullmatch, os.listdir(folder))
    steps = sorted(((int(name[5:]), name) for name in names), reverse=True)
    return next((step for step, name in steps if _is_whole(folder / name)), None)


def _is_whole(checkpoint: Path) -> bool:
    """Return whether every file that the manifest lists has its size."""
    try:
        files = read_json(checkpoint / "manifest.json", max_bytes=_MANIFEST_BYTES)["files"]
        return all(
            os.lstat(checkpoint / name).st_size == file["bytes"] for name, file in files.items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
