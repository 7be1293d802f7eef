"""`status`, `runs`, `events`, `ctl`: what scripts and people without a screen use."""

from __future__ import annotations

import io
import json
import random
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from offloadtrain_tui import reports

from offloadtrain.cli.main import main
from offloadtrain.events import schema
from offloadtrain.events.control import Requests
from offloadtrain.events.schema import Event
from tests.conftest import Command
from tests.tui.recordings import lines, plain, step, unlucky, write
from tests.tui.test_runs import live, trainer


def test_status_in_words_and_as_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    folder = write(tmp_path / "run", plain())
    out = command("status", folder).out
    assert "done  step 100/100" in out and "device: 29.1 GiB" in out
    assert main(["status", str(folder), "--live", "--json"]) == 0, "it ends with the run"
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["state"] == "done" and facts["step"] == facts["steps"] == 100
    assert facts["busy_ms"]["host"] > 0 and facts["val_loss"] == pytest.approx(2.2)
    assert facts["end"]["status"] == "done"
    folder = write(tmp_path / "killed", unlucky(), host=socket.gethostname())
    out = command("status", folder, code=1).out
    assert "killed" in out and "alert: skips" in out
    assert "alert: slow" not in out, "that was before the resume"


@pytest.mark.slow
def test_watched_status_has_a_line_per_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ticks with news and without: a step, nothing twice, an alert, the end."""
    folder = live(tmp_path / "run", steps=20)
    log = folder / "events/rank000.jsonl"
    now_s = time.time()
    code = "x \x1b[31m" + "y" * 9
    ticks: list[list[Event]] = [
        [],
        [],
        [step(21, random.Random(0))],
        [],
        [schema.Alert(code=code, state="raised", message="many")],
        [schema.RunEnded(status="done", step=21)],
    ]

    def tick(_: float) -> None:
        with log.open("ab") as out:
            out.write(b"".join(lines((now_s, event) for event in ticks.pop(0))))

    monkeypatch.setattr(reports, "time", SimpleNamespace(time=lambda: now_s + 1, sleep=tick))
    with trainer(folder):
        assert main(["status", str(folder), "--watch"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in shown] == ["running"] * 3 + ["done"]
    assert ["step 20/20" in shown[0], "step 21/20" in shown[1]] == [True, True]
    assert "! x" in shown[2] and "\x1b" not in shown[2] and "!" not in shown[1]


def test_runs_and_events(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write(tmp_path / "20260101-000000-a", plain(30))
    write(tmp_path / "20260201-000000-b", plain(40))
    header, *rows = [line.split() for line in command("runs", tmp_path).out.splitlines()]
    assert header[:6] == ["run", "state", "step", "loss", "val", "tok/s"]
    assert [row[0] for row in rows] == ["20260201-000000-b", "20260101-000000-a"]
    assert rows[0][1:3] == ["done", "40/40"] and rows[0][-1] == "ago"
    assert [
        json.loads(x)["step"] for x in command("runs", tmp_path, "--json").out.splitlines()
    ] == [40, 30]
    assert "no runs in" in command("runs", tmp_path / "none", code=2).err
    folder, readers = write(tmp_path / "run", unlucky()), []
    real = reports.RunReader
    monkeypatch.setattr(reports, "RunReader", lambda run: readers.append(run) or real(run))
    assert main(["events", str(folder)]) == 0
    assert len(readers) == 1, "the log is read once"
    out = capsys.readouterr().out
    assert "skips: 2 steps in a row" in out and "note done" in out
    assert "\x1b" not in out and "\x07" not in out
    raw = [json.loads(line) for line in command("events", folder, "--json").out.splitlines()]
    assert {"step", "span", "system", "run_started"} <= {line["k"] for line in raw}


def test_what_the_monitor_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    assert main(["status", str(tmp_path / "none")]) == main(["events", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("is not there: give a run folder") == 2
    assert main(["tui", str(tmp_path / "none"), "--once"]) == 2
    assert "choose one of overview" in command("tui", "--once", "--screen", "none", code=2).err
    assert main(["status", "--runs-dir", str(tmp_path)]) == 2
    assert "--once" in command("tui", write(tmp_path / "run", plain(2)), code=2).err, (
        "without a terminal"
    )


def test_ctl_sends_a_request_and_waits_for_the_answer(tmp_path: Path, command: Command) -> None:
    folder = live(tmp_path / "run")
    with trainer(folder):
        assert main(["ctl", str(folder), "note", "hello", "--wait", "0"]) == 0
        for text in ([], [" "]):
            assert "a note needs its text" in command("ctl", folder, "note", *text, code=2).err
        assert "'dance' is not one of checkpoint" in command("ctl", folder, "dance", code=2).err
        requests = Requests(folder).poll()
        assert [(request.action, request.message) for request in requests] == [("note", "hello")]
        assert "no answer yet" in command("ctl", folder, "checkpoint", "--wait", "0.3", code=1).err
    ended = write(tmp_path / "ended", plain())
    assert "is not running: it is done" in command("ctl", ended, "stop", code=1).err


def test_a_frame_as_text_and_as_svg(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "run", plain())
    shown = command("tui", folder, "--once", "--size", "100x30").out
    assert "step 100/100" in shown and len(shown.splitlines()) <= 30
    with monkeypatch.context() as terminal:  # a terminal of another age
        terminal.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
        assert main(["tui", str(folder), "--once"]) == 0
        sys.stdout.seek(0)
        assert "####" in (shown := sys.stdout.read()) and shown.isascii()
    picture = tmp_path / "frame.svg"
    assert main(["tui", str(folder), "--screenshot", str(picture), "--screen", "plots"]) == 0
    assert picture.read_text().startswith("<svg") and "gradient" in picture.read_text()
