"""Run folders: made private, named by time, locked for the run's life, found again."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from offloadtrain.events import schema
from offloadtrain.train import run_folder
from offloadtrain.train.run_folder import RunFolder, RunFolderError, of_job
from tests.train.small_job import events_of, small_job
from tests.train.small_job import run as small_job_run

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


def test_runs_made_at_once_get_names_of_their_own(tmp_path: Path, clock: Any) -> None:
    runs: list[RunFolder] = []
    threads = [threading.Thread(target=lambda: runs.append(made(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.path for run in runs}) == 8
    assert all(is_running(run.path) for run in runs)
    assert (tmp_path / "latest").resolve() in {run.path for run in runs}
    for run in runs:
        run.close()


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


def test_runs_are_ordered_whatever_the_clock_shows(tmp_path: Path, clock: Any) -> None:
    """Of one second, and where the clock is set back."""
    names = []
    for year in (2026, *[2026] * 11, 2025, 2027):
        clock.now = clock.now.replace(year=year)
        with made(tmp_path) as run:
            names.append(run.run_id)
        assert [path.name for path in of_job(tmp_path, "job")] == names[::-1]
    prefix = "20260304-050607-job"
    assert names == [prefix, *(f"{prefix}+{n}" for n in range(1, 13)), "20270304-050607-job"]


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
    assert small_job_run(job, path) == 0
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


def test_a_disk_that_fails_leaves_no_lock_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "replace_file", full)
        with pytest.raises(RunFolderError, match="No space left on device"):
            made(tmp_path, path=tmp_path / "mine")
    assert not is_running(tmp_path / "mine")
    made(tmp_path, path=tmp_path / "mine").close()
