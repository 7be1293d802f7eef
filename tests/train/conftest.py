"""Ways to stop a run in-process at a chosen step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from offloadtrain.cli.commands import train
from offloadtrain.config.job import Config
from tests.train.small_job import history, run, small_job, tensor_hashes

StopAfter = Callable[[int | None], None]


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> StopAfter:
    """Return a function that makes later runs act as if a signal came during their n-th step."""

    class Counted:
        def __init__(self, limit: int | None) -> None:
            self._left = limit

        wants_checkpoint = False

        def defer(self) -> None:
            return None

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *exception: object) -> None:
            return None

        @property
        def requested(self) -> bool:
            if self._left is None:
                return False
            self._left -= 1
            return self._left < 0

    def arm(limit: int | None) -> None:
        monkeypatch.setattr(train, "StopRequests", lambda **_: Counted(limit))

    return arm


@pytest.fixture
def with_stops(stop_after: StopAfter) -> Callable[..., None]:
    """Return a function that trains a job in a run folder to its end, with a stop after so many
    steps of each start before the last."""

    def train_in_parts(job: Config, path: Path, *limits: int) -> None:
        for number, limit in enumerate((*limits, None)):
            stop_after(limit)
            resume = str(path) if number else "auto"
            assert run(job, path, resume=resume) == (0 if limit is None else 75)

    return train_in_parts


def assert_same_run(path: Path, expected: Path, last: int = 12) -> None:
    """All steps and the final tensors, to the bit."""
    assert history(path) == history(expected)
    assert tensor_hashes(path, last) == tensor_hashes(expected, last)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with int8 state, whose masters have to be decoded, beside its data."""
    folder = tmp_path_factory.mktemp("trained")
    batches = ("train.eval_every=3", "train.eval_batches=1000")
    job = small_job(folder, "train.steps=3", "offload.state=int8", *batches)
    assert run(job, folder / "run") == 0
    return folder / "run"
