"""Run folders: made private, named by time, locked for the run's life, found again; a start that
comes to nothing changes nothing."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from offloadtrain_tui.reading.log_reader import list_runs

from offloadtrain.cli.exit_codes import FAILED, USAGE, of_error
from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError, OffloadTrainError
from offloadtrain.config.job import Config, load
from offloadtrain.data.tokens import HEADER_BYTES, DataError, TokenFile
from offloadtrain.events import schema
from offloadtrain.model.transformer import Transformer
from offloadtrain.train import run_folder
from offloadtrain.train.checkpoint import checkpoint
from offloadtrain.train.checkpoint.manifest import CheckpointError
from offloadtrain.train.run_folder import RunFolder, RunFolderError, of_job, open_run
from tests.conftest import Command
from tests.data.tiny import write_tokens
from tests.train.small_job import JOB, events_of, run, small_job, write_text

HOLDER = """
import sys, time
from pathlib import Path
from offloadtrain.train.run_folder import RunFolder
run = RunFolder.new(Path(sys.argv[1]), "job", Path(sys.argv[2]))
run.begin("", "\\xfc = \\u2192")
run.keep()
print("locked", flush=True)
time.sleep(60)
"""


def is_running(path: Path) -> bool:
    """Tell whether a process holds the folder's lock; false where no lock is visible."""
    try:
        fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def made(runs: Path, name: str = "job", path: Path | None = None) -> RunFolder:
    """Return the folder of a run that has taken its first step."""
    run = RunFolder.new(runs, name, path)
    with ExitStack() as on_failure:
        on_failure.callback(run.close)
        run.begin("resolved = 1\n", "job = 1\n")
        on_failure.pop_all()
    run.keep()
    return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the time of day that folders are named by."""

    class Clock:
        now = datetime(2026, 3, 4, 5, 6, 7)

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return Clock.now

    monkeypatch.setattr(run_folder, "datetime", Stopped)
    return Clock


def test_a_folder_is_made_durable_and_private_with_everything_in_it(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    monkeypatch.setattr(run_folder, "sync_folder", synced.add)
    runs, before = tmp_path / "deep" / "runs", os.umask(0)
    try:
        with made(runs) as run:
            run.write_run({"num_params": 7, "where": Path("x")})
    finally:
        os.umask(before)
    assert synced == {tmp_path, tmp_path / "deep", runs, run.path}
    assert run.path == runs / "20260304-050607-job" and run.run_id == run.path.name
    assert (run.path / "job.toml").read_text() == "job = 1\n"
    assert (run.path / "resolved.toml").read_text() == "resolved = 1\n"
    assert run.checkpoints.is_dir()
    assert run.events() == run.path / "events" / "rank000.jsonl"
    assert run.events(12).name == "rank012.jsonl" and run.events().parent.is_dir()
    for path in (run.path, *run.path.iterdir()):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    facts = json.loads((run.path / "run.json").read_text())
    assert facts["run_id"] == run.run_id and facts["schema"] == schema.SCHEMA
    assert facts["pid"] == os.getpid() and facts["argv"] == sys.argv
    assert facts["pid_start_ticks"] > 0 and abs(facts["started_s"] - time.time()) < 60
    assert facts["num_params"] == 7 and facts["where"] == "x"


def test_latest_follows_and_never_replaces_a_users_file(tmp_path: Path, clock: Any) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to("gone")
    for path in (None, None, tmp_path / "named"):
        with made(tmp_path, path=path) as run:
            assert latest.resolve() == run.path
            assert os.readlink(latest) == run.run_id, "must survive a move"
    latest.unlink()
    latest.write_text("mine")
    made(tmp_path).close()
    assert latest.read_text() == "mine"
    assert not list(tmp_path.glob(".latest*"))


def test_the_newest_is_of_exactly_this_job(tmp_path: Path, clock: Any) -> None:
    assert of_job(tmp_path / "none", "job") == []
    for name in ("job", "job-2", "my-job", "job.1", "job-1", "other"):
        made(tmp_path, name).close()
        clock.now = clock.now.replace(second=clock.now.second + 1)
    (tmp_path / "29990101-000000-job").write_text("a file")
    (tmp_path / "notes-job").mkdir()
    for name in ("job", "job-2", "my-job", "job.1", "job-1"):
        (newest,) = of_job(tmp_path, name)
        assert newest.name.split("-", 2)[2] == name
    assert of_job(tmp_path, "jo") == []


# ---- the lock


def test_a_running_folder_is_refused_with_its_process(tmp_path: Path) -> None:
    run = made(tmp_path)
    (run.path / "lock").chmod(0o400)  # looking needs no right to write
    assert is_running(run.path)
    for open_again in (
        lambda: RunFolder(run.path),
        lambda: RunFolder.new(tmp_path, "job", run.path),
    ):
        with pytest.raises(RunFolderError, match=rf"already running, pid {os.getpid()}"):
            open_again()
    assert (run.path / "job.toml").read_text() == "job = 1\n"
    run.close()
    run.close()
    assert not is_running(run.path)
    looking = os.open(run.path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.03, lambda: os.close(looking)).start()
    with RunFolder(run.path) as again:
        assert again.path == run.path and is_running(run.path)


def test_where_no_locks_are_kept_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre, mounted without flock."""

    def refused(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refused)
    job, path = small_job(tmp_path, "train.steps=3", "train.eval_every=0"), tmp_path / "run"
    assert run(job, path) == 0
    (warning,) = [w for w in events_of(path, schema.Warning_) if w.code == "no-locks"]
    assert "keeps no locks" in warning.message


