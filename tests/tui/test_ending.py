"""Runs that have ended: when, how long they ran, what is saved, and the command that goes on."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from offloadtrain_tui.clock import ReplayClock
from offloadtrain_tui.reading.runs import Ending
from offloadtrain_tui.summary import headline, when
from offloadtrain_tui.view_state import ViewState

from offloadtrain.cli.main import main
from offloadtrain.events import schema
from tests.train.small_job import JOB, write_text
from tests.tui.recordings import BEGIN_S, StoppedClock, plain, snapshot_of, write
from tests.tui.test_app import text, watching


def checkpoint(folder: Path, step: int, *, num_bytes: int = 7) -> None:
    """A checkpoint's files as the monitor reads them; `num_bytes`: what the manifest says."""
    path = folder / f"checkpoints/step-{step:08d}"
    path.mkdir(parents=True)
    (path / "rank-000.bin").write_bytes(b"x" * 7)
    manifest = {"files": {"rank-000.bin": {"bytes": num_bytes, "sha256": ""}}}
    (path / "manifest.json").write_text(json.dumps(manifest))


def ending(folder: Path) -> Ending | None:
    return snapshot_of(folder, BEGIN_S + 60).ending


@pytest.mark.parametrize("status", ["done", "stopped", "failed", "killed", "unknown"])
def test_what_is_saved_of_a_run_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str
) -> None:
    """The newest checkpoint has lost a byte, and one is unfinished: the one before counts. Of a run
    on another host that is silent nothing is said."""
    *events, (end_s, end) = plain(30)
    if status in ("done", "stopped", "failed"):
        assert isinstance(end, schema.RunEnded)
        events.append((end_s, replace(end, status=status)))
    host = socket.gethostname() if status == "killed" else "elsewhere"
    folder = write(tmp_path / "20261121-080000-a run", events, host=host)
    assert ending(folder) is None if status == "unknown" else ending(folder).checkpoint is None  # type: ignore[union-attr]
    checkpoint(folder, 10)
    checkpoint(folder, 20)
    checkpoint(folder, 25, num_bytes=8)
    (folder / "checkpoints/step-00000030.tmp-1a").mkdir()
    found = ending(folder)
    if status == "unknown":
        assert found is None
        return
    assert found is not None and (found.checkpoint, found.lost_steps) == (20, 10)
    assert found.lasted_s == pytest.approx(end_s - BEGIN_S, abs=2.0)
    command = shlex.split(found.command)
    job, resumed = str(folder / "resolved.toml"), ["--resume", str(folder)]
    longer = ["--set", "train.steps=60"] if status == "done" else []
    assert command == ["offloadtrain", "train", job, *resumed, *longer]
    code = main(["status", str(folder)])
    out = capsys.readouterr().out
    assert code == (status in ("failed", "killed"))
    assert "last checkpoint: step 20, 10 steps lost\n" in out and found.command in out
    assert ", after 30s" in out
    main(["runs", str(tmp_path)])
    listed = capsys.readouterr().out
    assert (found.command in listed) == (status != "done") and f"{found.words(0)[-3:]}  " in listed
    checkpoint(folder, 28)
    assert ending(folder).checkpoint == 28, "a checkpoint that is added is seen"  # type: ignore[union-attr]


def test_an_ended_run_says_on_every_screen_how_it_goes_on(tmp_path: Path) -> None:
    """While its end is shown; before that its alerts are news."""
    events = plain(30)[:-1]
    alert = schema.Alert(code="slow", state="raised", message="tokens/s fell")
    folder = write(tmp_path / "run", [*events, (BEGIN_S + 31, alert)], host=socket.gethostname())
    checkpoint(folder, 25)
    shown = ViewState(snapshot_of(folder, BEGIN_S + 90), BEGIN_S + 90)
    assert "✖ killed" in headline(shown, {}).plain and ", after 31s" in headline(shown, {}).plain
    last, alerts = when(shown, {}).plain.splitlines()
    assert last.startswith("last checkpoint: step 25, 5 steps lost; resume: offloadtrain train ")
    assert alerts.rstrip() == "alerts at its end: ⚠ slow: tokens/s fell"
    past = replace(shown, cursor=10)
    assert ", after" not in headline(past, {}).plain and "resume" not in when(past, {}).plain
    assert "before the newest; End: its end" in when(past, {}).plain


async def test_a_replay_says_that_it_is_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain())
    clock = ReplayClock(BEGIN_S, BEGIN_S + 200.0, speed=0.0)

    async with watching(folder, clock=clock) as (app, press):
        clock.speed = 50.0
        clock.pause(True)
        clock.move(BEGIN_S + 50.0)
        app.settle()
        await press()
        first, _, third = text(app).splitlines()[:3]
        assert "REPLAY x50" in first and "running" not in first
        assert "REPLAY  50s of 1m4" in third and "of a run that is done" in third
        assert "live" not in first + third


async def test_runs_on_the_command_line_are_overlaid_and_listed(tmp_path: Path) -> None:
    """Also where the folder of runs is another one; and `r` changes their places."""
    first, second = write(tmp_path / "a/first", plain(30)), write(tmp_path / "b/second", plain(20))

    async with watching(first, second) as (app, press):
        assert [run.name for run in app.shown.other_runs] == ["second"]
        assert "overlaid: ━━ second loss " in text(app), "the legend of every chart"
        await press("9")
        listed = text(app)
        assert "▶  first" in listed and "+  second" in listed
        await press("r")
        assert app.shown.snapshot.name == "second"
        assert [run.name for run in app.shown.other_runs] == ["first"]


async def test_without_a_run_the_screen_says_how_to_start_one(tmp_path: Path) -> None:
    for size in ("80x24", "120x40"):
        async with watching(size=size, clock=StoppedClock(BEGIN_S)) as (app, press):
            for key in ("1", "9"):
                await press(key)
                shown = text(app)
                assert f"no runs in {Path('nowhere').absolute()}" in shown.replace("\n", "")
                assert "offloadtrain train demo" in shown
                assert "nothing yet" not in shown and "checkpoint" not in shown


@pytest.mark.slow
def test_the_command_of_a_killed_run_resumes_it(tmp_path: Path) -> None:
    """As printed by `status`, of a run that kill -9 has ended between two checkpoints."""
    write_text(tmp_path)
    (tmp_path / "small.toml").write_text(JOB.format(folder=tmp_path))
    program = [sys.executable, "-m", "offloadtrain"]
    overrides = ["train.steps=4000", "train.checkpoint_every=7"]
    command = [*program, "train", "small.toml", "--run-dir", "run", "--set", *overrides]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    training = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    folder, deadline = tmp_path / "run", time.monotonic() + 120
    while not list(folder.glob("checkpoints/step-0000????")):
        assert time.monotonic() < deadline and training.poll() is None
        time.sleep(0.05)
    training.send_signal(signal.SIGKILL)
    training.wait()
    arguments = [*program, "status", "run"]
    said = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert said.returncode == 1 and "killed" in said.stdout
    facts = dict(line.split(": ", 1) for line in said.stdout.splitlines() if ": " in line)
    saved = int(facts["last checkpoint"].split(",")[0].removeprefix("step "))
    name, *arguments = shlex.split(facts["resume"])
    assert name == "offloadtrain"
    arguments += ["--set", f"train.steps={saved + 3}"]
    again = [*program, *arguments]
    went_on = subprocess.run(again, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert went_on.returncode == 0, went_on.stderr
    last = snapshot_of(folder, time.time())
    assert last.state == "done" and last.first.start is not None
    assert last.first.start.start_step == saved and last.first.step == saved + 3
