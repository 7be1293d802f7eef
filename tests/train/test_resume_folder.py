"""Which run folder `--resume` and `--run-dir` mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config, load
from offloadtrain.train.run_folder import RunFolder, RunFolderError, open_run
from tests.train.conftest import StopAfter
from tests.train.small_job import run, small_job


def opened(job: Config, resume: str, run_dir: Path | None = None) -> tuple[RunFolder, bool]:
    """The folder, and whether a checkpoint was found in it; begun as a start does."""
    said: list[str] = []
    found = open_run(job, run_dir=run_dir, resume=resume, say=said.append)
    assert found.begin(job="text", resolved=jobs.dump(job)) == []
    found.run.keep()
    found.run.close()
    assert (resume == "auto" and not found.checkpoint) == bool(said)
    return found.run, found.checkpoint is not None


def test_a_new_run_gets_a_dated_folder(tmp_path: Path) -> None:
    folder, resumes = opened(small_job(tmp_path), "never")
    assert not resumes and folder.path.parent == tmp_path / "runs"
    assert folder.path.name.endswith("-small")
    assert (folder.path / "job.toml").read_text() == "text"
    assert (tmp_path / "runs" / "latest").resolve() == folder.path.resolve()


def test_auto_takes_the_newest_run_of_the_job_that_is_not_complete(
    tmp_path: Path, stop_after: StopAfter
) -> None:
    job, runs = small_job(tmp_path), tmp_path / "runs"
    assert opened(job, "auto")[1] is False
    stop_after(2)
    for name in ("20300101-000000-small", "20300102-000000-small", "20300103-000000-other"):
        assert run(job, runs / name) == 75
    assert opened(job, "auto")[0].path == runs / "20300102-000000-small"
    stop_after(None)
    assert run(job, runs / "20300102-000000-small", resume="auto") == 0
    longer = small_job(tmp_path, "train.steps=20")
    folder, resumes = opened(longer, "auto")
    assert resumes and load(folder.path / "resolved.toml") == longer, "the job as run now"
    assert opened(job, "auto")[1] is False, "complete, so a new run"


def test_a_run_dir_is_made_or_gone_on_with(tmp_path: Path, stop_after: StopAfter) -> None:
    job, mine = small_job(tmp_path), tmp_path / "mine"
    stop_after(2)
    assert run(job, mine, resume="auto") == 75
    assert opened(job, "auto", mine)[1] is True
    with pytest.raises(RunFolderError, match="already contains a run"):
        opened(job, "never", mine)
    with pytest.raises(ConfigError, match="are different folders"):
        opened(job, str(mine), tmp_path / "other")


def test_a_run_in_progress_is_left_alone(tmp_path: Path, stop_after: StopAfter) -> None:
    job, mine = small_job(tmp_path), tmp_path / "mine"
    stop_after(2)
    assert run(job, mine) == 75
    with RunFolder(mine), pytest.raises(RunFolderError, match="already running"):
        opened(job, str(mine))


@pytest.mark.parametrize("resume", ["absent", "Auto", "."])
def test_what_is_no_run_is_a_usage_error(tmp_path: Path, resume: str) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint .* give a run folder"):
        opened(small_job(tmp_path), resume)
