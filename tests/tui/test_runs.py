"""Which runs there are, and how they are: alive, slow, killed, also where locks lie."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from offloadtrain_tui.reading import listing, runs, tail
from offloadtrain_tui.reading.history import History, fold
from offloadtrain_tui.reading.listing import list_runs
from offloadtrain_tui.reading.log_reader import RunReader
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.summary import before_first_step, headline, numbers, when
from offloadtrain_tui.view_state import ViewState

from offloadtrain.events import schema
from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, lines, plain, ranks, unlucky, write

_TRAINER = """
import os, sys, time
from pathlib import Path
from offloadtrain.train.run_folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
run.begin("")
run.write_run({})
if "fork" in sys.argv:
    if os.fork() == 0:
        time.sleep(600)
print(os.getpid(), flush=True)
time.sleep(600)
"""


@contextmanager
def trainer(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run's lock, in a group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINER, str(folder), *options],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def state(folder: Path, now_s: float | None = None) -> str:
    """Its state at a time; if none is given, a second after its last event."""
    if now_s is None:
        last = (folder / "events/rank000.jsonl").read_bytes().splitlines()[-1]
        now_s = json.loads(last)["t"] + 1.0
    reader = RunReader(runs.open_run(folder))
    found = reader.read_to_end(now_s).state
    reader.close()
    return found


def live(folder: Path, steps: int = 20) -> Path:
    """A run whose last step was just now."""
    told = plain(steps)[:-1]
    shift = time.time() - told[-1][0]
    return write(folder, [(t + shift, e) for t, e in told])


def test_a_kill_is_seen_at_once(tmp_path: Path) -> None:
    folder = live(tmp_path / "run")
    with trainer(folder) as process:
        assert state(folder) == "running"
        process.kill()
        began = time.perf_counter()
        while runs.is_alive(folder):  # not reaped: a zombie is dead too
            assert time.perf_counter() - began < 120
        assert state(folder) == "killed"


def test_a_process_that_has_not_begun_to_write_is_starting(tmp_path: Path) -> None:
    """A resumed run reads its checkpoint while the log still ends with the killed one's steps."""
    folder = live(tmp_path / "run")
    with trainer(folder):
        known = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(known | {"pid": known["pid"] + 1}))
        assert state(folder) == "starting"


def test_a_child_that_keeps_the_lock_is_no_run(tmp_path: Path) -> None:
    folder = live(tmp_path / "run")
    with trainer(folder, "fork") as process:
        assert runs.is_alive(folder)
        process.kill()
        process.wait()
        assert runs._is_locked(folder / "lock"), "by the child"
        assert runs.is_alive(folder) is False


def test_another_process_with_the_pid_is_no_run(tmp_path: Path) -> None:
    folder = live(tmp_path / "run")
    with trainer(folder):
        known = json.loads((folder / "run.json").read_text())
        known["pid_start_ticks"] += 1
        (folder / "run.json").write_text(json.dumps(known))
        assert runs.is_alive(folder) is False


def test_a_long_step_is_slow_and_not_dead(tmp_path: Path) -> None:
    now_s = time.time()  # before its last event: what follows may take seconds
    folder = live(tmp_path / "run")
    with trainer(folder):
        assert state(folder, now_s + 29) == "running"
        assert state(folder, now_s + 60) == "slow"
        assert state(folder, now_s + 6000) == "slow"


def test_a_run_with_long_steps_is_slow_only_after_four_of_them(tmp_path: Path) -> None:
    told = [(BEGIN_S, recordings.start())]
    one = recordings.step(1, recordings.random.Random(0), scale=60.0)
    last_s = time.time()
    told.append((last_s, one))
    folder = write(tmp_path / "run", told)
    with trainer(folder):
        assert state(folder, last_s + 200) == "running"
        assert state(folder, last_s + 300) == "slow"


def test_on_another_host_silence_is_not_death(tmp_path: Path) -> None:
    folder = live(tmp_path / "run")
    assert runs.is_alive(folder) is None
    assert state(folder) == "running"
    assert state(folder, time.time() + 3600) == "unknown"


def test_another_host_s_clock_tells_no_lies(tmp_path: Path) -> None:
    """Its records are hours ahead or behind: what comes is alive, and what stays away is not."""
    for ahead_s in (-7200.0, 7200.0):
        told = plain(20)[:-1]
        folder = write(tmp_path / f"run{ahead_s}", told)
        reader, now_s = RunReader(runs.open_run(folder)), told[-1][0] - ahead_s
        assert reader.read_to_end(now_s).state == ("unknown" if ahead_s < 0 else "running")
        with open(folder / "events/rank000.jsonl", "ab") as log:
            log.writelines(lines([(told[-1][0] + 1, recordings.step(21, random.Random(0)))]))
        assert reader.read_to_end(now_s + 1).state == "running"
        assert reader.read_to_end(now_s + 600).state == "unknown"
        reader.close()


def test_ranks_without_a_log_are_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", *ranks(4))
    for rank in (0, 1):
        (folder / f"events/rank{rank:03d}.jsonl").unlink()
    reader = RunReader(runs.open_run(folder))
    assert reader.read_to_end(BEGIN_S).problem == "logs of 2 of 4 ranks, shown is rank 2"
    reader.close()


