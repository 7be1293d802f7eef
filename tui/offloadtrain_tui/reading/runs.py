"""Run folders: finding runs, the state of their processes, and how they have ended.

A run folder is untrusted data: nothing in it is executed, and links out of it are not followed.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import open_regular, read_json, read_regular
from offloadtrain.config import units
from offloadtrain.config.errors import InputError
from offloadtrain.events import set_up_file
from offloadtrain.events.commands import resume_command
from offloadtrain.events.set_up_file import SetUpNow
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.text import local_time

SLOW_S, SLOW_FACTOR = 30.0, 4.0
"""A run is slow after both this time and this multiple of its median step without a step."""

SILENT_S = 60.0
"""A run on another host, whose lock cannot be checked, is unknown after this silence, in
seconds."""

_RUN_JSON_BYTES = 1 << 20
_LOCK_BYTES = 32
_CHECKPOINT = re.compile(r"step-\d{8,}")
_MANIFEST_BYTES = 64 << 20

ALIVE = ("starting", "running", "slow")
ENDED = ("done", "stopped", "failed", "killed")
STATES = (*ALIVE, *ENDED, "unknown")


class RunError(InputError):
    """The argument is not a run."""


@dataclass(frozen=True, slots=True)
class RunPath:
    """A run folder, or a single log."""

    folder: Path | None
    logs: tuple[Path, ...]

    @property
    def path(self) -> Path:
        return self.folder or self.logs[0]

    @property
    def name(self) -> str:
        return self.path.name


def find(arguments: list[Path], runs_dir: Path = Path("runs")) -> list[RunPath]:
    """Return the requested runs; without arguments the newest run in `runs_dir`, or [].

    Args:
        arguments: run folders, folders of runs (selects the newest), or event files.

    Raises:
        RunError: an argument is none of these.
    """
    if not arguments:
        return [open_run(path) for path in all_runs(runs_dir)[:1]]
    return [_named(path) for path in arguments]


def all_runs(runs_dir: Path) -> list[Path]:
    """Return the run folders in a folder, the newest first."""
    with suppress(OSError):
        folders = [
            path for path in runs_dir.resolve().iterdir() if is_run(path) and not path.is_symlink()
        ]
        return sorted(folders, key=lambda path: (_started_s(path), path.name), reverse=True)
    return []


def _started_s(folder: Path) -> float:
    """Return the Unix time of a run's start: the time in its name (UTC), else the modification time
    of run.json, which each start writes; 0 without both."""
    with suppress(ValueError):
        return datetime.strptime(f"{folder.name[:15]}+0000", "%Y%m%d-%H%M%S%z").timestamp()
    with suppress(OSError):
        return os.lstat(folder / "run.json").st_mtime
    return 0.0


def is_run(path: Path) -> bool:
    events = path / "events"
    return os.path.isdir(events) and not os.path.islink(events)


def open_run(path: Path) -> RunPath:
    return RunPath(path, tuple(sorted((path / "events").glob("rank*.jsonl"))))


def _named(path: Path) -> RunPath:
    if os.path.isfile(path):  # Path.is_file raises for some names
        return RunPath(None, (path.resolve(),))  # links named by the user may be followed
    if is_run(path):
        return open_run(path.resolve())
    if newest := all_runs(path)[:1]:
        return open_run(newest[0])
    what = "a folder without runs" if os.path.isdir(path) else "not there"
    raise RunError(
        f"{path} is {what}: give a run folder (with events/rank000.jsonl), a folder of runs, or an "
        "event file"
    )


def facts(folder: Path | None) -> dict[str, Any]:
    """Return the contents of run.json; {} if it cannot be read."""
    if folder is None:
        return {}
    with suppress(OSError):
        values = read_json(folder / "run.json", max_bytes=_RUN_JSON_BYTES)
        return values if isinstance(values, dict) else {}
    return {}


@dataclass(frozen=True, slots=True)
class Life:
    """The state of a run and of its process.

    Attributes:
        alive: True if the process is alive; None if unknown on this host.
        set_up: progress of a set-up that has not ended; None after set-up.
    """

    state: str
    alive: bool | None
    set_up: SetUpNow | None = None


def life_of(folder: Path | None, view: View, now_s: float, silent_s: float | None = None) -> Life:
    """Return the state of a run and of its process, from its files and its lock.

    Args:
        silent_s: seconds since the reader got a new record of a run on another host, whose clock
            may differ; None: use the times in its log.
    """
    set_up = None if folder is None else set_up_file.read(folder)
    alive = is_alive(folder) if set_up is None else _sets_up(folder, set_up)
    if set_up is not None and (alive or (alive is None and now_s - set_up.time_s < SILENT_S)):
        return Life("starting", alive, set_up)
    if set_up is not None and alive is False and (now := is_alive(folder)) is not False:
        return Life("starting", now)  # a newer start that has not written its set-up file yet
    if set_up is not None:
        return Life("unknown" if alive is None else "killed", alive, set_up)
    if folder is not None and alive:
        pid, owner = facts(folder).get("pid"), _owner(folder / "lock")
        if isinstance(pid, int) and owner not in (None, pid):
            return Life("starting", alive)  # a new process that has not written run.json yet
    return Life(state_of(view, alive, now_s, silent_s if alive is None else None), alive)


def _sets_up(folder: Path | None, now: SetUpNow) -> bool | None:
    """Return True if the process that sets up the run is alive; None if unknown on this host."""
    if folder is None or now.host != socket.gethostname():
        return None
    return _is_locked(folder / "lock") and _runs(now.pid, now.pid_start_ticks)


def is_alive(folder: Path | None) -> bool | None:
    """Return True if the run's process is alive; None if unknown on this host.

    The lock alone is not sufficient: a forked child keeps the lock of a killed owner. So the pid
    and the start time in run.json must also match a process on this machine.
    """
    if folder is None:
        return None
    known = facts(folder)
    if known.get("host") not in (None, socket.gethostname()):
        return None
    if not _is_locked(folder / "lock"):
        return False
    pid, ticks = known.get("pid"), known.get("pid_start_ticks")
    if not isinstance(pid, int) or not isinstance(ticks, int):
        return True  # locked by a process that has not written run.json yet
    return _runs(pid, ticks) or _owner(folder / "lock") not in (None, pid)


def state_of(view: View, alive: bool | None, now_s: float, silent_s: float | None = None) -> str:
    """Return one of `STATES` for a run, from its log and its lock."""
    if view.end is not None:
        return view.end.status if view.end.status in STATES else "failed"
    if alive is False:
        return "killed" if view.start is not None else "failed"
    is_new = view.is_before_first_step
    heard_s = view.started_s if is_new else view.step_time_s
    if silent_s is None:
        silent_s = now_s - (heard_s or view.history.last_time_s or now_s)
    if alive is None and silent_s > _patience_s(view, SILENT_S):
        return "unknown"
    if is_new:
        return "starting"
    return "slow" if silent_s > _patience_s(view, SLOW_S) else "running"


def _patience_s(view: View, least_s: float) -> float:
    return max(least_s, SLOW_FACTOR * (view.median_step_ms() or 0.0) / 1e3)


def _is_locked(path: Path) -> bool:
    try:
        with open_regular(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _owner(lock: Path) -> int | None:
    """Return the pid of the lock's last owner."""
    with suppress(OSError, ValueError):
        return int(read_regular(lock, max_bytes=_LOCK_BYTES))
    return None


