"""One frame without a terminal: of logs that are read to their end, however long that takes."""

from __future__ import annotations

import asyncio
import io
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from offloadtrain_tui import pictures, svg
from offloadtrain_tui.keys import PANELS, with_keys

from offloadtrain.cli.main import main
from offloadtrain.config.errors import ConfigError
from tests.conftest import Command
from tests.tui.conftest import GENERATED_STEPS, GPUS
from tests.tui.recordings import plain, start, write
from tests.tui.test_app import text, watching


class Slow:
    """An app that settles at its `looks`th look, while a byte is read between any two of them."""

    def __init__(self, looks: float, *, reads: bool) -> None:
        self.looks, self.reads, self.looked, self.drawn = looks, reads, 0, 0

    @property
    def is_settled(self) -> bool:
        self.looked += 1
        return self.looked >= self.looks

    @property
    def reader(self) -> Any:
        return SimpleNamespace(read_bytes=self.looked if self.reads else 7)

    def settle(self) -> None:
        self.drawn += 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def _pause() -> None:
    pass


@pytest.mark.parametrize("reads", [True, False])
def test_a_log_that_is_being_read_is_waited_for(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An app that reads nothing and never settles is drawn after ten looks."""
    monkeypatch.setattr(pictures, "_SETTLE_S", 0.001)
    monkeypatch.setattr(pictures, "_MOST_S", 0.0095)
    app: Any = Slow(200 if reads else float("inf"), reads=reads)
    pilot: Any = SimpleNamespace(pause=_pause)
    monkeypatch.setattr(pictures, "_SAY_S", 0.0)
    progress: list[str] = []
    asyncio.run(pictures.settled(app, pilot, progress.append))
    assert progress[1] == f"reading the log: {1 if reads else 7} B so far"
    assert len(progress) == app.looked - 1
    assert app.drawn == 1
    assert app.looked == 200 if reads else 10 <= app.looked <= 13


def test_progress_is_for_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run", plain(3))
    for terminal in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["tui", str(folder), "--screenshot", str(tmp_path / "a.svg")]) == 0
        assert terminal.getvalue() == "... drawing\n" * terminal.isatty()
        assert capsys.readouterr().out == f"{tmp_path / 'a.svg'}\n"


def placed(picture: str) -> str:
    """The lines of a picture as a renderer sees them that draws each text at its place, drops
    spaces at its ends, and stretches nothing."""
    lines: dict[float, dict[int, str]] = {}
    for y, words in re.findall(r'<text class="\S+-r\d+" y="(\S+)" .*?>(.*?)</text>', picture):
        for x, word in re.findall(r'<tspan x="(\S+)" .*?>(.*?)</tspan>', words):
            for number, character in enumerate(unescape(word).strip()):
                lines.setdefault(float(y), {})[round(float(x) / 12.2) + number] = character
    rows = (lines[y] for y in sorted(lines))
    return "\n".join("".join(row.get(x, " ") for x in range(max(row) + 1)) for row in rows)


async def test_a_picture_needs_no_web_and_no_stretched_text(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain())

    async with watching(folder) as (app, press):
        for key in "1378":
            await press(key)
            picture = app.export_screenshot()
            lines = [line for line in text(app).splitlines() if line.strip()]
            assert placed(picture).splitlines() == lines
            assert "url(" not in re.sub(r"url\(#", "", picture) and "@font-face" not in picture


def test_a_picture_is_svg_or_png_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    picture = tmp_path / "a.png"
    with pytest.raises(ConfigError, match=r"install it, or write \.svg"):
        svg.write(picture, "<svg/>")
    with pytest.raises(ConfigError, match=r"ends in \.svg or \.png"):
        svg.write(tmp_path / "a.jpg", "<svg/>")
    converter = tmp_path / svg.CONVERTER
    for status, ends in (
        (0, nullcontext()),
        (1, pytest.raises(ConfigError, match=f"{picture.name}: broken")),
    ):
        converter.write_text(f"#!/bin/sh\nread -r x; echo $x > $2; echo broken >&2; exit {status}")
        converter.chmod(0o700)
        with ends:
            svg.write(picture, "<svg/>\n")
    assert picture.read_text() == "<svg/>\n" and not (tmp_path / "a.jpg").exists()
    folder = write(tmp_path / "run", plain(3))
    assert command("tui", folder, "--screenshot", picture, code=2).err == f"{picture}: broken\n"


async def test_a_run_on_a_cpu_has_no_gpu_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On any screen but that of GPUs, nor in the help, `status` and `events`."""
    (time_s, _), *rest = plain()
    plan = start().plan | {"device": "cpu", "gpu_uuid": ""}
    machine = {"host": "box"}
    folder = write(tmp_path / "run", [(time_s, start(plan=plan, machine=machine)), *rest])

    async with watching(folder, size="wide") as (app, press):
        for _, name in with_keys(PANELS):
            app.action_panel(name)
            await press()
            assert ("GPU" in text(app)) == (name == "gpus"), name
            assert name != "transfers" or "weights" in text(app)
        await press("1", "question_mark")
        assert "Keys" in text(app) and "GPU" not in text(app)
    assert main(["status", str(folder)]) == main(["events", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "GPU" not in out and "device:" not in out and "memory: 173.1 GiB" in out


@pytest.mark.slow
def test_one_frame_of_a_long_log_shows_the_newest_step_of_every_rank(
    generated: Callable[[str], Path], command: Command
) -> None:
    shown = command("tui", generated("gpus"), "--once", "--screen", "ranks").out
    assert "reading" not in shown and f"step {GENERATED_STEPS}/{GENERATED_STEPS}" in shown
    rows = [line.split()[:2] for line in shown.splitlines()]
    assert all([str(rank), str(GENERATED_STEPS)] in rows for rank in range(GPUS["gpus"]))
