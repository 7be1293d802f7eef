"""The monitor's keys and screens, driven as a person drives them, at three sizes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from offloadtrain_tui.app import Monitor
from offloadtrain_tui.clock import Clock, ReplayClock
from offloadtrain_tui.dialogs import Ask, Confirm
from offloadtrain_tui.keys import KEYS, footer, with_keys
from offloadtrain_tui.pictures import screen_text
from offloadtrain_tui.reading import runs
from offloadtrain_tui.widgets.chart import Chart
from textual.widget import Widget
from textual.widgets import Button

from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, StoppedClock, plain, write
from tests.tui.test_runs import live, trainer

SIZES = {"wide": (160, 45), "medium": (110, 34), "small": (80, 24)}
HANGS_S = 120.0
TERMINALS = {"80x24": (80, 24), "120x40": (120, 40), "200x60": (200, 60)}
"""Those of the generated runs' screens."""


@asynccontextmanager
async def watching(
    *folders: Path, size: str = "medium", clock: Clock | None = None, readonly: bool = False
) -> AsyncIterator[tuple[Monitor, Callable[..., Awaitable[None]]]]:
    """Yield the monitor over these runs, settled, and a function that presses keys."""
    app = Monitor(
        [runs.open_run(folder) for folder in folders],
        runs_dir=folders[0].parent if folders else Path("nowhere"),
        clock=clock or StoppedClock(BEGIN_S + 200.0),
        readonly=readonly,
        watch_machine=False,
    )
    # As long as a test looks for a notification.
    app.NOTIFICATION_TIMEOUT = HANGS_S  # type: ignore[misc]
    async with app.run_test(size=(SIZES | TERMINALS)[size]) as pilot:

        async def press(*keys: str) -> None:
            await pilot.press(*keys)
            await pilot.pause()

        while not app.is_settled:
            await asyncio.sleep(0.01)
        app.settle()
        await pilot.pause()
        yield app, press