def test_logs_that_may_not_be_read_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "run", plain(5))

    def refuse(path: Path, **_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(tail, "open_descriptor", refuse)
    reader = RunReader(runs.open_run(folder))
    found = reader.read_to_end(BEGIN_S)
    assert found.problem == f"not read: {folder / 'events/rank000.jsonl'}: no permission"
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = reader.read_to_end(BEGIN_S)
    assert (found.state, found.problem) == ("unknown", f"not read: {folder}/events: no permission")
    reader.close()


def test_the_end_of_a_failed_run_is_on_every_screen(tmp_path: Path) -> None:
    end = schema.RunEnded(status="failed", step=21, message="TrainingError: the loss is nan")
    bad = replace(recordings.step(21, random.Random(0)), loss=math.nan)
    told = [*plain(20)[:-1], (BEGIN_S + 40, bad), (BEGIN_S + 41, end)]
    reader = RunReader(runs.open_run(write(tmp_path / ("long" * 40), told)))
    shown = ViewState(reader.read_to_end(BEGIN_S + 50), BEGIN_S + 50)
    assert numbers(shown).plain.startswith(" loss nan")
    assert when(shown, {}).plain == " ✖ TrainingError: the loss is nan"
    assert "✖ failed  step 21, train.steps = 20" in headline(shown, {}, 80).plain[:80]
    reader.close()


def test_a_resumed_run_is_starting_until_its_first_step(tmp_path: Path) -> None:
    set_up = schema.SetUp(duration_s=92.0, parts_s={"reading weights": 40.0})
    told = [*plain(20)[:-1], (BEGIN_S + 90, recordings.start(steps=30, start_step=15))]
    told.append((BEGIN_S + 90, set_up))
    folder = write(tmp_path / "run", told)
    reader = RunReader(runs.open_run(folder))
    view = reader.read_to_end(BEGIN_S + 95).first
    assert (view.step, view.total_steps, view.active_alerts()) == (15, 30, [])
    snapshot = reader.read_to_end(BEGIN_S + 95)
    assert snapshot.state == "starting"
    words = before_first_step(ViewState(snapshot, BEGIN_S + 95))
    assert words.startswith("first step: 5s, resumed after step 15; set up in 1m32s")
    assert words.endswith("(reading weights 40 s)")
    assert View.at(view.history, BEGIN_S + 80).step == 20, "before that"
    reader.close()


def test_a_run_resumed_with_fewer_steps_than_it_has(tmp_path: Path) -> None:
    """There is no step to make, and no share of them."""
    end = schema.RunEnded(status="done", step=40, message="")
    start = recordings.start(steps=30, start_step=40)
    told = [*plain(40)[:-1], (BEGIN_S + 90, start), (BEGIN_S + 91, end)]
    reader = RunReader(runs.open_run(write(tmp_path / "run", told)))
    shown = ViewState(reader.read_to_end(BEGIN_S + 95), BEGIN_S + 95)
    assert "step 40, train.steps = 30" in headline(shown, {}, 80).plain
    assert numbers(shown).plain == " no step since it resumed at 40"
    reader.close()


def test_ends(tmp_path: Path) -> None:
    assert state(write(tmp_path / "done", plain(20))) == "done"
    killed = write(tmp_path / "killed", unlucky(), host=socket.gethostname())
    assert state(killed) == "killed"
    assert state(write(tmp_path / "new", [(BEGIN_S, recordings.start())]), BEGIN_S) == "starting"
    empty = write(tmp_path / "empty", host=socket.gethostname())
    assert state(empty, BEGIN_S) in ("failed", "starting")


def test_the_newest_run_is_found(tmp_path: Path) -> None:
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


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(runs.RunError, match="is not there: give a run folder"):
        runs.find([tmp_path / "none"])
    with pytest.raises(runs.RunError, match="a folder without runs"):
        runs.find([tmp_path])


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
    sample = lines([(BEGIN_S, recordings.system(recordings.random.Random(0), gpus=8))])[0]
    folder = write(tmp_path / "run", [(BEGIN_S, recordings.start())])
    with open(folder / "events/rank000.jsonl", "ab") as log:
        log.write(sample * (3 * (1 << 20) // len(sample)))
        log.write(lines([(BEGIN_S + 9, recordings.step(77, recordings.random.Random(0)))])[0])
    reader = RunReader(runs.open_run(folder))
    while not reader.is_complete:
        reader.read()
    assert reader.snapshot(BEGIN_S + 9).first.step == 77
    reader.close()


def test_the_list_of_runs(tmp_path: Path) -> None:
    write(tmp_path / "20260101-000000-a", plain(30))
    write(tmp_path / "20260201-000000-b", unlucky(), host=socket.gethostname())
    write(tmp_path / "20260301-000000-long", plain(5000))
    rows = {row.folder.name[-4:]: row for row in list_runs(tmp_path, BEGIN_S)}
    assert rows["00-a"].state == "done" and rows["00-a"].step == 30
    assert rows["00-b"].state == "killed"
    assert rows["long"].step == 5000 and rows["long"].total == 5000
    assert rows["long"].loss is not None


def test_only_logs_that_have_grown_are_listed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "20260101-000000-a", plain(30))
    grows = write(tmp_path / "20260201-000000-b", plain(30)[:-1])
    read: list[str] = []
    glance = listing.glance
    monkeypatch.setattr(
        listing, "glance", lambda log: read.append(log.parts[-3][-1]) or glance(log)
    )
    found = listing.Listing(tmp_path)
    assert [row.step for row in found.rows(BEGIN_S)] == [30, 30] and read == ["b", "a"]
    with open(grows / "events/rank000.jsonl", "ab") as log:
        log.write(lines([(BEGIN_S + 60, recordings.step(31, recordings.random.Random(0)))])[0])
    assert [row.step for row in found.rows(BEGIN_S)] == [31, 30] and read == ["b", "a", "b"]


def test_an_empty_history_has_a_view() -> None:
    view = View.at(History())
    assert (view.step, view.memory, view.spans, view.moments) == (0, (), (), [])
    assert runs.state_of(view, None, 0.0) == "starting"
    assert fold([]).first_time_s == 0.0
