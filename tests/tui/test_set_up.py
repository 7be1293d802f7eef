"""A set-up is seen while it goes on: in the monitor, in `status`, and after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from offloadtrain_tui import reports
from offloadtrain_tui.reading import runs
from offloadtrain_tui.reading.listing import list_runs
from offloadtrain_tui.reading.log_reader import RunReader, Snapshot
from offloadtrain_tui.summary import numbers
from offloadtrain_tui.view_state import ViewState

from offloadtrain.events import set_up_file
from offloadtrain.runtime.heartbeat import Heartbeat
from offloadtrain.train.run import ShownSetUp
from offloadtrain.train.run_folder import RunFolder
from tests.tui.recordings import plain, write

_SETTING_UP = """
import sys, time
from pathlib import Path
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.run import ShownSetUp
path = Path(sys.argv[1])
run = RunFolder(path) if path.exists() else RunFolder.new(path.parent, "job", path)
run.announce()
HEARTBEAT.enter("preparing data and model")
HEARTBEAT.advance("page-locking host memory", 30 << 30, 118 << 30)
with ShownSetUp(run.path, print):
    while not (path / "set_up.json").exists():
        time.sleep(0.01)
    print("shown", flush=True)
    time.sleep(600)
"""


@contextmanager
def setting_up(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _SETTING_UP, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "shown\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def seen(folder: Path) -> Snapshot:
    reader = RunReader(runs.open_run(folder))
    found = reader.read_to_end(time.time())
    reader.close()
    return found


def line(snapshot: Snapshot) -> str:
    return numbers(ViewState(snapshot, time.time())).plain


def test_a_new_run_is_seen_before_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with setting_up(folder) as process:
        assert seen(folder).state == "starting"
        assert "setting up: page-locking host memory 25% (30.0 GiB of 118.0" in line(seen(folder))
        assert [row.state for row in list_runs(tmp_path, time.time())] == ["starting"]
        assert reports.status(folder) == 0
        assert "starting  setting up: page-locking host memory 25%" in capsys.readouterr().out
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert seen(folder).state == "killed"
        said = line(seen(folder))
        assert re.search(r"set-up, last seen after \d+m?\d*s: page-locking host memory 25%", said)
    assert reports.status(folder) == 1


def test_a_resumed_run_is_seen_before_its_log_goes_on(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain(20), host=os.uname().nodename)
    (folder / "lock").touch()
    before = seen(folder).state
    with setting_up(folder):
        assert seen(folder).state == "starting"
        assert "page-locking host memory 25%" in line(seen(folder))
        assert seen(folder).lives_here
    assert (before, seen(folder).state) == ("done", "killed")
    set_up_file.remove(folder)
    assert seen(folder).state == before, "the log itself is as it was"


def test_a_file_of_another_process_is_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with setting_up(folder):
        values = json.loads((folder / "set_up.json").read_text())
        values["pid_start_ticks"] += 1
        frozen = ShownSetUp(folder, pytest.fail)._now()
        assert frozen.pid == os.getpid()
        text = json.dumps(values)
        until = time.monotonic() + 60
        while time.monotonic() < until:  # the process writes its own again, twice a second
            (folder / "set_up.json").write_text(text)
            found = runs.life_of(folder, seen(folder).first, time.time())
            if found.set_up is None:
                break
        assert (found.state, found.set_up) == ("starting", None), "its lock is held, by whom ever"


def test_on_another_host_it_is_believed_for_a_while(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [])
    now = ShownSetUp(folder, pytest.fail)._now()
    values = json.loads(json.dumps({name: getattr(now, name) for name in now.__slots__}))
    (folder / "set_up.json").write_text(json.dumps(values | {"host": "elsewhere"}))
    view = seen(folder).first
    assert runs.life_of(folder, view, now.time_s + 5).state == "starting"
    assert runs.life_of(folder, view, now.time_s + 3600).state == "unknown"


@pytest.mark.parametrize(
    "changed",
    [
        {"pid": "1"},
        {"pid": True},
        {"done_bytes": -1},
        {"time_s": 1e300},
        {"phase": None},
        {"total_bytes": 1 << 80},
        {"oom_kills": []},
    ],
)
def test_what_is_no_set_up_is_not_read(tmp_path: Path, changed: dict[str, Any]) -> None:
    now = ShownSetUp(tmp_path, pytest.fail)._now()
    set_up_file.write(tmp_path, now)
    assert set_up_file.read(tmp_path) == now
    values = json.loads((tmp_path / "set_up.json").read_text())
    (tmp_path / "set_up.json").write_text(json.dumps(values | changed))
    assert set_up_file.read(tmp_path) is None


def test_its_progress_is_live_and_gone_afterwards(tmp_path: Path) -> None:
    beat = Heartbeat()
    shares: list[int] = []
    with ShownSetUp(tmp_path, pytest.fail, beat):
        for done in range(0, 101, 50):
            beat.advance("reading weights", done, 100)
            until = time.monotonic() + 60
            while (now := set_up_file.read(tmp_path)) is None or now.done_bytes != done:
                assert time.monotonic() < until
                time.sleep(0.01)
            shares.append(now.done_bytes)
    assert shares == [0, 50, 100]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    told: list[str] = []
    with ShownSetUp(tmp_path / "missing", told.append):
        until = time.monotonic() + 60
        while not told and time.monotonic() < until:
            time.sleep(0.01)
    assert len(told) == 1
    assert "the set-up's progress cannot be written" in told[0]


def test_a_refused_start_leaves_nothing(tmp_path: Path) -> None:
    run = RunFolder.new(tmp_path, "job")
    with run:
        run.announce()
        set_up_file.write(run.path, ShownSetUp(run.path, pytest.fail)._now())
        assert run.path.is_dir()
    assert list(tmp_path.iterdir()) == []
