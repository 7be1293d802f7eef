"""Checkpoints of others: no command that reads one hangs, shows a traceback or an escape sequence.

`pytest tests/boundary/test_hostile_checkpoints.py --level full` runs every command on 60 of them.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from offloadtrain.config import job as jobs
from tests.boundary.hostile_checkpoints import CHECKPOINTS
from tests.boundary.test_hostile_folders import Captured, output_of
from tests.train.small_job import run, small_job

MOST_LINES = 60
"""Of a training that goes on: a curve and what to do next."""


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2, beside its data and its job."""
    folder = tmp_path_factory.mktemp("two")
    small = ("model.num_layers=1", "train.eval_every=0", "train.checkpoint_every=1")
    job = small_job(folder, "train.steps=2", "train.micro_batch=1", *small)
    (folder / "job.toml").write_text(jobs.dump(job))
    assert run(job, folder / "runs" / "20260101-000000-small") == 0
    return folder


def commands(folder: Path, run: Path) -> dict[str, list[str]]:
    """The last one writes into the run."""
    newest = run / "checkpoints" / "step-00000002"
    few = ["--prompt", "1 + 1", "--max-tokens", "2", "--device", "cpu"]
    data = str(next((folder / "data").rglob("*.bin")))
    return {
        "checkpoints": ["checkpoints", str(run)],
        "verify": ["checkpoints", str(run), "--verify"],
        "as JSON": ["checkpoints", str(run), "--json"],
        "status": ["status", str(run)],
        "runs": ["runs", str(run.parent)],
        "tui": ["tui", str(run), "--once", "--runs-dir", str(run.parent)],
        "generate": ["generate", str(run), *few],
        "generate from it": ["generate", str(newest), *few],
        "eval": ["eval", str(run), "--data", data, "--max-tokens", "64", "--device", "cpu"],
        "export": ["export", str(run), str(run.parent / "exported")],
        "resume": ["train", str(folder / "job.toml"), "--resume", str(run)],
    }


def hostile(two_saved: Path, tmp_path: Path, kind: str) -> Path:
    """A copy of the run whose newest checkpoint is hostile."""
    folder = two_saved / "runs" / "20260101-000000-small"
    run = tmp_path / "runs" / folder.name
    shutil.copytree(folder, run)
    CHECKPOINTS[kind](run / "checkpoints" / "step-00000002")
    return run


DRAWN = random.Random(3).sample(sorted(CHECKPOINTS), 60)
"""Of these the first twelve are read at level rest."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in DRAWN[:12] else pytest.mark.long) for k in DRAWN],
)
def test_no_command_trusts_a_checkpoint(
    kind: str, two_saved: Path, tmp_path: Path, capsys: Captured, request: pytest.FixtureRequest
) -> None:
    run = hostile(two_saved, tmp_path, kind)
    wanted = commands(two_saved, run)
    names = list(wanted)
    if request.config.getoption("--level") != "full":
        names = [*random.Random(kind).sample(names[:-1], 2), names[-1]]
    for name in names:
        code, _, err = output_of(capsys, *wanted[name], most_lines=MOST_LINES)
        assert code in (0, 1) or (code == 2 and len(err.splitlines()) <= 4), err
