"""The folder of one run: creates, finds and locks it, and chooses between a new run and a resume.

runs/<UTC time>-<name>/
    run.json            its process: id, pid, host, command line, schema version
    job.toml            the job as written by the user
    resolved.toml       the job with all decisions, as run
    lock                locked (flock) while the run's process lives
    set_up.json         state of the set-up until the log begins (events/set_up_file.py)
    events/rank000.jsonl                  the log
    checkpoints/
    control/            requests from outside (control.py)
    metrics.csv, metrics.jsonl, tensorboard/, wandb/    for other tools, if requested (loggers.py)
runs/latest             → the newest run that has completed a step
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import open_descriptor
from offloadtrain.boundary.safe_write import own_folder, replace_file
from offloadtrain.config.errors import ConfigError, InputError, OffloadTrainError
from offloadtrain.config.job import Config
from offloadtrain.config.offload import Precision
from offloadtrain.events import set_up_file
from offloadtrain.events.schema import SCHEMA
from offloadtrain.hardware.atomic_io import sync_folder
from offloadtrain.hardware.file_system import is_at, lock, take
from offloadtrain.runtime.process_group import ALONE, Ranks
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.checkpoint import Checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError, DamagedCheckpointError
from offloadtrain.train.saved_state import require_run_state

_MODE = 0o700
_FOLDERS = ("events", "checkpoints", "control", "tensorboard", "wandb")
_CONTENT = (
    *("lock", "run.json", "job.toml", "resolved.toml", "metrics.csv", "metrics.jsonl"),
    set_up_file.FILE,
    *_FOLDERS,
)
_NO_TIME = "00000000-000000"


class RunFolderError(InputError):
    """The run folder cannot be created, found or locked."""


class RunFolder:
    """A run folder. It is locked until `close`.

    [Note: Nothing before it begins]
    A start may fail for many reasons: another model, no memory, no data. An existing folder
    is therefore only locked until `begin`; `announce` creates a new one, which contains only the
    state of the set-up. `close` removes what both have created unless there is a step or a
    checkpoint (`keep`); only then does runs_dir/latest point to it. A kill at the wrong moment can
    leave a folder without either; `open_run` skips it.

    Attributes:
        path: the folder; `announce` may change the name of a new run if it is taken by then.
        run_id: name of the folder, which contains the UTC time of creation and the job's name.
    """

    def __init__(self, path: Path, *, exists: bool = True) -> None:
        """Lock an existing folder.

        Args:
            exists: False if the folder is created later, or created and locked by another rank.

        Raises:
            RunFolderError: it is not a run folder, or another process is running in it.
        """
        self.path, self._runs_dir = path, path.parent
        self._lock = -1
        self._is_new = self._is_dated = self._is_permanent = False
        self._made: list[Path] = []
        if not exists:
            return
        if not ((path / "events").is_dir() or holds_run(path) or _has_checkpoint(path)):
            raise RunFolderError(
                f"{path} is not a run folder: it has no events, no run.json and no checkpoint"
            )
        # Links are refused: a run writes into these folders and removes files there. Checkpoints
        # may be on another disk.
        for name in ("events", "control"):
            if (path / name).is_symlink():
                raise RunFolderError(
                    f"{path / name} is a symbolic link: a run's own folder is needed"
                )
        if not (path / "lock").exists():
            self._made.append(path / "lock")
        self._lock = _lock(path / "lock")

    @classmethod
    def new(cls, runs_dir: Path, name: str, path: Path | None = None) -> RunFolder:
        """Choose the folder of a new run; `announce` creates it.

        Args:
            path: the folder to create; default: runs_dir/<UTC time>-<name>.

        Raises:
            RunFolderError: `path` already contains a run.
        """
        is_dated = path is None
        if path is None:
            # Never older than the job's newest run: after the clock was set back `--resume auto`
            # would otherwise take that one for newer.
            newest = next((run.name[: len(_NO_TIME)] for run in of_job(runs_dir, name)), _NO_TIME)
            path = runs_dir / f"{max(newest, f'{datetime.now(UTC):%Y%m%d-%H%M%S}')}-{name}"
        else:
            _refuse_another_run(path)
        run = cls(path, exists=False)
        run._runs_dir, run._is_new, run._is_dated = runs_dir, True, is_dated
        return run

    @classmethod
    def of_rank_0(cls, path: Path | None = None) -> RunFolder:
        """Open the folder that rank 0 has locked, for the log of another rank. `path` is None if it
        does not exist yet; `join` sets it later.

        Raises:
            RunFolderError: it is missing: the hosts share no file system at this path.
        """
        run = cls(path or Path(), exists=False)
        if path is not None:
            run.join(path)
        return run

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def has_locks(self) -> bool:
        """True if the file system supports locks; some network file systems are mounted without."""
        return lock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def events(self, rank: int = 0) -> Path:
        """Return the event file of one rank."""
        return self.path / "events" / f"rank{rank:03d}.jsonl"

    def announce(self) -> None:
        """Create the folder of a new run, so that its set-up can be watched. Idempotent.

        Raises:
            RunFolderError: it cannot be made, or another start has made it meanwhile.
            OffloadTrainError: the disk is full or fails.
        """
        if not self._is_new or self._lock >= 0:
            return
        try:
            self._make()
        except OSError as error:
            raise self._cannot_be_made(error) from error

    def begin(self, resolved: str, job: str | None = None) -> None:
        """Create the folder if it is new, and write the job of this start.

        Args:
            resolved: text of the job as run; a resume may change some keys.
            job: text of the job as written by the user; None: keep the existing file.

        Raises:
            RunFolderError: it cannot be made, or another start has begun in it meanwhile.
            OffloadTrainError: the disk is full or fails.
        """
        self.announce()
        self._is_permanent = self._is_permanent or not self._is_new
        try:
            self._make_folders()
            os.truncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
            if job is not None:
                replace_file(self.path / "job.toml", job)
            replace_file(self.path / "resolved.toml", resolved)
        except OSError as error:
            raise self._cannot_be_made(error) from error

    def _cannot_be_made(self, error: OSError) -> OffloadTrainError:
        at = Path(error.filename2 or error.filename or self.path)
        at = at if at.is_relative_to(self.path) else self.path
        is_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        kind = OffloadTrainError if is_disk else RunFolderError
        return kind(f"the run folder cannot be made at {at}: {error.strerror}")

    def join(self, path: Path) -> None:
        """Use the folder that rank 0 has created.

        Raises:
            RunFolderError: it is missing: the hosts share no file system at this path.
        """
        if not (path / "checkpoints").is_dir():
            raise RunFolderError(
                f"{path} is not on {socket.gethostname()}: all hosts of a job must see the run "
                "folder; set runs_dir to a file system that they share"
            )
        self.path = path

    def keep(self) -> None:
        """Make the folder permanent, because it contains a step or a checkpoint.

        Raises:
            OSError: runs_dir/latest cannot point to it; the folder is permanent all the same.
        """
        if self._is_permanent or self._lock < 0:
            return
        self._is_permanent = True
        if self.path.parent.resolve() == self._runs_dir.resolve():
            _point_latest(self.path)

    def write_run(self, facts: Mapping[str, Any]) -> None:
        """Write run.json: facts about this start, and `facts`."""
        known = {
            "run_id": self.run_id,
            "schema": SCHEMA,
            "pid": os.getpid(),
            "pid_start_ticks": start_ticks(),
            "host": socket.gethostname(),
            "argv": sys.argv,
            "started_s": time.time(),
        }
        text = json.dumps({**known, **facts}, indent=1, default=str)
        replace_file(self.path / "run.json", f"{text}\n")

    def close(self) -> None:
        """Remove a folder without a step or checkpoint, and release the lock. Idempotent."""
        if not self._is_permanent and not _has_checkpoint(self.path):
            _remove(self._made)
        self._made = []
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self) -> None:
        """Create the folder, and lock it before the first file: another start may be using it."""
        self._made = _missing(self.path.parent)
        self.path.parent.mkdir(mode=_MODE, parents=True, exist_ok=True)
        if self._is_dated:
            self.path = _make_dated(self.path)
            self._made.append(self.path)
        else:
            try:
                self.path.mkdir(mode=_MODE)
                self._made.append(self.path)
            except FileExistsError:
                if not self.path.is_dir():
                    raise
            _refuse_another_run(self.path)
        lacking = [path for name in _CONTENT if not (path := self.path / name).exists()]
        self._lock = _lock(self.path / "lock")
        self._made += [path for path in lacking if path.name == "lock" or not path.exists()]
        self._make_folders()
        # Make new folders durable before a checkpoint is, which would be lost with their names.
        for folder in dict.fromkeys(made.parent for made in self._made):
            sync_folder(folder)

    def _make_folders(self) -> None:
        """Create the folders that a run writes into; a resumed run may have lost them."""
        own_folder(self.path / "events")
        (self.path / "checkpoints").mkdir(mode=_MODE, exist_ok=True)


def holds_run(path: Path) -> bool:
    """Return True if a run has begun there, however it ended."""
    return os.path.exists(path / "run.json")  # False, not an error, for a name that is too long


def itself(path: Path) -> Path:
    """Resolve a link such as runs/latest once, since it may change when another run begins."""
    return path.resolve() if os.path.islink(path) else path


def how_to_go_on(path: Path) -> str:
    """Return advice on a folder that contains a run: resume it, or, if it has no checkpoint, remove
    it or train in it from the first step."""
    if _has_checkpoint(path):
        return f"resume it with --resume {path}"
    return (
        f"it has no checkpoint yet; remove it, or to train in it from the first step: --run-dir "
        f"{path} --resume auto"
    )


def _has_checkpoint(path: Path) -> bool:
    return bool(checkpoint.find(path / "checkpoints"))


def _refuse_another_run(path: Path) -> None:
    """Raise RunFolderError if a run has begun at `path`, or a process is running there."""
    begun = holds_run(path)
    if begun or (path / "events").is_dir():
        RunFolder(path).close()
    if begun:
        raise RunFolderError(f"{path} already contains a run: {how_to_go_on(path)}")


def of_job(runs_dir: Path, name: str) -> list[Path]:
    """Return the run folders of the job `name`, newest first."""
    form = re.compile(rf"(\d{{8}}-\d{{6}})-{re.escape(name)}(?:\+(\d+))?")
    matches = [(form.fullmatch(path.name), path) for path in runs_dir.glob("*-*") if path.is_dir()]
    dated = [(match[1], int(match[2] or 0), path) for match, path in matches if match]
    return [path for *_, path in sorted(dated, reverse=True)]


def _make_dated(path: Path) -> Path:
    """Create the folder; if its name is taken append "+1" and so on, which no job name ends in."""
    for suffix in ("", *(f"+{i}" for i in range(1, 100))):
        with suppress(FileExistsError):
            made = path.with_name(f"{path.name}{suffix}")
            made.mkdir(mode=_MODE)
            return made
    raise RunFolderError(f"{path} and 99 names like it are taken")


def _missing(path: Path) -> list[Path]:
    """Return `path` and its parents that do not exist, outermost first."""
    return [] if path.exists() else [*_missing(path.parent), path]


def _remove(made: list[Path]) -> None:
    """Remove created paths in reverse order. A folder that cannot be removed (it contains another
    run, or the disk fails) stays and does no harm to later starts."""
    for path in reversed(made):
        if path.name in _FOLDERS:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_dir():
            with suppress(OSError):
                path.rmdir()
        elif os.path.lexists(path):
            path.unlink()


def _lock(path: Path) -> int:
    try:
        fd = open_descriptor(path, flags=os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise RunFolderError(f"{path} cannot be locked: {error.strerror}") from error
    if not take(fd):
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise RunFolderError(
            f"{path.parent} is already running, pid {owner}: stop it, or use another --run-dir"
        )
    if not is_at(fd, path):  # the last owner removed the file, so this lock excludes nobody
        os.close(fd)
        return _lock(path)
    return fd


def _point_latest(folder: Path) -> None:
    """Set runs_dir/latest with one rename, so that a reader never finds it missing."""
    link, fresh = folder.parent / "latest", folder.parent / f".latest-{folder.name}"
    if link.exists() and not link.is_symlink():
        return  # a file that the user created
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    try:
        fresh.replace(link)
    except OSError:  # another user's link in a shared folder
        fresh.unlink()
        raise


def start_ticks() -> int:
    """Return the start time of this process in clock ticks since boot: pids are reused."""
    stat = Path("/proc/self/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ResumedSettings:
    """Settings that a resumed run takes from its checkpoint unless the job sets them; the bits of
    its results depend on them.

    Attributes:
        precision: precision of the working weights.
        ranks: number of ranks.
        threads: torch's threads on each rank; 0 if not recorded.
        tokenizer: identity of the tokenizer of the training tokens; "" if unknown.
    """

    precision: Precision
    ranks: int
    threads: int
    tokenizer: str = ""


@dataclass(slots=True)
class Opened:
    """A run folder, locked but not changed yet: see [Note: Nothing before it begins].

    Attributes:
        checkpoint: the checkpoint to resume from; its tensors are verified while loading. None if
            the run begins at step 0.
        damaged: newer checkpoints that were skipped, with their errors.
    """

    run: RunFolder
    checkpoint: Checkpoint | None = None
    damaged: list[tuple[Path, DamagedCheckpointError]] = field(default_factory=list)

    @property
    def settings(self) -> ResumedSettings | None:
        """Settings of the checkpoint to resume; None for a new run."""
        if self.checkpoint is None:
            return None
        state = self.checkpoint.state
        parts = state["config"].get("ranks", {}).get("tensor", 1)
        ranks = len(state["rng"]) * (parts if type(parts) is int else 1)
        threads, tokenizer = state.get("threads", 0), state["tokenizer"]
        return ResumedSettings(state["precision"], ranks, threads, tokenizer)

    def skip(self, path: Path, damage: DamagedCheckpointError) -> None:
        """Record a damaged checkpoint; the caller then tries an earlier one."""
        self.damaged.append((path, damage))

    def no_checkpoint(self) -> CheckpointError:
        """Return the error for a requested resume without a valid checkpoint."""
        reasons = "".join(f"\n  {why}" for _, why in self.damaged)
        return CheckpointError(
            f"{self.run.checkpoints} has no valid checkpoint to resume from; it was not changed. "
            f"To start over, use another --run-dir.{reasons}"
        )

    def begin(self, *, job: str, resolved: str, ranks: Ranks = ALONE) -> list[str]:
        """Begin the run after its checkpoint was accepted: from here on the folder is modified.
        Every rank calls this.

        Args:
            job: text of the job as written by the user; a resumed run keeps its existing file.
            resolved: text of the job as run.

        Returns:
            A sentence on each damaged checkpoint.

        Raises:
            RunFolderError: the folder cannot be made, or another start has begun in it meanwhile.
            OffloadTrainError: the disk is full or fails.
        """
        if ranks.rank == 0:
            self.run.begin(resolved, None if self.checkpoint else job)
        path = Path(ranks.broadcast_object(str(self.run.path.resolve())))
        if ranks.rank:
            self.run.join(path)
            return []
        return [
            f"{why}. It is kept as {checkpoint.set_aside(at).name}." for at, why in self.damaged
        ]


@dataclass(frozen=True, slots=True)
class _Choice:
    """The meaning of `--resume` and `--run-dir`, before any checkpoint is opened.

    Attributes:
        candidates: run folders with checkpoints; the first with a valid one is used.
        required: fail if no candidate is valid.
        skipped: newer runs without a checkpoint.
        over: folder of a run without a checkpoint in which to start again; "" if none.
    """

    candidates: Sequence[str] = ()
    required: bool = False
    skipped: Sequence[str] = ()
    over: str = ""


def open_run(
    job: Config, *, run_dir: Path | None, resume: str, say: Say, ranks: Ranks = ALONE
) -> Opened:
    """Find the run folder and lock it; writes nothing. Every rank calls this; rank 0 decides.

    Args:
        run_dir: the folder that was requested, if any.
        resume: "never", "auto" or a run folder.

    Raises:
        ConfigError: `resume` and `run_dir` contradict each other, or there is no such run.
        CheckpointError: the requested run has checkpoints, but none is valid.
        RunFolderError: the folder is in use, or contains a run that must not be mixed with a new
            run.
    """
    local = _choose(job, run_dir, resume, say) if ranks.rank == 0 else _Choice()
    choice = _Choice(**ranks.broadcast_object(asdict(local)))
    skipped = list(choice.skipped)
    for path in map(Path, choice.candidates):
        opened = _opened(path, ranks)
        if opened.checkpoint is not None:
            if skipped:
                say(f"resume auto: skipped {', '.join(skipped)}; resuming {path.name}")
            return opened
        opened.run.close()
        if choice.required:
            raise opened.no_checkpoint()
        skipped.append(f"{path.name} (no valid checkpoint)")
    if resume == "auto" and not choice.over:
        nothing = f"skipped {', '.join(skipped)}" if skipped else f"no checkpoint of {job.name}"
        say(f"resume auto: {nothing} in {run_dir or job.runs_dir}, a new run")
    if ranks.rank:
        return Opened(RunFolder.of_rank_0())
    if choice.over:
        return Opened(RunFolder(Path(choice.over)))
    return Opened(RunFolder.new(Path(job.runs_dir), job.name, run_dir))


def _opened(path: Path, ranks: Ranks) -> Opened:
    """Lock the folder, and open its newest valid checkpoint."""
    opened = Opened(RunFolder(path) if ranks.rank == 0 else RunFolder.of_rank_0(path))
    try:
        opened.checkpoint = checkpoint.newest_good(
            opened.run.checkpoints, opened.skip, ranks, verified=False, accept=require_run_state
        )
    except BaseException:
        opened.run.close()
        raise
    return opened


def _choose(job: Config, run_dir: Path | None, resume: str, say: Say) -> _Choice:
    if resume == "never":
        return _Choice()
    if resume != "auto":
        path = itself(Path(resume))
        if run_dir is not None and run_dir.resolve() != path.resolve():
            raise ConfigError(
                f"--resume {path} and --run-dir {run_dir} are different folders; give one"
            )
        if _has_checkpoint(path):
            return _Choice([str(path)], required=True)
        advice = how_to_go_on(path) if holds_run(path) else 'give a run folder, "auto" or "never"'
        raise ConfigError(f"--resume {path}: no checkpoint in {path / 'checkpoints'}; {advice}")
    if run_dir is not None:
        path = itself(run_dir)
        if _has_checkpoint(path):
            return _Choice([str(path)], required=True)
        if not holds_run(path):
            return _Choice()
        say(f"resume auto: {path} has no checkpoint: starting over in it; its log is kept")
        return _Choice(over=str(path))
    candidates, skipped = [], []
    for path in of_job(Path(job.runs_dir), job.name):
        saved = checkpoint.find(path / "checkpoints")
        if saved and checkpoint.step_of(saved[0]) >= job.train.steps:
            skipped.append(f"{path.name} (complete)")
            break
        if saved:
            candidates.append(str(path))
        elif not candidates:
            skipped.append(f"{path.name} (no checkpoint)")
    return _Choice(candidates, skipped=skipped)