def text(app: Monitor) -> str:
    return screen_text(app)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that the monitor does by itself."""
    async with asyncio.timeout(HANGS_S):
        while not condition():
            await asyncio.sleep(0.01)


def messages(app: Monitor) -> str:
    return "\n".join(notification.message for notification in app._notifications)


def requests_in(folder: Path) -> list[tuple[str, str]]:
    paths = sorted((folder / "control").glob("*.json"))
    requests = [json.loads(path.read_text()) for path in paths]
    return [(request["action"], request["message"]) for request in requests]


async def test_requests_are_confirmed_and_sent_to_runs_that_are_running(tmp_path: Path) -> None:
    """Also to a run on another host whose log is fresh: the folder is shared. Not to a run that has
    ended, nor from a monitor that may only read."""
    ended, folder = write(tmp_path / "ended", plain()), live(tmp_path / "run")
    assert json.loads((folder / "run.json").read_text())["host"] != socket.gethostname()

    async with watching(folder, clock=StoppedClock(time.time())) as (app, press):
        assert app.shown.snapshot.state == "running"
        await press("c")
        assert isinstance(app.screen, Confirm)
    async with watching(ended) as (app, press):
        await press("c", "S", "n")
        assert not isinstance(app.screen, Confirm | Ask)
    with trainer(folder):
        async with watching(folder, readonly=True) as (app, press):
            await press("c", "S", "n")
            assert not isinstance(app.screen, Confirm | Ask) and "readonly" in messages(app)
        async with watching(folder) as (app, press):
            await press("c")
            await press("enter")
            assert not (folder / "control").exists(), "cancel has the focus"
            await press("c")
            await press("tab", "enter")
            assert requests_in(folder) == [("checkpoint", "")]
            await press("S")
            app.screen.query_one("#abort", Button).press()
            await press()
            await press("n")
            await press(*"hello", "enter")
            assert requests_in(folder) == [("checkpoint", ""), ("abort", ""), ("note", "hello")]
    assert not (ended / "control").exists()


async def test_the_palette_opens_a_screen_and_the_timeline_is_exported(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain())

    async with watching(folder) as (app, press):
        newest = text(app)
        await press("[", "5", "end", "1")
        assert text(app) == newest, "a chart that is shown again is drawn completely"
        await press("ctrl+p")
        await press(*"timeline")
        await until(lambda: "Screen 4: timeline" in text(app))
        await press("escape", "x")
        await app.workers.wait_for_complete()
        await press()
        assert "trace.json" in messages(app)
        entries = json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert any(entry["name"] == "adam 2" for entry in entries)
    names = [f"panel {number}" for number in range(1, 12)]
    keys = [key for key, _ in with_keys(names)]
    assert keys == [*"1234567890", ""], "the eleventh panel has no key"


def test_the_footer_names_whole_keys_at_every_width() -> None:
    """From 80 columns on all ten screens and the help; requests where a run answers them."""
    bindings = [(binding.key_display or binding.key, binding) for binding in KEYS]
    for width in range(40, 200):
        for can_ask in (False, True):
            words = footer(bindings, width, can_ask=can_ask).plain.split(" ")
            assert len(" ".join(words)) <= width and len(words) % 2 == 0
            assert ("stop" in words) <= can_ask and (width < 130 or ("stop" in words) == can_ask)
            if width >= 80:
                assert words[0:20:2] == [*"1234567890"] and words[20:22] == ["?", "help"]
    assert "transfers" in footer(bindings, 110, can_ask=False).plain


@pytest.mark.slow
async def test_runs_are_opened_and_drawn_over_each_other(tmp_path: Path) -> None:
    write(tmp_path / "20260101-000000-first", plain(30, seed=1, name="first"))
    second = write(tmp_path / "20260201-000000-second", plain(50, name="second"))

    async with watching(second) as (app, press):
        await press("9", "down", "o")
        while len(app.reader.snapshots) < 2 or not app.shown.other_runs:
            await press()
            app.settle()
        assert [other.name for other in app.shown.other_runs] == ["20260101-000000-first"]
        await press("5")
        curves = app.query_one("#plots-loss", Chart).content.curves
        assert [curve.label for curve in curves] == ["mean", "step", "val", "mean"]
        assert "overlaid: ━━ 20260101-000000-first" in text(app)
        await press("9", "enter")
        assert app.shown.snapshot.name == "20260101-000000-first"
        await press("r")
        assert app.shown.snapshot.name == "20260201-000000-second"


async def test_a_replay_shows_the_run_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain())
    clock = ReplayClock(BEGIN_S, BEGIN_S + 200.0, speed=0.0)

    async with watching(folder, clock=clock) as (app, press):
        clock.move(BEGIN_S + 50.0)
        app.settle()
        step = app.shown.view.step
        assert 45 < step < 55 and app.shown.newest.length == step
        assert "done" not in text(app).splitlines()[0]
        await press("{")
        assert app.shown.view.step == 25
        await press("]")
        await press("end")
        app.settle()
        assert app.shown.view.step == 100 and "done" in text(app).splitlines()[0]


async def test_new_steps_and_a_kill_appear_on_the_screen(tmp_path: Path) -> None:
    folder = live(tmp_path / "run", steps=20)

    with trainer(folder) as pid:
        async with watching(folder) as (app, press):
            assert "running" in text(app).splitlines()[0]
            step = recordings.step(21, recordings.random.Random(1))
            line = recordings.lines([(BEGIN_S + 300, step)])[0]
            with open(folder / "events/rank000.jsonl", "ab") as log:
                log.write(line[:50])
                log.flush()
                await asyncio.sleep(0.3)
                assert app.shown.view.step == 20
                log.write(line[50:])
            await until(lambda: app.shown.view.step == 21)
            await press()
            assert "step 21" in text(app)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: app.shown.snapshot.state == "killed")
            await press()
            assert "killed" in text(app).splitlines()[0]


async def test_news_that_pile_up_while_the_screen_is_drawn_are_drawn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal that is slow is not sent every one of them."""
    write(tmp_path / "20261121-080000-demo", plain())
    drawn: list[float] = []

    async with watching(tmp_path / "20261121-080000-demo") as (app, press):
        monkeypatch.setattr(app, "settle", lambda: drawn.append(app.clock.now_s()))
        app._quiet.pause()
        for _ in range(50):
            app.post_message(app.News())
        await press()
    assert len(drawn) == 1


async def test_a_tick_while_the_widgets_go_one_by_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "20261121-080000-demo", plain())
    ticked: list[bool] = []

    async with watching(tmp_path / "20261121-080000-demo") as (app, _):
        prune = app._prune

        async def headline_first(*nodes: Widget, **keywords: Any) -> None:
            await prune(app.query_one("#headline"))
            ticked.append(not app.query("#headline") and bool(app.query("#panels")))
            app.settle()
            app.post_message(app.Listed([]))
            await prune(*nodes, **keywords)

        monkeypatch.setattr(app, "_prune", headline_first)
    assert ticked == [True]
