"""`offloadtrain ls` and `offloadtrain cp`, and finding the job that a command line names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.config.toml import nearest
from offloadtrain.train.console import sanitize

_FOLDER = Path(__file__).parent.parent / "jobs"


class JobExistsError(OffloadTrainError):
    """A file is in the way of the copy."""


def list_jobs() -> None:
    """List the jobs that come with offloadtrain: name, a tab, what it is."""
    for name, path in shipped_jobs().items():
        with path.open(encoding="utf-8") as file:
            print(f"{name}\t{file.readline().lstrip('# ').strip()}")


def copy_job(name: str, dest: Path | None = None, /) -> None:
    """Copy a job that comes with offloadtrain, to make it yours.

    Parameters
    ----------
    name
        One of the names of `offloadtrain ls`.
    dest
        A file, or a folder to put it in. Default: NAME.toml here.
    """
    source = _shipped(name)
    target = dest or Path()
    target = target / source.name if os.path.isdir(target) else target
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise JobExistsError(f"{target} exists; name another file, or remove it first") from None
    except OSError as error:
        raise OffloadTrainError(f"{target} cannot be written: {error.strerror}") from error
    print(target)
    print(f"edit it, then: offloadtrain train {target}", file=sys.stderr)


def say_on_stderr(line: str) -> None:
    """What became of a job's keys, for the person who has overridden one."""
    print(sanitize(line), file=sys.stderr)


def find_job(job: str) -> Path:
    """Return the file that a command line means: a path, or the name of a shipped job.

    Raises:
        ConfigError: neither.
    """
    path = Path(job)
    looks_like_a_path = path.suffix == ".toml" or os.sep in job
    return path if looks_like_a_path or os.path.isfile(path) else _shipped(job)


def shipped_jobs() -> dict[str, Path]:
    """Return the shipped jobs by name, in order."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def _shipped(name: str) -> Path:
    jobs = shipped_jobs()
    if name not in jobs:
        raise ConfigError(
            f"{name}: no such file, and no shipped job of this name{nearest(name, jobs) or '.'} "
            f"Shipped: {', '.join(jobs)}"
        )
    return jobs[name]
