"""A set-up is shown while it runs: in the monitor, in `status`, and after a kill."""

from __future__ import annotations

import json
import os
import re
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
from offloadtrain_tui.reading.log_reader import Snapshot, list_runs
from offloadtrain_tui.summary import numbers
from offloadtrain_tui.view_state import ViewState

from offloadtrain.events import set_up_file
from offloadtrain.runtime.heartbeat import HEARTBEAT, Heartbeat
from offloadtrain.train.run import set_up_now, shown_set_up
from offloadtrain.train.run_folder import RunFolder
from tests.tui import recordings
from tests.tui.recordings import plain, write

_SETTING_UP = """
import sys, time
from pathlib import Path
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.train.run_folder import RunFolder
from offloadtrain.train.run import shown_set_up
path = Path(sys.argv[1])
run = RunFolder(path) if path.exists() else RunFolder.new(path.parent, "job", path)
run.announce()
HEARTBEAT.enter("preparing data and model")
HEARTBEAT.advance("page-locking host memory", 30 << 30, 118 << 30)
with shown_set_up(run.path, print):
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


def snapshot_of(folder: Path) -> Snapshot:
    return recordings.snapshot_of(folder, time.time())


def line(folder: Path) -> str:
    return numbers(ViewState(snapshot_of(folder), time.time())).plain


@pytest.mark.slow
def test_a_new_run_is_shown_before_its_log_and_after_a_kill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with setting_up(folder) as process:
        assert snapshot_of(folder).state == "starting"
        assert "setting up: page-locking host memory 25% (30.0 GiB of 118.0" in line(folder)
        assert [row.state for row in list_runs(tmp_path, time.time())] == ["starting"]
        assert reports.status(folder) == 0
        assert "starting  setting up: page-locking host memory 25%" in capsys.readouterr().out
        values = json.loads((folder / "set_up.json").read_text())
        text = json.dumps(values | {"pid_start_ticks": values["pid_start_ticks"] + 1})
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # the process writes its own again, twice a second
            (folder / "set_up.json").write_text(text)
            life = runs.life_of(folder, snapshot_of(folder).first, time.time())
            if life.set_up is None:
                break
        assert (life.state, life.set_up) == ("starting", None), "the file of another process"
        process.kill()
        process.wait()
        (folder / "set_up.json").write_text(json.dumps(values))
        assert snapshot_of(folder).state == "killed"
        words = r"set-up, last seen after \d+m?\d*s: page-locking host memory 25%"
        assert re.search(words, line(folder))
    assert reports.status(folder) == 1


def test_a_resumed_run_is_shown_before_its_log_continues(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain(20), host=os.uname().nodename)
    (folder / "lock").touch()
    before = snapshot_of(folder).state
    with setting_up(folder):
        assert snapshot_of(folder).state == "starting"
        assert "page-locking host memory 25%" in line(folder)
        assert snapshot_of(folder).lives_here
    assert (before, snapshot_of(folder).state) == ("done", "killed")
    set_up_file.remove(folder)
    assert snapshot_of(folder).state == before, "the log itself is unchanged"


def test_on_another_host_the_file_counts_for_a_while(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", [])
    now = set_up_now(HEARTBEAT, time.time(), {})
    values = json.loads(json.dumps({name: getattr(now, name) for name in now.__slots__}))
    (folder / "set_up.json").write_text(json.dumps(values | {"host": "elsewhere"}))
    view = snapshot_of(folder).first
    assert runs.life_of(folder, view, now.time_s + 5).state == "starting"
    assert runs.life_of(folder, view, now.time_s + 3600).state == "unknown"


WRONG: list[dict[str, Any]] = [
    *({"pid": value} for value in ("1", True)),
    *({"done_bytes": -1}, {"time_s": 1e300}, {"phase": None}, {"total_bytes": 1 << 80}),
    {"oom_kills": []},
]


def test_a_file_with_wrong_values_is_not_read(tmp_path: Path) -> None:
    now = set_up_now(HEARTBEAT, time.time(), {})
    set_up_file.write(tmp_path, now)
    assert set_up_file.read(tmp_path) == now
    values = json.loads((tmp_path / "set_up.json").read_text())
    for changed in WRONG:
        (tmp_path / "set_up.json").write_text(json.dumps(values | changed))
        assert set_up_file.read(tmp_path) is None, changed


def test_progress_is_live_and_removed_afterwards(tmp_path: Path) -> None:
    beat = Heartbeat()
    with shown_set_up(tmp_path, pytest.fail, beat):
        for done in range(0, 101, 50):
            beat.advance("reading weights", done, 100)
            deadline = time.monotonic() + 60
            while (now := set_up_file.read(tmp_path)) is None or now.done_bytes != done:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []
    warnings: list[str] = []
    with shown_set_up(tmp_path / "missing", warnings.append):
        deadline = time.monotonic() + 60
        while not warnings and time.monotonic() < deadline:
            time.sleep(0.01)
    (warning,) = warnings
    assert "the set-up's progress cannot be written" in warning


def test_a_refused_start_leaves_nothing(tmp_path: Path) -> None:
    run = RunFolder.new(tmp_path, "job")
    with run:
        run.announce()
        set_up_file.write(run.path, set_up_now(HEARTBEAT, time.time(), {}))
        assert run.path.is_dir()
    assert list(tmp_path.iterdir()) == []