def _runs(pid: int, start_ticks: int) -> bool:
    """Return True if this process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    state, *rest = stat.rpartition(")")[2].split()
    return state not in ("Z", "X") and len(rest) > 18 and rest[18] == str(start_ticks)


# ---- endings


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run's newest start.

    Attributes:
        at_s: Unix time of its last record.
        lasted_s: seconds from its start to its last record; None if the start is not in the log.
        checkpoint: step of the newest checkpoint whose files have the sizes in its manifest (bytes
            are verified when it is loaded); None without one.
        lost_steps: number of steps after the checkpoint, which a resume repeats.
        command: command that resumes from the checkpoint; for a completed run, with twice its
            steps. "" without a checkpoint.
        is_folder: True for a run folder, which may contain checkpoints; False for a single log.
    """

    at_s: float
    lasted_s: float | None
    checkpoint: int | None = None
    lost_steps: int = 0
    command: str = ""
    is_folder: bool = True

    def words(self, now_s: float) -> str:
        """Return, for example, "11:52, after 34m12s", with the date if it was on another day."""
        day, then = (local_time(time_s, "%b %d ") for time_s in (now_s, self.at_s))
        spent = f", after {units.format_duration(self.lasted_s)}" if self.lasted_s else ""
        return f"{'' if day == then else then}{local_time(self.at_s, '%H:%M')}{spent}"

    @property
    def saved(self) -> str:
        """Text about the newest checkpoint, such as "last checkpoint: step 480, 25 steps lost"."""
        if self.checkpoint is None:
            return "no checkpoint" if self.is_folder else ""
        steps = f"{self.lost_steps} step{'s' if self.lost_steps > 1 else ''} lost"
        return f"last checkpoint: step {self.checkpoint}" + (f", {steps}" * bool(self.lost_steps))

    @property
    def next(self) -> str:
        """The command that continues the run, with its purpose; "" without a command."""
        purpose = "train longer" if " --set train.steps=" in self.command else "resume"
        return f"{purpose}: {self.command}" if self.command else ""


def ending_of(folder: Path | None, view: View, state: str) -> Ending | None:
    """Return how a run in this state has ended; None if it is alive or its end is unknown."""
    if state not in ENDED or not view.history.last_time_s:
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
    """Return the step of the newest complete checkpoint in a folder; None without one."""
    with suppress(OSError):
        return _newest(folder, os.stat(folder).st_mtime_ns)
    return None


@lru_cache(maxsize=256)
def _newest(folder: Path, _changed_ns: int) -> int | None:
    """Cached until the folder changes, that is, a checkpoint is added or removed."""
    names = filter(_CHECKPOINT.fullmatch, os.listdir(folder))
    steps = sorted(((int(name[5:]), name) for name in names), reverse=True)
    return next((step for step, name in steps if _is_whole(folder / name)), None)


def _is_whole(checkpoint: Path) -> bool:
    """Return True if every file in the manifest has the listed size."""
    try:
        files = read_json(checkpoint / "manifest.json", max_bytes=_MANIFEST_BYTES)["files"]
        return all(
            os.lstat(checkpoint / name).st_size == file["bytes"] for name, file in files.items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
