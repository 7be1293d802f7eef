"""A disk without room: said before training where it is known, survived where it comes later."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from offloadtrain_tui.reading.listing import list_runs

from offloadtrain.events import schema
from offloadtrain.events import writer as event_writer
from offloadtrain.model.transformer import Transformer
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.trainer import Trainer
from tests.train.small_job import events_of, run, small_job


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    real = os.statvfs

    def statvfs(path: object) -> os.statvfs_result:
        block, fragment, blocks, _, _, *rest = real(path)  # type: ignore[arg-type]
        left = num_bytes // fragment
        return os.statvfs_result((block, fragment, blocks, left, left, *rest))

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_a_disk_too_small_is_reported_or_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ("train.steps=3", "train.eval_every=0")
    for mib, overrides, warns in (
        (4, ("train.checkpoint_every=3",), True),  # 1.6 MiB each with some room, three at once
        (5, ("train.checkpoint_every=3",), False),
        (3, ("train.checkpoint_every=0",), False),  # one is all there will be
    ):
        path = tmp_path / f"{mib}"
        with monkeypatch.context() as patch:
            free(patch, mib << 20)
            assert run(small_job(tmp_path, *short, *overrides), path) == 0
        messages = [e.message for e in events_of(path, schema.Warning_) if e.code == "disk-small"]
        assert len(messages) == warns
        assert all("which is 2 times" in message for message in messages)
        assert all("keep_last = 2 takes 3 times" in message for message in messages)
    free(monkeypatch, 1 << 20)
    monkeypatch.setattr(Transformer, "forward", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(CheckpointError, match=r"a checkpoint needs 1\.\d MiB and 1\.0 MiB is free"):
        run(small_job(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_room_that_the_next_save_makes_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    assert run(small_job(tmp_path), path) == 0
    torn = path / "checkpoints" / "step-00000014.tmp-0123abcd"
    torn.mkdir()
    (torn / "rank-000.bin").write_bytes(bytes(3 << 20))
    real = os.statvfs

    def statvfs(path: object) -> os.statvfs_result:
        block, fragment, blocks, *_ = facts = real(path)  # type: ignore[arg-type]
        left = (1 << 20 if torn.exists() else 4 << 20) // fragment
        return os.statvfs_result((block, fragment, blocks, left, left, *facts[5:]))

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert run(small_job(tmp_path, "train.steps=14"), path, resume=str(path)) == 0
    assert not torn.exists() and (path / "checkpoints" / "step-00000014").is_dir()


class Full:
    """The disk of a run's log: full while `full` returns true."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
        self.full: Callable[[], bool] = lambda: False
        self._log, self._write = log, os.write
        self._given_back = False
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(event_writer, "_reserved", lambda _: self)
        monkeypatch.setattr(event_writer, "RETRY_S", 0.01)
        monkeypatch.setattr(event_writer, "END_WITHIN_S", 0.05)

    def write(self, fd: int, data: bytes) -> int:
        is_log = self._log.exists() and os.path.samestat(os.fstat(fd), self._log.stat())
        if is_log and self.full() and not self._given_back:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, data)

    def close(self) -> None:
        self._given_back = True


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[Trainer]:
    """The trainer of the run in this process, once there is one."""
    made: list[Trainer] = []
    real = Trainer.train
    monkeypatch.setattr(
        Trainer, "train", lambda self, *rest: (made.append(self), real(self, *rest))[1]
    )
    return made


def test_a_log_whose_disk_is_full_for_some_steps_is_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainers: list[Trainer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run"
    disk = Full(monkeypatch, path / "events" / "rank000.jsonl")
    disk.full = lambda: bool(trainers) and 3 <= trainers[0].progress.step < 10
    assert run(small_job(tmp_path), path) == 0
    assert [e.step for e in events_of(path, schema.Step)] == list(range(1, 13))
    assert events_of(path, schema.RunEnded)[-1].status == "done"
    output = capsys.readouterr().err
    assert output.count("the event log cannot be written (No space left on device)") == 1
    assert "written again; 0 records were lost" in output


def test_a_run_that_ends_on_a_full_disk_is_not_called_killed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainers: list[Trainer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run"
    disk = Full(monkeypatch, path / "events" / "rank000.jsonl")
    disk.full = lambda: bool(trainers) and trainers[0].progress.step >= 3
    assert run(small_job(tmp_path), path) == 0
    (row,) = list_runs(tmp_path, 0.0)
    assert (row.state, row.folder) == ("done", path)
    (lost,) = [e for e in events_of(path, schema.Warning_) if e.code == "events-dropped"]
    assert "events were lost: the log's disk refused (No space left on device)" in lost.message


def test_a_run_folder_that_is_removed_meanwhile_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, real = tmp_path / "run", Trainer._between_steps

    def removed(self: Trainer) -> None:
        if self.progress.step == 5:
            shutil.rmtree(path)
        real(self)

    monkeypatch.setattr(Trainer, "_between_steps", removed)
    assert run(small_job(tmp_path), path) == 0
    output, log = capsys.readouterr().err, path / "events" / "rank000.jsonl"
    assert f"{log} was removed or renamed during the run" in output
    assert [saved.name for saved in sorted((path / "checkpoints").iterdir())] == [
        "step-00000009",
        "step-00000012",
    ]
