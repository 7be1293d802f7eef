"""Settings of the user; the bell at an alert and at the end."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from offloadtrain_tui import settings
from offloadtrain_tui.app import Monitor, Watched
from offloadtrain_tui.clock import Clock
from offloadtrain_tui.settings import Settings

from offloadtrain.boundary.safe_open import UnsafeFileError
from offloadtrain.cli.main import main
from offloadtrain.config.errors import ConfigError
from offloadtrain.events import schema
from tests.tui.recordings import append, plain, snapshot_of, write
from tests.tui.test_app import watching
from tests.tui.test_runs import live, trainer

THEMES = ("color-blind-safe", "textual-dark")


def read(path: Path, text: str = "") -> Settings:
    if text:
        path.write_text(text)
    return settings.load(path, THEMES)


def test_settings_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "config/offloadtrain/monitor.toml"
    assert read(path) == Settings(), "no file: the defaults"
    chosen = Settings(theme="color-blind-safe", attention="off", log_axis=True, mean=100)
    settings.save(path, chosen)
    assert read(path) == chosen
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


WRONG = [
    ("theme = 'none'", "theme = 'none' must be one of color-blind-safe, textual-dark"),
    ("attention = 'loud'", "attention = 'loud' must be one of off, bell"),
    ("mean = -1", r"mean = -1 must be 0 \(none\) or more steps"),
    ("bell = true", "bell is unknown"),
    ("a = [", "not valid TOML"),
]


@pytest.mark.slow
def test_a_wrong_setting_is_reported(tmp_path: Path) -> None:
    for text, message in WRONG:
        with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
            read(tmp_path / "monitor.toml", text)


def test_settings_of_another_user_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "monitor.toml"
    os.mkfifo(path)
    with pytest.raises(UnsafeFileError, match="FIFO"):
        read(path)
    path.unlink()
    path.write_text("mean = 0")
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 1)
    with pytest.raises(UnsafeFileError, match="belongs to user"):
        read(path)


@pytest.mark.slow
async def test_axes_are_those_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = write(tmp_path / "run", plain())

    async with watching(folder) as (app, press):
        app.use(Settings(log_axis=True))
        await press("y", "b", "m")
        assert not app.shown.log
        app.action_save_settings()
    assert read(settings.path()) == Settings(theme="textual-dark", attention="off", mean=100)
    (tmp_path / "config/offloadtrain/monitor.toml").write_text("attention = 1")
    assert main(["tui", str(folder)]) == 2, "said, and not ignored"


@pytest.mark.slow
async def test_an_alert_and_the_end_ring_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run and old alerts ring nothing; a new alert and the end ring once each."""
    rung: list[str] = []
    monkeypatch.setattr(Monitor, "bell", lambda self: rung.append("bell"))
    ended, folder = write(tmp_path / "ended", plain()), live(tmp_path / "run")
    old = schema.Alert(code="swap", state="raised", message="old")

    def add(event: schema.Event) -> None:
        append(folder, (time.time(), event))

    add(old)
    with trainer(folder):
        async with watching(folder, ended, clock=Clock()) as (app, press):

            async def tick() -> None:
                for reader in app.reader.readers:
                    reader.read()
                app.reader.publish()
                app.settle()
                app.settle()
                await app.workers.wait_for_complete()

            await tick()
            assert rung == []
            add(replace(old, code="not-finite"))
            await tick()
            assert rung == ["bell"]
            await press("b")
            add(schema.RunEnded(status="done", step=20))
            await tick()
            assert rung == ["bell"], "it is off"
            assert [snapshot.state for snapshot in app.reader.snapshots] == ["done", "done"]


def test_the_end_of_a_run_is_news_once(tmp_path: Path) -> None:
    *events, end = plain(5)
    folder, watched = write(tmp_path / "run", events), Watched()
    assert watched.news([snapshot_of(folder, events[-1][0])]) == 0
    append(folder, end)
    assert [watched.news([snapshot_of(folder, events[-1][0])]) for _ in range(2)] == [1, 0]
