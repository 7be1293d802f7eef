"""Texts of others on every screen and in every command: no escape sequence reaches the terminal."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest
from offloadtrain_tui.dialogs import Confirm, record_page
from offloadtrain_tui.keys import PANELS

from offloadtrain.cli.main import main
from tests.boundary.hostile import TEXTS, hostile_lines, obeyed
from tests.tui.recordings import unlucky, write
from tests.tui.test_app import text, watching
from tests.tui.test_terminal import monitor

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]


def hostile(folder: Path, first: int = 0) -> Path:
    run = write(folder, unlucky(), unlucky())
    for log in sorted((run / "events").glob("rank*.jsonl")):
        log.write_bytes(b"".join(hostile_lines(log.read_bytes().splitlines(), first)))
    (run / "run.json").write_text(json.dumps({"host": TEXTS[0], "name": TEXTS[1]}))
    return run


def names(folder: Path) -> list[Path]:
    """Runs whose names are hostile, as far as a file may have such a name."""
    possible = [item for item in TEXTS if "/" not in item and "\0" not in item]
    return [
        write(folder / f"20260101-{number:06d}-{item}", unlucky(12))
        for number, item in enumerate(possible)
    ]


def commands(run: Path) -> list[list[str]]:
    """Every command that shows what a run, a name or a message says."""
    folder = str(run)
    odd = "".join(item for item in TEXTS if "\0" not in item)[:200]
    return [
        *(
            [command, folder, *json_]
            for command in ("status", "events")
            for json_ in ([], ["--json"])
        ),
        ["runs", str(run.parent)],
        ["runs", str(run.parent), "--json"],
        ["ctl", folder, "note", odd, "--wait", "0"],
        ["trace", folder],
        *([name, odd] for name in ("status", "events", "tui", "trace", "train", "plan", "cp")),
        ["ctl", odd, "stop"],
        ["prepare", odd, "out"],
        ["export", odd, "out"],
        ["report", odd],
        ["train", "demo", "--set", f"name={odd}"],
        ["train", "demo", "--set", f"{odd}=1"],
        ["train", "demo", f"--{odd}", "1"],
        [odd],
        ["status", "--help"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(TEXTS), 9))
def test_no_command_passes_an_escape_sequence(
    first: int, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = hostile(tmp_path / "runs/20260101-000000-a", first)
    names(tmp_path / "runs")
    for arguments in commands(run):
        assert main(arguments) in (0, 1, 2), arguments
        out, err = capsys.readouterr()
        assert obeyed(out) == obeyed(err) == [] and "Traceback" not in err, arguments
        if "--json" in arguments:
            assert all(json.loads(line) for line in out.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 18])
def test_no_screen_draws_one_and_no_markup_is_obeyed(first: int, tmp_path: Path) -> None:
    run = hostile(tmp_path / "runs/20260101-000000-a", first)
    names(tmp_path / "runs")

    async def look() -> dict[str, str]:
        shown = {}
        async with watching(run) as (app, press):
            for name in PANELS:
                app.action_panel(name)
                await press("home")
                shown[name] = text(app)
            for number, item in enumerate(TEXTS[first::3]):
                app.tell(item)
                app.push_screen(Confirm(item, {"stop": "stop"}))
                await press("tab")
                shown[f"dialog {number}"] = text(app)
                await press("escape")
            for number, moment in enumerate(app.shown.view.moments[:5]):
                app.push_screen(record_page(moment))
                await press("down")
                shown[f"raw {number}"] = text(app)
                await press("escape")
        return shown

    shown = asyncio.run(look())
    assert len(shown) >= len(PANELS) + 6 + 5
    assert {name: result for name, item in shown.items() if (result := obeyed(item))} == {}
    assert any("[red]markup[/red]" in item for item in shown.values())


def _through_a_terminal(calls: list[list[str]], folder: Path) -> bytes:
    """What the commands write to a real terminal, all in one process."""
    code = "import json, sys\nfrom offloadtrain.cli.main import main\n"
    code += "for one in json.load(open(sys.argv[1])): main(one)\n"
    (folder / "calls.json").write_text(json.dumps(calls))
    environ = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color"}
    environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tui'}"
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, "-c", code, "calls.json"], environ)
    written = b""
    try:
        while piece := os.read(master, 1 << 16):
            written += piece
    except OSError:  # the terminal is closed: the process has ended
        pass
    os.waitpid(pid, 0)
    os.close(master)
    return written


OWN = re.compile(r"\x1b\[[0-9;]*m")
"""Bold and colors of help and of the frame around wrong usage."""


@pytest.mark.slow
def test_no_escape_of_the_content_reaches_a_real_terminal(tmp_path: Path) -> None:
    run = hostile(tmp_path / "runs/20260101-000000-a")
    names(tmp_path / "runs")
    written = _through_a_terminal([*commands(run), ["tui", str(run), "--once"]], tmp_path)
    shown = OWN.sub("", written.decode().replace("\r\n", "\n"))
    assert len(shown) > 20_000 and "clipboard" in shown
    assert obeyed(shown) == []
    assert b"\x1b[31mred" not in written


SEQUENCES = [item.encode()[:8] for item in TEXTS if item.startswith(("\x1b]", "\x1bP", "\x1b_"))]
TEXTUALS_OWN = {"\x1b", "\r", "\x07"}


@pytest.mark.slow
def test_no_escape_of_the_content_reaches_the_live_monitors_terminal(tmp_path: Path) -> None:
    run = hostile(tmp_path / "runs/20260101-000000-a")
    names(tmp_path / "runs")
    with monitor(run) as terminal:
        for key in b"123456789":
            terminal.send(bytes([key]))
            terminal.watch(0.7)
        written = terminal.everything
    assert b"clipboard" in written
    assert [sequence for sequence in SEQUENCES if sequence in written] == []
    assert set(re.findall(rb"\x1b\](\d+);", written)) & {b"0", b"2", b"8", b"52", b"1337"} == set()
    assert set(obeyed(written.decode())) <= TEXTUALS_OWN
