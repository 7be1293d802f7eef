"""Which runs there are, and how they are: alive, slow, killed, also where locks lie."""

from __future__ import annotations

import atexit
import errno
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from offloadtrain_tui.reading import log_reader, runs, tail
from offloadtrain_tui.reading.log_reader import RunReader
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.summary import before_first_step, headline, numbers, when
from offloadtrain_tui.view_state import ViewState

from offloadtrain.events import schema
from tests.tui import recordings
from tests.tui.recordings import (
    BEGIN_S,
    Timed,
    append,
    lines,
    plain,
    ranks,
    snapshot_of,
    unlucky,
    write,
)

_TRAINERS = """
import os, sys, time
from pathlib import Path
from offloadtrain.train.run_folder import RunFolder
for line in sys.stdin:
    if os.fork() == 0:
        os.setsid()
        folder, *options = line.split()
        run = RunFolder(Path(folder))
        run.begin("")
        run.write_run({})
        if options and os.fork() == 0:
            time.sleep(600)
        print(os.getpid(), flush=True)
        time.sleep(600)
"""


@cache
def _trainers() -> subprocess.Popen[str]:
    """One process for all tests, which imports torch once and forks on a line."""
    command = [sys.executable, "-c", _TRAINERS]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_ended, process)
    return process


def _ended(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


@contextmanager
def trainer(folder: Path, *options: str) -> Iterator[int]:
    """The pid of a process that holds the run's lock, in a group of its own."""
    process = _trainers()
    assert process.stdin is not None and process.stdout is not None
    print(folder, *options, file=process.stdin, flush=True)
    pid = int(process.stdout.readline())
    try:
        yield pid
    finally:
        os.killpg(pid, signal.SIGKILL)


def killed(pid: int, folder: Path) -> None:
    """Returns once its run is dead; nothing collects it: a zombie is dead too."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while runs.is_alive(folder):
        assert time.monotonic() < deadline


def state(folder: Path, now_s: float | None = None) -> str:
    """Its state at a time; if none is given, a second after its last event."""
    if now_s is None:
        last = (folder / "events/rank000.jsonl").read_bytes().splitlines()[-1]
        now_s = json.loads(last)["t"] + 1.0
    return snapshot_of(folder, now_s).state


def live(folder: Path, steps: int = 20) -> Path:
    """A run whose last step was just now."""
    events = plain(steps)[:-1]
    shift = time.time() - events[-1][0]
    return write(folder, [(time_s + shift, event) for time_s, event in events])


def rewrite_run(folder: Path, name: str) -> None:
    """Add 1 to a number of run.json."""
    values = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(values | {name: values[name] + 1}))


def test_the_state_of_a_run_follows_its_process(tmp_path: Path) -> None:
    """Running; slow but not dead in a long step; starting before it writes; killed at once."""
    now_s = time.time()  # before its last event: what follows may take seconds
    folder = live(tmp_path / "run")
    step = recordings.step(1, random.Random(0), scale=60.0)
    with trainer(folder) as pid:
        assert state(folder, now_s + 29) == "running"
        assert state(folder, now_s + 60) == state(folder, now_s + 6000) == "slow"
        log = folder / "events/rank000.jsonl"
        short_steps = log.read_bytes()
        log.write_bytes(b"".join(lines([(BEGIN_S, recordings.start()), (now_s, step)])))
        assert state(folder, now_s + 200) == "running", "its steps take a minute"
        assert state(folder, now_s + 300) == "slow"
        log.write_bytes(short_steps)
        facts = (folder / "run.json").read_text()
        rewrite_run(folder, "pid")  # a resumed run reads its checkpoint: the log is of another pid
        assert state(folder) == "starting"
        (folder / "run.json").write_text(facts)
        rewrite_run(folder, "pid_start_ticks")  # another process with the pid
        assert runs.is_alive(folder) is False
        (folder / "run.json").write_text(facts)
        killed(pid, folder)
        assert state(folder) == "killed"


def test_a_child_that_holds_the_lock_is_no_run(tmp_path: Path) -> None:
    folder = live(tmp_path / "run")
    with trainer(folder, "fork") as pid:
        assert runs.is_alive(folder)
        killed(pid, folder)
        assert runs._is_locked(folder / "lock"), "by the child"
        assert runs.is_alive(folder) is False


def test_on_another_host_silence_is_not_death_and_clocks_may_differ_by_hours(
    tmp_path: Path,
) -> None:
    """A run whose records arrive is alive, whatever their times; one that is silent is unknown."""
    folder = live(tmp_path / "run")
    assert runs.is_alive(folder) is None
    assert state(folder) == "running"
    assert state(folder, time.time() + 3600) == "unknown"
    for ahead_s in (-7200.0, 7200.0):
        events = plain(20)[:-1]
        last_s = events[-1][0]
        folder = write(tmp_path / f"run{ahead_s}", events)
        reader, now_s = RunReader(runs.open_run(folder)), last_s - ahead_s
        assert reader.read_to_end(now_s).state == ("unknown" if ahead_s < 0 else "running")
        append(folder, (last_s + 1, recordings.step(21, random.Random(0))))
        assert reader.read_to_end(now_s + 1).state == "running"
        assert reader.read_to_end(now_s + 600).state == "unknown"
        reader.close()


def test_logs_that_are_missing_or_may_not_be_read_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "run", *ranks(4))
    for rank in (0, 1):
        (folder / f"events/rank{rank:03d}.jsonl").unlink()
    assert snapshot_of(folder, BEGIN_S).problem == "logs of 2 of 4 ranks, shown is rank 2"

    def refuse(path: Path, **_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(tail, "open_descriptor", refuse)
    folder = write(tmp_path / "refused", plain(5))
    reader = RunReader(runs.open_run(folder))
    problem = reader.read_to_end(BEGIN_S).problem
    assert problem == f"not read: {folder / 'events/rank000.jsonl'}: no permission"
    monkeypatch.setattr(os, "access", lambda *_: False)
    snapshot = reader.read_to_end(BEGIN_S)
    assert snapshot.problem == f"not read: {folder}/events: no permission"
    assert snapshot.state == "unknown"
    shutil.rmtree(folder)
    assert reader.read_to_end(BEGIN_S).problem == f"not read: {folder}/events: it is gone"
    reader.close()


def shown_after(folder: Path, after_s: float, *later: Timed, steps: int = 20) -> ViewState:
    """What is shown so many seconds after the begin, of a run whose end was not recorded."""
    run = write(folder, [*plain(steps)[:-1], *later])
    return ViewState(snapshot_of(run, BEGIN_S + after_s), BEGIN_S + after_s)


def test_the_end_of_a_failed_run_is_on_every_screen(tmp_path: Path) -> None:
    end = schema.RunEnded(status="failed", step=21, message="TrainingError: the loss is nan")
    bad = replace(recordings.step(21, random.Random(0)), loss=math.nan)
    folder = tmp_path / ("long" * 40)
    shown = shown_after(folder, 50, (BEGIN_S + 40, bad), (BEGIN_S + 41, end))
    assert numbers(shown).plain.startswith(" loss nan")
    assert when(shown, {}).plain.splitlines()[0] == "✖ TrainingError: the loss is nan"
    assert "✖ failed  step 21, train.steps = 20" in headline(shown, {}, 80).plain[:80]


def test_a_resumed_run_is_starting_until_its_first_step(tmp_path: Path) -> None:
    """Also if it has more steps than it is to make."""
    set_up = schema.SetUp(duration_s=92.0, parts_s={"reading weights": 40.0})
    start = recordings.start(steps=30, start_step=15)
    shown = shown_after(tmp_path / "run", 95, (BEGIN_S + 90, start), (BEGIN_S + 90, set_up))
    view = shown.snapshot.first
    assert (view.step, view.total_steps, view.active_alerts()) == (15, 30, [])
    assert shown.snapshot.state == "starting"
    words = before_first_step(shown)
    assert words.startswith("first step: 5s, resumed after step 15; set up in 1m32s")
    assert words.endswith("(reading weights 40 s)")
    assert View.at(view.history, BEGIN_S + 80).step == 20, "before that"
    start = recordings.start(steps=30, start_step=40)
    end = schema.RunEnded(status="done", step=40, message="")
    later: list[Timed] = [(BEGIN_S + 90, start), (BEGIN_S + 91, end)]
    shown = shown_after(tmp_path / "longer", 95, *later, steps=40)
    assert "step 40, train.steps = 30" in headline(shown, {}, 80).plain
    assert numbers(shown).plain == " no step since it resumed at 40"


def test_the_newest_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("20260101-000000-a", "20260301-000000-b", "20260201-000000-c"):
        write(tmp_path / name, plain(2))
    (tmp_path / "latest").symlink_to("20260101-000000-a")
    (tmp_path / "notes").mkdir()
    assert [path.name[-1] for path in runs.all_runs(tmp_path)] == ["b", "c", "a"]
    assert runs.find([], tmp_path)[0].name.endswith("b")
    assert runs.find([tmp_path])[0].name.endswith("b")
    assert runs.find([tmp_path / "latest"])[0].name.endswith("a")
    log = tmp_path / "20260101-000000-a/events/rank000.jsonl"
    assert runs.find([log])[0].logs == (log,)
    assert runs.find([], tmp_path / "nothing") == []
    monkeypatch.chdir(tmp_path.parent)
    listed = runs.all_runs(Path(tmp_path.name))[0]
    assert listed == runs.find([Path(tmp_path.name) / "20260301-000000-b"])[0].folder, (
        "a listed run is known as the open one"
    )
    for name, at_s in (("y", 2e9), ("z", 1e9), ("20260401-000000-d", 0.0)):
        os.utime(write(tmp_path / name, plain(2)) / "run.json", (at_s, at_s))
    ordered = [path.name[-1] for path in runs.all_runs(tmp_path)]
    assert ordered == ["y", "d", "b", "c", "a", "z"], "a name without a time has that of its start"
    with pytest.raises(runs.RunError, match="is not there: give a run folder"):
        runs.find([tmp_path / "none"])
    with pytest.raises(runs.RunError, match="a folder without runs"):
        runs.find([tmp_path / "notes"])


def test_every_rank_is_read_also_one_that_comes_late(tmp_path: Path) -> None:
    logs = ranks(4, steps=10)
    folder = write(tmp_path / "run", *logs[:3])
    reader = RunReader(runs.open_run(folder))
    reader.read()
    assert [view.history.rank for view in reader.snapshot(0.0).views] == [0, 1, 2]
    (folder / "events/rank003.jsonl").write_bytes(b"".join(lines(logs[3], 3)))
    reader._looked_s = 0.0
    reader.read()
    views = reader.snapshot(0.0).views
    assert [view.step for view in views] == [10, 10, 10, 8]
    reader.close()


def test_a_long_log_is_shown_by_its_end_while_it_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain(16_000))
    reader = RunReader(runs.open_run(folder))
    assert reader.read(most_lines=500)
    early = reader.snapshot(time.time())
    assert not early.is_complete and early.first.step == 16_000
    while reader.read() or not reader.is_complete:
        pass
    late = reader.snapshot(time.time())
    assert late.is_complete and late.first.length == 16_000
    reader.close()


def test_a_log_of_long_lines_is_read_to_its_end(tmp_path: Path) -> None:
    """Samples of eight GPUs take 3 KB each: one reading ends before it has many lines."""
    sample = (BEGIN_S, recordings.system(random.Random(0), gpus=8))
    last = (BEGIN_S + 9, recordings.step(77, random.Random(0)))
    folder = write(tmp_path / "run", [(BEGIN_S, recordings.start()), *[sample] * 1000, last])
    assert snapshot_of(folder, BEGIN_S + 9).first.step == 77


def test_the_list_of_runs_reads_only_logs_that_have_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "20260101-000000-a", plain(30))
    grows = write(tmp_path / "20260201-000000-b", plain(30)[:-1])
    write(tmp_path / "20260301-000000-c", unlucky(), host=socket.gethostname())
    write(tmp_path / "20260401-000000-d", plain(5000))
    read: list[str] = []
    glance = log_reader.glance
    monkeypatch.setattr(
        log_reader, "glance", lambda log: read.append(log.parts[-3][-1]) or glance(log)
    )
    runs_list = log_reader.Listing(tmp_path)
    rows = runs_list.rows(BEGIN_S)
    assert [row.step for row in rows] == [5000, 60, 30, 30] and read == ["d", "c", "b", "a"]
    assert [row.state for row in rows if row.folder != grows] == ["done", "killed", "done"]
    assert rows[0].total == 5000 and rows[0].loss is not None
    append(grows, (BEGIN_S + 60, recordings.step(31, random.Random(0))))
    assert runs_list.rows(BEGIN_S)[2].step == 31 and read == ["d", "c", "b", "a", "b"]
