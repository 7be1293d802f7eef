"""A start that comes to nothing changes nothing, and the next one finds what there is to go on
with."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from offloadtrain_tui.reading.listing import list_runs
from torch import Tensor

from offloadtrain.cli.exit_codes import HUNG
from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.config.job import Config
from offloadtrain.data.tokens import HEADER_BYTES, DataError, TokenFile
from offloadtrain.events import schema
from offloadtrain.model.transformer import Transformer
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.run_folder import RunFolderError
from offloadtrain.train.signals import guarded
from tests.data.tiny import write_tokens
from tests.train.conftest import StopAfter
from tests.train.small_job import JOB, events_of, run, small_job, write_text


def tree(folder: Path) -> dict[str, str]:
    """Every name below a folder, with a link's target or a file's hash."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"to {os.readlink(path)}"
        else:
            found[name] = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def started(job: Config, *, resume: str = "never", run_dir: Path | None = None) -> int:
    """As the command does it, in a dated folder if none is named."""
    from offloadtrain.cli.commands.train import run_job

    with guarded(job, hung_code=HUNG) as guards:
        return run_job(job, jobs.dump(job), guards, run_dir=run_dir, resume=resume)


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    """The folder of a run that is done."""
    assert started(small_job(tmp_path)) == 0
    return (tmp_path / "runs" / "latest").resolve()


REFUSED = ["model.d_model=64", "offload.precision=fp32", "data.source=absent", "data.seq_len=16"]


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path, complete: Path) -> None:
    before = tree(complete.parent)
    for change in REFUSED:
        with pytest.raises(OffloadTrainError):
            started(small_job(tmp_path, change), resume=str(complete))
        assert tree(complete.parent) == before, change
    (row,) = list_runs(complete.parent, 0.0)
    assert row.state == "done" and row.step == 12
    longer = small_job(tmp_path, "train.steps=14")
    assert started(longer, resume=str(complete)) == 0, "as the run itself says to go on"


@pytest.mark.slow
def test_a_refused_resume_leaves_a_damaged_checkpoint_in_its_place(
    tmp_path: Path, complete: Path
) -> None:
    (complete / "checkpoints" / "step-00000012" / "state.json").write_text("{}")
    before = tree(complete)
    with pytest.raises(ConfigError, match="another model"):
        started(small_job(tmp_path, "model.d_model=64"), resume=str(complete))
    assert tree(complete) == before


FAILING = [
    "data.source=absent",
    "device.kind=cuda",
    "model.vocab_size=100",
    "data.seq_len=100000",
    "device.machine=nowhere",
    "offload.state=split16 offload.precision=fp32",
    "device.process_memory_limit=1GiB",
    "model.d_model=65536 model.num_layers=99",
]


@pytest.mark.parametrize("named", [False, True], ids=["dated", "named"])
def test_a_start_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("offloadtrain.hardware.telemetry.available_bytes", lambda: 100 << 30)
    write_text(tmp_path)
    job, runs = tmp_path / "job.toml", tmp_path / "runs"
    job.write_text(JOB.format(folder=tmp_path))
    where = ["--run-dir", str(runs / "mine")] if named else []
    for overrides in FAILING:
        assert main(["train", str(job), *where, "--set", *overrides.split()]) != 0
        assert not runs.exists(), overrides


@pytest.mark.slow
def test_a_failure_in_the_first_step_leaves_nothing_either(
    tmp_path: Path, complete: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(complete.parent)
    mine = tmp_path / "mine"
    mine.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "forward", lambda *_, **__: 1 / 0)
        for run_dir in (None, mine, tmp_path / "new"):
            with pytest.raises(ZeroDivisionError):
                started(small_job(tmp_path), run_dir=run_dir)
    assert tree(complete.parent) == before
    assert list(mine.iterdir()) == [] and not (tmp_path / "new").exists()


