"""`offloadtrain ls` and `offloadtrain cp`, and the search for a job by name."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from offloadtrain.boundary.output import tell
from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.config.toml import nearest
from offloadtrain.config.units import format_count

_FOLDER = Path(__file__).parent.parent / "jobs"


class JobExistsError(OffloadTrainError):
    """The target of the copy exists already."""


def list_jobs(*, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> None:
    """List the shipped jobs with their sizes.

    Parameters
    ----------
    as_json
        Print one line of JSON per job.
    """
    rows = [_described(name, path) for name, path in shipped_jobs().items()]
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    print(f"{'job':<18}{'parameters':>10}{'tokens/step':>13}{'steps':>8}  what it is")
    for row in rows:
        sizes = (format_count(row["params"]), format_count(row["batch_tokens"]), row["steps"])
        print("{:<18}{:>10}{:>13}{:>8}  {}".format(row["job"], *sizes, row["what"]))


def _described(name: str, path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8") as file:
        what = file.readline().lstrip("# ").strip()
    job = jobs.load(path)
    sizes = {"params": job.num_params, "batch_tokens": job.batch_tokens, "steps": job.train.steps}
    return {"job": name, **sizes, "what": what}


def copy_job(name: str, dest: Path | None = None, /) -> None:
    """Copy a shipped job into a file to edit.

    Parameters
    ----------
    name
        A name listed by `offloadtrain ls`.
    dest
        Target file or folder. Default: NAME.toml in the current folder.
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
    """Print on stderr how overrides changed other keys of a job."""
    tell(line, sys.stderr)


def find_job(job: str) -> Path:
    """Return the job file named on a command line: a path, or the name of a shipped job.

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
    shipped = shipped_jobs()
    if name not in shipped:
        raise ConfigError(
            f"{name}: no such file, and no shipped job of this name{nearest(name, shipped) or '.'} "
            f"Shipped: {', '.join(shipped)}"
        )
    return shipped[name]
