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
run = RunFolder(Path(sys.argv[1]))
run.begin("")
print("locked", flush=True)
time.sleep(60)
"""


def is_running(path: Path) -> bool:
    """Whether a process holds the folder's lock; false where there is no lock to see."""
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


def test_the_names_above_a_checkpoint_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[Path] = set()
    monkeypatch.setattr(run_folder, "sync_folder", synced.add)
    with made(tmp_path / "a" / "runs") as run:
        assert synced == {tmp_path, tmp_path / "a", tmp_path / "a" / "runs", run.path}


def made(runs: Path, name: str = "job", path: Path | None = None) -> RunFolder:
    """One that has taken its first step."""
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


def test_a_folder_is_made_with_everything_in_it(tmp_path: Path, clock: Any) -> None:
    with made(tmp_path / "deep" / "runs") as run:
        assert run.path == tmp_path / "deep" / "runs" / "20260304-050607-job"
        assert run.run_id == run.path.name
        assert (run.path / "job.toml").read_text() == "job = 1\n"
        assert (run.path / "resolved.toml").read_text() == "resolved = 1\n"
        assert run.checkpoints.is_dir()
        assert run.events() == run.path / "events" / "rank000.jsonl"
        assert run.events(12).name == "rank012.jsonl" and run.events().parent.is_dir()


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with made(tmp_path / "runs") as run:
            run.write_run({})
            for path in (run.path, *run.path.iterdir()):
                assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(before)


def test_text_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from offloadtrain.train.run_folder import RunFolder\n"
        "run = RunFolder.new(Path(sys.argv[1]), 'job')\n"
        "run.begin('', '\\xfc = \\u2192'); run.keep()"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    root = Path(schema.__file__).parent.parent.parent
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=root, env=environment, check=True
    )
    assert (tmp_path / "latest" / "job.toml").read_bytes() == "\xfc = \u2192".encode()


def test_run_json_says_who_runs(tmp_path: Path) -> None:
    with made(tmp_path) as run:
        run.write_run({"num_params": 7, "where": Path("x")})
        facts = json.loads((run.path / "run.json").read_text())
    assert facts["run_id"] == run.run_id and facts["schema"] == schema.SCHEMA
    assert facts["pid"] == os.getpid() and facts["argv"] == sys.argv
    assert facts["pid_start_ticks"] > 0 and abs(facts["started_s"] - time.time()) < 60
    assert facts["num_params"] == 7 and facts["where"] == "x"


def test_runs_of_one_second_get_names_of_their_own(tmp_path: Path, clock: Any) -> None:
    names = []
    for _ in range(12):
        with made(tmp_path) as run:
            names.append(run.run_id)
    assert names[:3] == [f"20260304-050607-job{end}" for end in ("", "+1", "+2")]
    assert len(set(names)) == 12
    assert [path.name for path in of_job(tmp_path, "job")] == [
        f"20260304-050607-job{end}" for end in (*(f"+{n}" for n in range(11, 0, -1)), "")
    ]


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
    for _ in range(2):
        with made(tmp_path) as run:
            assert (tmp_path / "latest").resolve() == run.path
            assert os.readlink(tmp_path / "latest") == run.run_id, "must survive a move"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_text("mine")
    made(tmp_path).close()
    assert (tmp_path / "latest").read_text() == "mine"
    assert not list(tmp_path.glob(".latest*"))


def test_latest_replaces_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    with made(tmp_path) as run:
        assert (tmp_path / "latest").resolve() == run.path


def test_a_clock_that_is_set_back_makes_no_run_the_older_one(tmp_path: Path, clock: Any) -> None:
    names = []
    for year in (2026, 2025, 2024, 2027):
        clock.now = clock.now.replace(year=year)
        with made(tmp_path) as run:
            names.append(run.run_id)
        assert of_job(tmp_path, "job")[0].name == names[-1], "the newest"
    assert names[1:3] == ["20260304-050607-job+1", "20260304-050607-job+2"]
    assert names[3] == "20270304-050607-job"


