"""A trained run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.small_job import run, small_job


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with int8 state, whose masters have to be decoded, beside its data."""
    folder = tmp_path_factory.mktemp("trained")
    batches = ("train.eval_every=3", "train.eval_batches=1000")
    job = small_job(folder, "train.steps=3", "offload.state=int8", *batches)
    assert run(job, folder / "run") == 0
    return folder / "run"