@pytest.mark.parametrize("by", ["--resume", "--run-dir"])
def test_a_run_named_by_a_link_stays_in_its_folder_when_the_link_moves(
    tmp_path: Path, complete: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    link, other = complete.parent / "latest", complete.parent / "other"
    (other / "checkpoints").mkdir(parents=True)
    before, forward = tree(other), Transformer.forward

    def moves(*arguments: Any, **options: Any) -> Tensor:
        link.unlink()
        link.symlink_to(other.name)
        return forward(*arguments, **options)

    monkeypatch.setattr(Transformer, "forward", moves)
    longer = small_job(tmp_path, "train.steps=14")
    if by == "--resume":
        assert started(longer, resume=str(link)) == 0
    else:
        assert started(longer, resume="auto", run_dir=link) == 0
    assert tree(other) == before
    assert (complete / "checkpoints" / "step-00000014").is_dir()
    assert json.loads((complete / "run.json").read_text())["run_id"] == complete.name


def test_a_link_that_cannot_be_made_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(link: Path, target: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(link))

    monkeypatch.setattr(Path, "symlink_to", refused)
    assert started(small_job(tmp_path)) == 0
    (path,) = (tmp_path / "runs").iterdir()
    told = [e.message for e in events_of(path, schema.Warning_) if e.code == "latest-failed"]
    assert len(told) == 1 and "Operation not permitted" in told[0]


def test_a_failure_after_the_first_step_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("offloadtrain.train.trainer.Trainer._between_steps", fails)
    with pytest.raises(ZeroDivisionError):
        started(small_job(tmp_path))
    (row,) = list_runs(tmp_path / "runs", 0.0)
    assert (row.state, row.step) == ("failed", 1)
    assert (tmp_path / "runs" / "latest").resolve() == row.folder


@pytest.mark.slow
def test_auto_passes_over_newer_runs_without_a_good_checkpoint(
    tmp_path: Path, stop_after: StopAfter, capsys: pytest.CaptureFixture[str]
) -> None:
    job, runs = small_job(tmp_path), tmp_path / "runs"
    good, damaged, empty, other = (
        runs / f"2030010{day}-000000-{name}"
        for day, name in ((1, "small"), (2, "small"), (3, "small"), (4, "other"))
    )
    stop_after(2)
    for path in (good, damaged, other):
        assert run(job, path) == 75
    for saved in checkpoint.find(damaged / "checkpoints"):
        (saved / "state.json").write_text("{}")
    (empty / "events").mkdir(parents=True)
    (empty / "checkpoints").mkdir()
    (empty / "run.json").write_text("{}")
    left = {path: tree(path) for path in (damaged, empty, other)}
    stop_after(None)
    assert started(job, resume="auto") == 0
    assert [e.start_step for e in events_of(good, schema.RunStarted)] == [0, 2]
    assert {path: tree(path) for path in left} == left
    said = capsys.readouterr().err
    assert f"{empty.name} (no checkpoint)" in said
    assert f"{damaged.name} (no valid checkpoint)" in said


@pytest.mark.slow
def test_auto_after_a_failed_start_goes_on(tmp_path: Path, stop_after: StopAfter) -> None:
    job = small_job(tmp_path)
    stop_after(2)
    assert started(job) == 75
    first = (tmp_path / "runs" / "latest").resolve()
    with pytest.raises(OffloadTrainError):
        started(small_job(tmp_path, "data.source=absent"))
    stop_after(None)
    assert started(job, resume="auto") == 0
    assert [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()] == [first]


_KILLED = """
import os, signal, sys, time
from pathlib import Path
from offloadtrain.train import trainer
from offloadtrain.cli.main import main
at = getattr(trainer.Trainer, sys.argv[1])
log = Path(sys.argv[sys.argv.index("--run-dir") + 1], "events", "rank000.jsonl")
def killed(self, *rest):
    if self.progress.step >= int(sys.argv[2]):
        while b"run_started" not in log.read_bytes():  # it is written by another thread
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return at(self, *rest)
setattr(trainer.Trainer, sys.argv[1], killed)
main(sys.argv[3:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "step"),
    [("_evaluate", 0), ("_step", 0), ("_step", 1)],
)
def test_killed_before_the_first_checkpoint_the_same_command_starts_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, step: int
) -> None:
    write_text(tmp_path)
    job, mine = tmp_path / "job.toml", tmp_path / "mine"
    job.write_text(JOB.format(folder=tmp_path))
    command = ["train", str(job), "--run-dir", str(mine), "--resume", "auto"]
    program = [sys.executable, "-c", _KILLED, method, str(step), *command]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run(program, env=alone, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    before = (mine / "events" / "rank000.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match=r"--run-dir .*mine --resume auto"):
        started(small_job(tmp_path), run_dir=mine)
    with pytest.raises(ConfigError, match=r"--run-dir .*mine --resume auto"):
        started(small_job(tmp_path), resume=str(mine))
    assert main(command) == 0
    assert f"{mine} has no checkpoint: starting over in it" in capsys.readouterr().err
    assert (mine / "events" / "rank000.jsonl").read_bytes().startswith(before)
    assert [e.start_step for e in events_of(mine, schema.RunStarted)] == [0, 0]
    assert checkpoint.verify(checkpoint.find(mine / "checkpoints")[0]).step == 12


def test_only_damaged_checkpoints_are_left_for_a_person(
    tmp_path: Path, stop_after: StopAfter
) -> None:
    job, mine = small_job(tmp_path), tmp_path / "mine"
    stop_after(2)
    assert run(job, mine) == 75
    (mine / "checkpoints" / "step-00000002" / "state.json").write_text("{}")
    before = tree(mine)
    for resume in ("auto", str(mine)):
        with pytest.raises(CheckpointError, match=r"no valid checkpoint .*not changed"):
            run(job, mine, resume=resume)
    assert tree(mine) == before


def test_a_folder_taken_while_the_model_was_built_is_left_alone(tmp_path: Path) -> None:
    """Two starts of one command: who begins second is refused, and removes nothing."""
    from offloadtrain.train.run_folder import open_run

    job, mine = small_job(tmp_path), tmp_path / "mine"
    late = open_run(job, run_dir=mine, resume="never", say=print)
    assert run(job, mine) == 0
    before = tree(mine)
    with late.run, pytest.raises(RunFolderError, match="already contains a run"):
        late.begin(job="other", resolved="other")
    assert tree(mine) == before


def flip_training_data(folder: Path) -> Path:
    (path,) = (folder / "data").rglob("train.bin")
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 100 : HEADER_BYTES + 200] = bytes(100)
    path.write_bytes(raw)
    return path


def test_changed_training_data_is_refused_at_start_and_at_resume(
    tmp_path: Path, stop_after: StopAfter
) -> None:
    job, mine = small_job(tmp_path), tmp_path / "mine"
    stop_after(2)
    assert run(job, mine) == 75
    before = tree(mine)
    path = flip_training_data(tmp_path)
    for run_dir, resume in ((tmp_path / "new", "never"), (mine, "auto")):
        with pytest.raises(DataError, match=r"train\.bin: the tokens changed .* hash is \w+, but"):
            run(job, run_dir, resume=resume)
    assert tree(mine) == before and not (tmp_path / "new").exists()
    path.unlink()
    stop_after(None)
    assert run(job, mine, resume="auto") == 0, "prepared again as the message says"


@pytest.mark.slow
def test_other_held_out_tokens_are_told_at_resume(tmp_path: Path, stop_after: StopAfter) -> None:
    mine = tmp_path / "mine"
    stop_after(2)
    assert run(small_job(tmp_path), mine) == 75
    folder = tmp_path / "data" / "text"
    files = [f"data.train={folder}/train.bin", f"data.val={tmp_path}/other.bin", "data.source="]
    tokens = TokenFile(folder / "val.bin").tokens[::-1]
    write_tokens(tmp_path / "other.bin", [tokens], vocab_size=256, tokenizer="bytes")
    assert run(small_job(tmp_path, *files), mine, resume="auto") == 75
    (changed,) = [e for e in events_of(mine, schema.Warning_) if e.code == "job-changed"]
    assert "the held-out tokens" in changed.message
