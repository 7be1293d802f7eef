"""A start that comes to nothing changes nothing, and the next one finds what there is to go on
with."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from offloadtrain_tui.reading.listing import list_runs
from torch import Tensor

from offloadtrain.cli.commands.train import run_job
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
from offloadtrain.train.run_folder import RunFolderError, open_run
from offloadtrain.train.signals import guarded
from tests.data.tiny import write_tokens
from tests.train.conftest import StopAfter
from tests.train.small_job import JOB, events_of, run, small_job, write_text


def tree(folder: Path) -> dict[str, str]:
    """Return every name below a folder, with a link's target or a file's hash."""
    names = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            names[name] = f"to {os.readlink(path)}"
        else:
            names[name] = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return names


def started(job: Config, *, resume: str = "never", run_dir: Path | None = None) -> int:
    """As the command starts it, in a dated folder if none is named."""
    with guarded(job, hung_code=HUNG) as guards:
        return run_job(job, jobs.dump(job), guards, run_dir=run_dir, resume=resume)


@pytest.fixture(scope="module")
def complete_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("complete")
    assert started(small_job(folder, "train.steps=4", "train.eval_every=0")) == 0
    return folder


@pytest.fixture
def complete(complete_once: Path, tmp_path: Path) -> Path:
    """The folder of a run that is done."""
    shutil.copytree(complete_once, tmp_path, symlinks=True, dirs_exist_ok=True)
    return (tmp_path / "runs" / "latest").resolve()


REFUSED = ["model.d_model=64", "offload.precision=fp32", "data.source=absent", "data.seq_len=16"]


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path, complete: Path) -> None:
    """A damaged checkpoint too stays in its place."""
    before = tree(complete.parent)
    for change in REFUSED:
        with pytest.raises(OffloadTrainError):
            started(small_job(tmp_path, change), resume=str(complete))
        assert tree(complete.parent) == before, change
    (row,) = list_runs(complete.parent, 0.0)
    assert row.state == "done" and row.step == 4
    (complete / "checkpoints" / "step-00000004" / "state.json").write_text("{}")
    before = tree(complete)
    with pytest.raises(ConfigError, match="another model"):
        started(small_job(tmp_path, "model.d_model=64"), resume=str(complete))
    assert tree(complete) == before
    longer = small_job(tmp_path, "train.steps=6", "train.eval_every=0")
    assert started(longer, resume=str(complete)) == 0, "as the run itself advises"


FAILING = [
    "data.source=absent",
    "device.kind=cuda",
    "model.vocab_size=100",
    "data.seq_len=100000",
    "device.machine=nowhere",
    "offload.state=split16 offload.precision=fp32",
    "device.process_memory_limit=1GiB",
    "model.d_model=65536 model.num_layers=9",
]


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("offloadtrain.hardware.telemetry.available_bytes", lambda: 100 << 30)
    write_text(tmp_path)
    job, runs = tmp_path / "job.toml", tmp_path / "runs"
    job.write_text(JOB.format(folder=tmp_path))
    for number, overrides in enumerate(FAILING):
        where = ["--run-dir", str(runs / "mine")] if number % 2 else []
        assert main(["train", str(job), *where, "--set", *overrides.split()]) != 0
        assert not runs.exists(), overrides


@pytest.mark.slow
def test_a_failure_in_the_first_step_leaves_nothing_either(
    tmp_path: Path, complete: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(complete.parent)
    named = tmp_path / "mine"
    named.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "forward", lambda *_, **__: 1 / 0)
        for run_dir in (None, named, tmp_path / "new"):
            with pytest.raises(ZeroDivisionError):
                started(small_job(tmp_path), run_dir=run_dir)
    assert tree(complete.parent) == before
    assert list(named.iterdir()) == [] and not (tmp_path / "new").exists()


@pytest.mark.parametrize("by", ["--resume", pytest.param("--run-dir", marks=pytest.mark.slow)])
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
    longer = small_job(tmp_path, "train.steps=6", "train.eval_every=0")
    if by == "--resume":
        assert started(longer, resume=str(link)) == 0
    else:
        assert started(longer, resume="auto", run_dir=link) == 0
    assert tree(other) == before
    assert (complete / "checkpoints" / "step-00000006").is_dir()
    assert json.loads((complete / "run.json").read_text())["run_id"] == complete.name


def test_a_link_that_cannot_be_made_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(link: Path, target: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(link))

    monkeypatch.setattr(Path, "symlink_to", refused)
    assert started(small_job(tmp_path, "train.steps=3", "train.eval_every=0")) == 0
    (path,) = (tmp_path / "runs").iterdir()
    (warning,) = [e for e in events_of(path, schema.Warning_) if e.code == "latest-failed"]
    assert "Operation not permitted" in warning.message


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
    output = capsys.readouterr().err
    assert f"{empty.name} (no checkpoint)" in output
    assert f"{damaged.name} (no valid checkpoint)" in output


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
    [("_evaluate", 0), ("_step", 1)],
)
def test_killed_before_the_first_checkpoint_the_same_command_starts_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, step: int
) -> None:
    write_text(tmp_path)
    job, named = tmp_path / "job.toml", tmp_path / "mine"
    job.write_text(JOB.format(folder=tmp_path))
    command = ["train", str(job), "--run-dir", str(named), "--resume", "auto"]
    program = [sys.executable, "-c", _KILLED, method, str(step), *command]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run(program, env=alone, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    before = (named / "events" / "rank000.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match=r"--run-dir .*mine --resume auto"):
        started(small_job(tmp_path), run_dir=named)
    with pytest.raises(ConfigError, match=r"--run-dir .*mine --resume auto"):
        started(small_job(tmp_path), resume=str(named))
    assert main(command) == 0
    assert f"{named} has no checkpoint: starting over in it" in capsys.readouterr().err
    assert (named / "events" / "rank000.jsonl").read_bytes().startswith(before)
    assert [e.start_step for e in events_of(named, schema.RunStarted)] == [0, 0]
    assert checkpoint.verify(checkpoint.find(named / "checkpoints")[0]).step == 12


def test_only_damaged_checkpoints_are_left_for_a_person(
    tmp_path: Path, stop_after: StopAfter
) -> None:
    """And who begins second of two starts of one command is refused, and removes nothing."""
    job, path = small_job(tmp_path), tmp_path / "run"
    late = open_run(job, run_dir=path, resume="never", say=print)
    stop_after(2)
    assert run(job, path) == 75
    before = tree(path)
    with late.run, pytest.raises(RunFolderError, match="already contains a run"):
        late.begin(job="other", resolved="other")
    assert tree(path) == before
    (path / "checkpoints" / "step-00000002" / "state.json").write_text("{}")
    before = tree(path)
    for resume in ("auto", str(path)):
        with pytest.raises(CheckpointError, match=r"no valid checkpoint .*not changed"):
            run(job, path, resume=resume)
    assert tree(path) == before


def flip_training_data(folder: Path) -> Path:
    (path,) = (folder / "data").rglob("train.bin")
    raw = bytearray(path.read_bytes())
    raw[HEADER_BYTES + 100 : HEADER_BYTES + 200] = bytes(100)
    path.write_bytes(raw)
    return path


def test_changed_training_data_is_refused_at_start_and_at_resume(
    tmp_path: Path, stop_after: StopAfter
) -> None:
    job, named = small_job(tmp_path), tmp_path / "mine"
    stop_after(2)
    assert run(job, named) == 75
    before = tree(named)
    path = flip_training_data(tmp_path)
    for run_dir, resume in ((tmp_path / "new", "never"), (named, "auto")):
        with pytest.raises(DataError, match=r"train\.bin: the tokens changed .* hash is \w+, but"):
            run(job, run_dir, resume=resume)
    assert tree(named) == before and not (tmp_path / "new").exists()
    path.unlink()
    stop_after(None)
    assert run(job, named, resume="auto") == 0, "prepared again as the message says"


@pytest.mark.slow
def test_other_held_out_tokens_are_reported_at_resume(
    tmp_path: Path, stop_after: StopAfter
) -> None:
    named = tmp_path / "mine"
    stop_after(2)
    assert run(small_job(tmp_path), named) == 75
    folder = tmp_path / "data" / "text"
    files = [f"data.train={folder}/train.bin", f"data.val={tmp_path}/other.bin", "data.source="]
    tokens = TokenFile(folder / "val.bin").tokens[::-1]
    write_tokens(tmp_path / "other.bin", [tokens], vocab_size=256, tokenizer="bytes")
    assert run(small_job(tmp_path, *files), named, resume="auto") == 75
    (changed,) = [e for e in events_of(named, schema.Warning_) if e.code == "job-changed"]
    assert "the held-out tokens" in changed.message
