"""The folder of one run: made, found, locked.

runs/<UTC time>-<name>/
    run.json            who started it: id, pid, host, command line, schema version
    job.toml            the job as given
    resolved.toml       the job as run
    lock                flock held for the run's life: who can take it knows the run is over
    events/rank000.jsonl
    checkpoints/
    control/            requests from outside (control.py)
runs/latest             → the newest
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offloadtrain.errors import OffloadTrainError
from offloadtrain.events import SCHEMA

_MODE = 0o700
_LOCK_TRIES, _LOCK_PAUSE_S = 5, 0.02


class RunFolderError(OffloadTrainError):
    """A run folder that cannot be made, found or locked."""


class RunFolder:
    """An open run folder; holds the lock until `close`.

    Attributes:
        path: the folder.
        run_id: its name, which holds the UTC time it was made and the job's name.
    """

    def __init__(self, path: Path) -> None:
        """Lock an existing folder.

        Raises:
            RunFolderError: it is no run folder, or a process is running in it.
        """
        if not (path / "events").is_dir():
            raise RunFolderError(f"{path} is no run folder: it has no folder events")
        self.path = path
        self.run_id = path.name
        self._lock = _lock(path / "lock")

    @classmethod
    def of_rank_0(cls, path: Path) -> RunFolder:
        """The folder that rank 0 of this job has locked, for another rank to write its log.

        Raises:
            RunFolderError: it is not there: the hosts share no file system at this path.
        """
        if not (path / "events").is_dir():
            raise RunFolderError(
                f"{path} is not on {socket.gethostname()}: all hosts of a job must see the run "
                "folder; set runs_dir to a file system that they share"
            )
        run = cls.__new__(cls)
        run.path, run.run_id, run._lock = path, path.name, -1
        return run

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def events(self, rank: int = 0) -> Path:
        """The event file of one rank."""
        return self.path / "events" / f"rank{rank:03d}.jsonl"

    def write_run(self, facts: Mapping[str, Any]) -> None:
        """Write run.json: what starts of this folder share, with `facts` added."""
        known = {
            "run_id": self.run_id,
            "schema": SCHEMA,
            "pid": os.getpid(),
            "pid_start_ticks": _start_ticks(),
            "host": socket.gethostname(),
            "argv": sys.argv,
            "started_s": time.time(),
        }
        _write(self.path / "run.json", json.dumps({**known, **facts}, indent=1, default=str) + "\n")

    def write_resolved(self, text: str) -> None:
        """Replace resolved.toml: a resume may change keys that do not make it another run."""
        _write(self.path / "resolved.toml", text)

    def close(self) -> None:
        """Let go of the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def create(
    runs_dir: Path, name: str, *, job: str, resolved: str, path: Path | None = None
) -> RunFolder:
    """Make a new run folder and point runs_dir/latest to it, if it lies there.

    Args:
        job: text of the job as given.
        resolved: text of the job as run.
        path: the folder to make; default: runs_dir/<UTC time>-<name>.

    Raises:
        RunFolderError: `path` holds a run already, or cannot be made.
    """
    try:
        folder = _make(path) if path is not None else _make_dated(runs_dir, name)
        for child in ("events", "checkpoints"):
            (folder / child).mkdir(mode=_MODE, exist_ok=True)
        run = RunFolder(folder)  # before the first file: another start may be at work in `path`
        with ExitStack() as on_failure:
            on_failure.callback(run.close)
            _write(folder / "job.toml", job)
            _write(folder / "resolved.toml", resolved)
            if folder.parent.resolve() == runs_dir.resolve():
                _point_latest(folder)
            on_failure.pop_all()
    except OSError as error:
        where = f"{path or runs_dir}: {error.strerror}"
        raise RunFolderError(f"the run folder cannot be made at {where}") from error
    return run


def newest(runs_dir: Path, name: str) -> Path | None:
    """The newest run folder of the job `name`, or None."""
    form = re.compile(rf"(\d{{8}}-\d{{6}})-{re.escape(name)}(?:\+(\d+))?")
    found = [(form.fullmatch(path.name), path) for path in runs_dir.glob("*-*") if path.is_dir()]
    dated = [(match[1], int(match[2] or 0), path) for match, path in found if match]
    return max(dated)[2] if dated else None


def _make_dated(runs_dir: Path, name: str) -> Path:
    """Make <date>-<time>-<name>; "+1" follows, which no name ends in, if the second is taken."""
    stem = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}"
    for suffix in ("", *(f"+{i}" for i in range(1, 100))):
        with suppress(FileExistsError):
            path = runs_dir / f"{stem}{suffix}"
            path.mkdir(mode=_MODE, parents=True)
            return path
    raise RunFolderError(f"{runs_dir / stem} and 99 names like it are taken")


def _make(path: Path) -> Path:
    if (path / "run.json").exists():
        raise RunFolderError(f"{path} holds a run already: resume it with --resume {path}")
    path.mkdir(mode=_MODE, parents=True, exist_ok=True)
    return path


def _lock(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunFolderError(f"{path.parent} is no run folder: {error.strerror}") from error
    if not _taken(fd):
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise RunFolderError(
            f"{path.parent} is already running, pid {owner}: stop it, or take another --run-dir"
        )
    os.truncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _taken(fd: int) -> bool:
    """Take the lock; tried a few times, because who looks at it holds it for microseconds."""
    for _ in range(_LOCK_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOCK_PAUSE_S)
    return False


def _point_latest(folder: Path) -> None:
    """Replace the link in one rename, so that a reader never finds it missing."""
    link, fresh = folder.parent / "latest", folder.parent / f".latest-{folder.name}"
    if link.exists() and not link.is_symlink():
        return  # somebody's own file of that name
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.replace(link)


def _write(path: Path, text: str) -> None:
    """Write the whole file or nothing, for its owner alone."""
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)


def _start_ticks() -> int:
    """When this process began, in clock ticks since boot: a pid may be somebody else's later."""
    stat = Path("/proc/self/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])
