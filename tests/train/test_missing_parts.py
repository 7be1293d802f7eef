"""A run folder that has lost a part: a good checkpoint is enough to resume, and a run whose log is
removed trains on with a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from offloadtrain.config.job import Config
from offloadtrain.events import schema
from offloadtrain.parallel.pipeline.stage_optimizers import AnyOptimizer
from offloadtrain.train.log.run_log import RunLog
from tests.train.conftest import StopAfter
from tests.train.small_job import events_of, history, run, small_job, tensor_hashes

PARTS = ("events", "events/rank000.jsonl", "events/rank000.ring", "run.json", "job.toml",
         "resolved.toml", "lock", "control")  # fmt: skip


@pytest.fixture(scope="module")
def job_and_hashes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[str, str]]:
    """A job, and the hashes of its final tensors after a run without interruption."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = small_job(folder)
    assert run(job, folder / "run") == 0
    return job, tensor_hashes(folder / "run", 12)


@pytest.mark.parametrize("part", PARTS)
def test_a_stopped_run_without_one_of_its_parts_resumes_with_the_same_bits(
    part: str,
    tmp_path: Path,
    stop_after: StopAfter,
    job_and_hashes: tuple[Config, dict[str, str]],
) -> None:
    job, expected = job_and_hashes
    stopped = tmp_path / "run"
    stop_after(7)
    assert run(job, stopped) == 75
    _remove(stopped / part)
    stop_after(None)
    assert run(job, stopped, resume=str(stopped)) == 0
    assert tensor_hashes(stopped, 12) == expected
    assert [step for step, *_ in history(stopped)][-5:] == [8, 9, 10, 11, 12]


@pytest.mark.parametrize("part", ["events", "events/rank000.jsonl"])
def test_a_run_whose_log_is_removed_warns_at_once_and_continues_it(
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job_and_hashes: tuple[Config, dict[str, str]],
) -> None:
    job, expected = job_and_hashes
    folder = tmp_path / "run"
    before_step = RunLog.before_step

    def remove_before_step_6(log: RunLog, optimizer: AnyOptimizer) -> None:
        before_step(log, optimizer)
        if log._progress.step == 5:
            log._writer.flush()
            _remove(folder / part)

    monkeypatch.setattr(RunLog, "before_step", remove_before_step_6)
    assert run(job, folder) == 0
    assert tensor_hashes(folder, 12) == expected
    assert [step for step, *_ in history(folder)] == list(range(6, 13))
    removal, *others = events_of(folder, schema.Warning_)
    message = f"{folder / 'events' / 'rank000.jsonl'} was removed or renamed"
    assert removal.code == "log-removed" and removal.message.startswith(message)
    assert "log-removed" not in {warning.code for warning in others}
    output = capsys.readouterr().err
    assert output.count("removed or renamed") == output.count(message) == 1


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