def test_a_killed_run_is_not_running(tmp_path: Path) -> None:
    """Its job is UTF-8 whatever the locale."""
    path, root = tmp_path / "run", Path(schema.__file__).parent.parent.parent
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", HOLDER, str(tmp_path), str(path)]
    with subprocess.Popen(command, cwd=root, env=plain, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        assert is_running(path)
        with pytest.raises(RunFolderError, match=f"pid {holder.pid}"):
            RunFolder(path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert not is_running(path)
    RunFolder(path).close()
    assert (path / "job.toml").read_bytes() == "\xfc = \u2192".encode()


# ---- a folder asked for by name


def test_a_named_folder_is_made_once(tmp_path: Path) -> None:
    named = tmp_path / "a b" / "mine"
    with made(tmp_path / "runs", path=named) as run:
        assert run.path == named
        assert list((tmp_path / "a b").iterdir()) == [named], "no link in a folder of the user's"
        run.write_run({})
        with pytest.raises(RunFolderError, match=r"already running, pid .* use another --run-dir"):
            made(tmp_path / "runs", path=named)
    with pytest.raises(
        RunFolderError, match=r"already contains a run: it has no checkpoint yet; .*--resume auto"
    ):
        made(tmp_path / "runs", path=named)
    (named / "checkpoints" / "step-00000001").mkdir()
    with pytest.raises(RunFolderError, match="already contains a run: resume it with --resume"):
        made(tmp_path / "runs", path=named)


def test_of_two_starts_at_once_the_second_takes_nothing_of_the_first_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunFolder.new(tmp_path, "job", tmp_path / "mine")
    second = RunFolder.new(tmp_path, "job", tmp_path / "mine")
    real = run_folder._lock

    def first_is_faster(path: Path) -> int:
        monkeypatch.setattr(run_folder, "_lock", real)
        first.begin("", "")
        return real(path)

    monkeypatch.setattr(run_folder, "_lock", first_is_faster)
    with pytest.raises(RunFolderError, match="already running"), second:
        second.begin("", "")
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert names == {"lock", "job.toml", "resolved.toml", "events", "checkpoints"}
    assert is_running(tmp_path / "mine")


def test_a_lock_whose_file_was_taken_away_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "lock", run_folder.take

    def taken_away(fd: int) -> bool:
        monkeypatch.setattr(run_folder, "take", real)
        path.unlink()
        return real(fd)

    monkeypatch.setattr(run_folder, "take", taken_away)
    fd = run_folder._lock(path)
    assert is_running(tmp_path)
    os.close(fd)


def test_a_run_on_a_read_only_mount_is_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "events").mkdir()
    monkeypatch.setattr(run_folder, "open_descriptor", refused)
    with pytest.raises(RunFolderError, match=r"lock cannot be locked: Read-only file system"):
        RunFolder(tmp_path)


def test_a_folder_that_cannot_be_made_or_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunFolderError, match="is not a run folder"):
            RunFolder(path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot be made at .*file/runs/.*: Not a directory"):
        made(tmp_path / "file" / "runs")
    with pytest.raises(RunFolderError, match=r"cannot be made at .*file: File exists"):
        made(tmp_path, path=tmp_path / "file")


def test_what_stops_a_start_is_named_and_a_full_disk_is_no_wrong_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "events").mkdir(parents=True)
    (tmp_path / "run" / "resolved.toml").mkdir()
    with RunFolder(tmp_path / "run") as run:
        with pytest.raises(RunFolderError, match=r"run/resolved\.toml: Is a directory$") as named:
            run.begin("")
        assert of_error(named.value) == USAGE
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            full = OSError(code, os.strerror(code))
            monkeypatch.setattr(run_folder, "replace_file", Mock(side_effect=full))
            with pytest.raises(OffloadTrainError, match=rf"run: {full.strerror}$") as refused:
                run.begin("")
            assert of_error(refused.value) == FAILED


