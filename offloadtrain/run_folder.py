"""The folder of one run: made, found, locked.

runs/<UTC time>-<name>/
    run.json            who started it: id, pid, host, command line, schema version
    job.toml            the job as given
    resolved.toml       the job as run
    lock                flock held for the run's life: who can take it knows the run is over
    events/rank000.jsonl
    checkpoints/
runs/latest             → the newest
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offloadtrain.errors import OffloadTrainError
from offloadtrain.events import SCHEMA

_MODE = 0o700


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
        self.path = path
        self.run_id = path.name
        self._lock = _lock(path / "lock")

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
    """Make a new run folder and point `latest` to it.

    Args:
        job: text of the job as given.
        resolved: text of the job as run.
        path: the folder to make; default: runs_dir/<UTC time>-<name>.

    Raises:
        RunFolderError: `path` holds a run already, or cannot be made.
    """
    folder = _make(path) if path is not None else _make_dated(runs_dir, name)
    for child in ("events", "checkpoints"):
        (folder / child).mkdir(mode=_MODE, exist_ok=True)
    _write(folder / "job.toml", job)
    _write(folder / "resolved.toml", resolved)
    run = RunFolder(folder)
    _point_latest(folder)
    return run


def newest(runs_dir: Path, name: str) -> Path | None:
    """The newest run folder of the job `name`, or None."""
    found = [p for p in runs_dir.glob(f"*-{name}*") if p.is_dir() and _is_of(p.name, name)]
    return max(found, key=lambda p: p.name, default=None)


def is_running(path: Path) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        fd = os.open(path / "lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_of(folder: str, name: str) -> bool:
    """<date>-<time>-<name>, with a number behind it if the second was taken."""
    rest = folder.split("-", 2)[-1]
    return rest == name or (rest.startswith(f"{name}.") and rest[len(name) + 1 :].isdigit())


def _make_dated(runs_dir: Path, name: str) -> Path:
    stem = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}"
    for suffix in ("", *(f".{i}" for i in range(1, 100))):
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
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise RunFolderError(
            f"{path.parent} is already running (pid {owner}): stop it, or take another --run-dir"
        ) from None
    os.truncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _point_latest(folder: Path) -> None:
    """Replace the link in one rename, so that a reader never finds it missing."""
    link, fresh = folder.parent / "latest", folder.parent / f".latest-{os.getpid()}"
    if link.exists() and not link.is_symlink():
        return  # somebody's own file of that name
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.replace(link)


def _write(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.tmp")
    fresh.write_text(text)
    fresh.replace(path)


def _start_ticks() -> int:
    """When this process began, in clock ticks since boot: a pid may be somebody else's later."""
    stat = Path("/proc/self/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])