def test_the_newest_is_of_exactly_this_job(tmp_path: Path, clock: Any) -> None:
    assert of_job(tmp_path / "none", "job") == []
    for name in ("job", "job-2", "my-job", "job.1", "job-1", "other"):
        made(tmp_path, name).close()
        clock.now = clock.now.replace(second=clock.now.second + 1)
    (tmp_path / "29990101-000000-job").write_text("a file")
    (tmp_path / "notes-job").mkdir()
    for name in ("job", "job-2", "my-job", "job.1", "job-1"):
        (found,) = of_job(tmp_path, name)
        assert found.name.split("-", 2)[2] == name
    assert of_job(tmp_path, "jo") == []


def test_a_named_folder_among_the_runs_is_the_latest_too(tmp_path: Path) -> None:
    with made(tmp_path / "runs", path=tmp_path / "runs" / "mine") as run:
        assert (tmp_path / "runs" / "latest").resolve() == run.path


# ---- the lock


def test_a_running_folder_is_refused_and_says_who_runs(tmp_path: Path) -> None:
    run = made(tmp_path)
    assert is_running(run.path)
    with pytest.raises(RunFolderError, match=rf"already running, pid {os.getpid()}: stop it"):
        RunFolder(run.path)
    run.close()
    run.close()
    assert not is_running(run.path)
    with RunFolder(run.path) as again:
        assert again.path == run.path and is_running(run.path)


def test_where_no_locks_are_kept_a_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre, mounted without flock."""
    with made(tmp_path) as run:
        assert run.has_locks

    def refused(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refused)
    with made(tmp_path) as run:
        assert not run.has_locks
    job, path = small_job(tmp_path, "train.steps=3", "train.eval_every=0"), tmp_path / "run"
    assert small_job_run(job, path) == 0
    (told,) = [w for w in events_of(path, schema.Warning_) if w.code == "no-locks"]
    assert "keeps no locks" in told.message


def test_a_killed_run_is_not_running(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.close()
    root = Path(schema.__file__).parent.parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], cwd=root, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        assert is_running(run.path)
        with pytest.raises(RunFolderError, match=f"pid {holder.pid}"):
            RunFolder(run.path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert not is_running(run.path)
    RunFolder(run.path).close()


def test_one_who_looks_at_the_lock_stops_nobody(tmp_path: Path) -> None:
    run = made(tmp_path)
    run.close()
    looking = os.open(run.path / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.03, lambda: os.close(looking)).start()
    RunFolder(run.path).close()


def test_looking_needs_no_right_to_write(tmp_path: Path) -> None:
    run = made(tmp_path)
    (run.path / "lock").chmod(0o400)
    assert is_running(run.path)
    run.close()
    assert not is_running(run.path) and not is_running(tmp_path)


# ---- a folder asked for by name


def test_a_named_folder_is_made_once(tmp_path: Path) -> None:
    mine = tmp_path / "a b" / "mine"
    with made(tmp_path / "runs", path=mine) as run:
        assert run.path == mine
        assert list((tmp_path / "a b").iterdir()) == [mine], "no link in a folder of the user's"
        run.write_run({})
    with pytest.raises(
        RunFolderError, match=r"already contains a run: it has no checkpoint yet; .*--resume auto"
    ):
        made(tmp_path / "runs", path=mine)
    (mine / "checkpoints" / "step-00000001").mkdir()
    with pytest.raises(RunFolderError, match="already contains a run: resume it with --resume"):
        made(tmp_path / "runs", path=mine)


def test_a_named_folder_in_which_a_run_begins_is_left_as_it_is(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    with made(tmp_path, path=mine):  # has not written run.json yet
        with pytest.raises(RunFolderError, match="already running"):
            RunFolder.new(tmp_path, "job", mine)
        assert (mine / "job.toml").read_text() == "job = 1\n"


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
    found = {path.name for path in (tmp_path / "mine").iterdir()}
    assert found == {"lock", "job.toml", "resolved.toml", "events", "checkpoints"}
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


def test_what_is_no_run_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunFolderError, match="is not a run folder"):
            RunFolder(path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
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
