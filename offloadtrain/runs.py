"""Which run folder a command works in: a new one, or one to go on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from offloadtrain import checkpoint, config, run_folder
from offloadtrain.config import Config
from offloadtrain.errors import ConfigError
from offloadtrain.run_folder import RunFolder

Say = Callable[[str], None]


def open_run(
    job: Config, job_text: str, *, run_dir: Path | None, resume: str, say: Say
) -> tuple[RunFolder, bool]:
    """Return the locked run folder, and whether to go on from its newest checkpoint.

    Args:
        job_text: the job as given, kept in a new folder.
        run_dir: a folder asked for by name.
        resume: "never", "auto" or a run folder.

    Raises:
        ConfigError: `resume` and `run_dir` contradict each other, or there is no such run.
        RunFolderError: the folder is in use, or holds a run that may not be mixed with a new one.
    """
    found = _to_resume(job, run_dir, resume, say)
    resolved = config.dump(job)
    if found is not None:
        run = RunFolder(found)
        run.write_resolved(resolved)
        return run, True
    return (
        run_folder.create(
            Path(job.runs_dir), job.name, job=job_text, resolved=resolved, path=run_dir
        ),
        False,
    )


def _to_resume(job: Config, run_dir: Path | None, resume: str, say: Say) -> Path | None:
    if resume == "never":
        return None
    if resume != "auto":
        return _named(Path(resume), run_dir)
    path = run_dir if run_dir is not None else run_folder.newest(Path(job.runs_dir), job.name)
    saved = checkpoint.find(path / "checkpoints") if path is not None else []
    if path is None or not saved:
        say(f"resume auto: no checkpoint of {job.name} in {run_dir or job.runs_dir}, a new run")
        return None
    if run_dir is None and checkpoint.step_of(saved[0]) >= job.train.steps:
        say(f"resume auto: {path} is complete, a new run")
        return None
    return path


def _named(path: Path, run_dir: Path | None) -> Path:
    if run_dir is not None and run_dir.resolve() != path.resolve():
        raise ConfigError(f"--resume {path} and --run-dir {run_dir} name two folders; give one")
    if not checkpoint.find(path / "checkpoints"):
        raise ConfigError(
            f"--resume {path}: no checkpoint in {path / 'checkpoints'}; give a run folder, "
            '"auto" or "never"'
        )
    return path