# ---- starts: one that comes to nothing changes nothing


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


@pytest.fixture(scope="module")
def complete_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("complete")
    assert run(small_job(folder, "train.steps=4", "train.eval_every=0"), None) == 0
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
            run(small_job(tmp_path, change), None, resume=str(complete))
        assert tree(complete.parent) == before, change
    (row,) = list_runs(complete.parent, 0.0)
    assert row.state == "done" and row.step == 4
    (complete / "checkpoints" / "step-00000004" / "state.json").write_text("{}")
    before = tree(complete)
    with pytest.raises(ConfigError, match="another model"):
        run(small_job(tmp_path, "model.d_model=64"), None, resume=str(complete))
    assert tree(complete) == before
    longer = small_job(tmp_path, "train.steps=6", "train.eval_every=0")
    assert run(longer, None, resume=str(complete)) == 0, "as the run itself advises"


FAILING: list[tuple[str, int, str]] = [
    ("data.source=absent", 2, "data.source = absent is not there"),
    ("device.kind=cuda", 2, "device.kind"),
    ("model.vocab_size=100", 2, "model.vocab_size = 100"),
    ("data.seq_len=100000", 2, "data.seq_len"),
    ("optim.lr=-1", 2, "optim.lr"),
    ("device.machine=nowhere", 2, "nowhere"),
    ("offload.state=split16 offload.precision=fp32", 2, "split16"),
    ("device.process_memory_limit=1GiB", 2, "bounds the memory of a GPU"),
    ("model.d_model=65536 model.num_layers=9", 4, "small does not fit"),
]


def test_a_start_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("offloadtrain.hardware.telemetry.available_bytes", lambda: 100 << 30)
    write_text(tmp_path)
    job, runs = tmp_path / "job.toml", tmp_path / "runs"
    job.write_text(JOB.format(folder=tmp_path))
    for number, (overrides, code, message) in enumerate(FAILING):
        where = ["--run-dir", str(runs / "mine")] if number % 2 else []
        out, err = command("train", job, *where, "--set", *overrides.split(), code=code)
        assert message in err and "Traceback" not in err and out == ""
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
                run(small_job(tmp_path), run_dir)
    assert tree(complete.parent) == before
    assert list(named.iterdir()) == [] and not (tmp_path / "new").exists()


def test_a_failure_after_the_first_step_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("offloadtrain.train.trainer.Trainer._between_steps", fails)
    with pytest.raises(ZeroDivisionError):
        run(small_job(tmp_path), None)
    (row,) = list_runs(tmp_path / "runs", 0.0)
    assert (row.state, row.step) == ("failed", 1)
    assert (tmp_path / "runs" / "latest").resolve() == row.folder


@pytest.mark.slow
def test_auto_passes_over_newer_runs_without_a_good_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, runs = small_job(tmp_path), tmp_path / "runs"
    good, damaged, empty, other = (
        runs / f"2030010{day}-000000-{name}"
        for day, name in ((1, "small"), (2, "small"), (3, "small"), (4, "other"))
    )
    for path in (good, damaged, other):
        assert run(job, path, stop_after=2) == 75
    for saved in checkpoint.find(damaged / "checkpoints"):
        (saved / "state.json").write_text("{}")
    (empty / "events").mkdir(parents=True)
    (empty / "checkpoints").mkdir()
    (empty / "run.json").write_text("{}")
    left = {path: tree(path) for path in (damaged, empty, other)}
    assert run(job, None, resume="auto") == 0
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
    tmp_path: Path, command: Command, method: str, step: int
) -> None:
    write_text(tmp_path)
    job, named = tmp_path / "job.toml", tmp_path / "mine"
    job.write_text(JOB.format(folder=tmp_path))
    arguments = ["train", str(job), "--run-dir", str(named), "--resume", "auto"]
    program = [sys.executable, "-c", _KILLED, method, str(step), *arguments]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run(program, env=alone, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    before = (named / "events" / "rank000.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match=r"--run-dir .*mine --resume auto"):
        run(small_job(tmp_path), named)
    with pytest.raises(ConfigError, match=r"--run-dir .*mine --resume auto"):
        run(small_job(tmp_path), None, resume=str(named))
    assert f"{named} has no checkpoint: starting over in it" in command(*arguments).err
    assert (named / "events" / "rank000.jsonl").read_bytes().startswith(before)
    assert [e.start_step for e in events_of(named, schema.RunStarted)] == [0, 0]
    assert checkpoint.verify(checkpoint.find(named / "checkpoints")[0]).step == 12


def test_only_damaged_checkpoints_are_left_for_a_person(tmp_path: Path) -> None:
    """And who begins second of two starts of one command is refused, and removes nothing."""
    job, path = small_job(tmp_path), tmp_path / "run"
    late = open_run(job, run_dir=path, resume="never", say=print)
    assert run(job, path, stop_after=2) == 75
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


def test_changed_training_data_is_refused_at_start_and_at_resume(tmp_path: Path) -> None:
    job, named = small_job(tmp_path), tmp_path / "mine"
    assert run(job, named, stop_after=2) == 75
    before = tree(named)
    path = flip_training_data(tmp_path)
    for run_dir, resume in ((tmp_path / "new", "never"), (named, "auto")):
        with pytest.raises(DataError, match=r"train\.bin: the tokens changed .* hash is \w+, but"):
            run(job, run_dir, resume=resume)
    assert tree(named) == before and not (tmp_path / "new").exists()
    path.unlink()
    assert run(job, named, resume="auto") == 0, "prepared again as the message says"


# ---- which folder `--resume` and `--run-dir` mean


def opened(job: Config, resume: str, run_dir: Path | None = None) -> tuple[RunFolder, bool]:
    """Return the folder, begun as a start does, and whether it has a checkpoint."""
    messages: list[str] = []
    start = open_run(job, run_dir=run_dir, resume=resume, say=messages.append)
    assert start.begin(job="text", resolved=jobs.dump(job)) == []
    start.run.keep()
    start.run.close()
    assert (resume == "auto" and not start.checkpoint) == bool(messages)
    return start.run, start.checkpoint is not None


def test_auto_takes_the_newest_run_of_the_job_that_is_not_complete(tmp_path: Path) -> None:
    job, runs = small_job(tmp_path), tmp_path / "runs"
    assert opened(job, "auto")[1] is False
    for name in ("20300101-000000-small", "20300102-000000-small", "20300103-000000-other"):
        assert run(job, runs / name, stop_after=2) == 75
    assert opened(job, "auto")[0].path == runs / "20300102-000000-small"
    assert run(job, runs / "20300102-000000-small", resume="auto") == 0
    longer = small_job(tmp_path, "train.steps=20")
    folder, resumes = opened(longer, "auto")
    assert resumes and load(folder.path / "resolved.toml") == longer, "the job as run now"
    assert opened(job, "auto")[1] is False, "complete, so a new run"


def test_a_run_dir_is_made_or_gone_on_with(tmp_path: Path) -> None:
    job, named = small_job(tmp_path), tmp_path / "named"
    assert run(job, named, resume="auto", stop_after=2) == 75
    with RunFolder(named), pytest.raises(RunFolderError, match="already running"):
        opened(job, str(named))
    assert opened(job, "auto", named)[1] is True
    with pytest.raises(RunFolderError, match="already contains a run"):
        opened(job, "never", named)
    with pytest.raises(ConfigError, match="are different folders"):
        opened(job, str(named), tmp_path / "other")
    for resume in ("absent", "Auto", "."):
        with pytest.raises(ConfigError, match=r"no checkpoint .* give a run folder"):
            opened(job, resume)


@pytest.mark.slow
def test_other_held_out_tokens_are_reported_at_resume(tmp_path: Path) -> None:
    named = tmp_path / "mine"
    assert run(small_job(tmp_path), named, stop_after=2) == 75
    folder = tmp_path / "data" / "text"
    files = [f"data.train={folder}/train.bin", f"data.val={tmp_path}/other.bin", "data.source="]
    tokens = TokenFile(folder / "val.bin").tokens[::-1]
    write_tokens(tmp_path / "other.bin", [tokens], vocab_size=256, tokenizer="bytes")
    assert run(small_job(tmp_path, *files), named, resume="auto", stop_after=2) == 75
    (changed,) = [e for e in events_of(named, schema.Warning_) if e.code == "job-changed"]
    assert "the held-out tokens" in changed.message


def test_a_link_that_cannot_be_made_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(link: Path, target: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(link))

    monkeypatch.setattr(Path, "symlink_to", refused)
    assert run(small_job(tmp_path, "train.steps=3", "train.eval_every=0"), None) == 0
    (path,) = (tmp_path / "runs").iterdir()
    (warning,) = [e for e in events_of(path, schema.Warning_) if e.code == "latest-failed"]
    assert "Operation not permitted" in warning.message
