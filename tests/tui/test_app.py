"""The monitor's keys and screens, driven as a person drives them, at three sizes."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from offloadtrain_tui.app import Monitor
from offloadtrain_tui.clock import Clock, ManualClock, ReplayClock
from offloadtrain_tui.dialogs import Ask, Confirm, Raw
from offloadtrain_tui.frame import screen_text
from offloadtrain_tui.help import Help
from offloadtrain_tui.keys import with_keys
from offloadtrain_tui.reading import runs
from offloadtrain_tui.widgets.chart import Chart
from offloadtrain_tui.widgets.lanes import Timeline
from textual.widget import Widget
from textual.widgets import Button, DataTable, Input

from offloadtrain.events import schema
from tests.tui import recordings
from tests.tui.conftest import Screens
from tests.tui.recordings import BEGIN_S, plain, unlucky, write
from tests.tui.test_runs import live, trainer

SIZES = {"wide": (160, 45), "medium": (110, 34), "small": (80, 24)}
HANGS_S = 120.0
TERMINALS = {"80x24": (80, 24), "120x40": (120, 40), "200x60": (200, 60)}
"""Those of the generated runs' screens."""


@asynccontextmanager
async def watching(
    *folders: Path, size: str = "medium", clock: Clock | None = None, readonly: bool = False
) -> AsyncIterator[tuple[Monitor, Callable[..., Awaitable[None]]]]:
    """The monitor over these runs, settled; and a function that presses keys."""
    found = [runs.open_run(folder) for folder in folders]
    app = Monitor(
        found,
        runs_dir=folders[0].parent if folders else Path("nowhere"),
        clock=clock or ManualClock(BEGIN_S + 200.0),
        readonly=readonly,
        watch_machine=False,
    )
    # As long as a test looks for what is said.
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
    """Wait for what the monitor does by itself."""
    async with asyncio.timeout(HANGS_S):
        while not condition():
            await asyncio.sleep(0.01)


def go(test: Coroutine[object, object, None]) -> None:
    asyncio.run(test)


LOOKED_AT = [("plain", "medium"), ("ranks", "medium"), ("nothing", "small")]
"""The first two are drawn for `test_screens` as well."""
OTHERS = [
    pytest.param(recording, size, marks=pytest.mark.slow)
    for recording in ("plain", "unlucky", "ranks", "nothing")
    for size in SIZES
    if (recording, size) not in LOOKED_AT
]


@pytest.mark.parametrize(("recording", "size"), [*LOOKED_AT, *OTHERS])
def test_every_screen_shows_what_it_is_for(
    screens: Callable[..., Screens], recording: str, size: str
) -> None:
    seen = screens(recording, size)
    for lines in (shown.splitlines() for shown in seen.values()):
        assert len(lines) <= SIZES[size][1]
        assert max(map(len, lines)) <= SIZES[size][0]
        assert "20261121-080000-demo" in lines[0]
    assert "\x1b" not in "".join(seen.values())
    if recording == "nothing":
        assert "setting up" in seen["overview"] and "nothing yet" in seen["plots"]
        return
    assert "working weights 24.0 GiB" in seen["overview"]
    assert "Adam v" in seen["memory"] and "planned" in seen["memory"]
    assert "compute waited" in seen["transfers"] and "GB/s" in seen["transfers"]
    assert "gradient norm" in seen["plots"]
    assert "skew" in seen["ranks"] and "Tesla V100" in seen["ranks"]
    assert "run_started" in seen["events"]
    assert "d_model" in seen["job"]
    assert "20261121-080000-demo" in seen["runs"]
    if recording != "ranks":
        assert "adam" in seen["timeline"] or size == "small"


def test_eight_ranks(screens: Callable[..., Screens]) -> None:
    shown = screens("ranks", "medium")["ranks"]
    assert "8 ranks; the slowest is rank 3" in shown
    assert re.search(r"7 +48 +2 steps", shown)
    assert re.search(r"\b3 +50 +1\.\d+ s +1\.\d+ s +\+(19|2[01])\.\d %", shown)
    assert len(re.findall(r" \+(19|2[01])\.\d %", shown)) == 1  # the others only wait


@pytest.mark.slow
def test_the_whole_screen_goes_back_in_time(tmp_path: Path) -> None:
    write(tmp_path / "run", plain())

    async def test() -> None:
        async with watching(tmp_path / "run") as (app, press):
            assert "step 100/100" in text(app)
            await press("[", "[", "[")
            assert app.shown.view.step == 97 and not app.shown.is_live
            assert "step 97/100" in text(app) and "End: live" in text(app)
            await press("]")
            assert app.shown.view.step == 98
            await press("{")
            assert app.shown.view.step == 75, "the checkpoint before"
            await press("{")
            assert app.shown.view.step == 50
            assert app.shown.view.val_loss == pytest.approx(2.1 + 10 / 50)
            await press("4")
            assert app.query_one("#timeline-lanes", Timeline).lanes.step == 42
            for panel in "127":  # with tables
                await press(panel, "[")
                assert not app.shown.is_live
                await press("end")
                assert app.shown.is_live and app.shown.view.step == 100, f"from screen {panel}"
            await press("g")
            assert isinstance(app.screen, Ask)
            await press("3", "0", "enter")
            assert app.shown.view.step == 30
            await press("space")
            assert app.shown.is_live
            await press("space")
            assert app.shown.cursor == 99, "held at the newest"

    go(test())


def test_a_chart_shown_again_is_drawn_whole(tmp_path: Path) -> None:
    write(tmp_path / "run", plain())

    async def test() -> None:
        async with watching(tmp_path / "run") as (app, press):
            live = text(app)
            await press("[", "5", "end", "1")
            assert text(app) == live

    go(test())


def test_zoom_logarithm_and_mean(tmp_path: Path) -> None:
    write(tmp_path / "run", plain())

    async def test() -> None:
        async with watching(tmp_path / "run") as (app, press):
            await press("5")
            loss = app.query_one("#plots-loss", Chart)
            assert (loss.plot.window.lo, loss.plot.window.hi) == (0, 100)
            await press("+", "+")
            assert (loss.plot.window.lo, loss.plot.window.hi) == (75, 100)
            await press("-")
            assert loss.plot.window.lo == 50
            assert loss.plot.curves[0].label == "mean"
            await press("m", "m", "m", "y")
            assert loss.plot.curves[0].label == "" and loss.plot.log

    go(test())


def test_the_timeline_zooms_to_a_block(tmp_path: Path) -> None:
    write(tmp_path / "run", plain())

    async def test() -> None:
        async with watching(tmp_path / "run") as (app, press):
            await press("4")
            lanes = app.query_one("#timeline-lanes", Timeline)
            assert "adam 2" in text(app)
            await press("up", "up", "up")
            assert lanes.lanes.zoom == 8.0
            before = lanes.lanes.shown
            await press("right")
            assert lanes.lanes.shown[0] > before[0]
            await press("down", "down", "down", "down")
            assert lanes.lanes.zoom == 1.0

    go(test())


@pytest.mark.slow
def test_events_are_filtered_opened_and_gone_to(tmp_path: Path) -> None:
    write(tmp_path / "run", unlucky())

    async def test() -> None:
        async with watching(tmp_path / "run") as (app, press):
            await press("7")
            table = app.query_one("#events-rows", DataTable)
            whole = table.row_count
            await press("slash", *"skipped")
            assert 0 < table.row_count < whole
            assert isinstance(app.focused, Input)
            await press("enter", "enter")
            assert isinstance(app.screen, Raw)
            assert '"k": "' in text(app) and '"step": 45' in text(app)
            await press("escape", "j")
            assert app.shown.view.step == 45

    go(test())


def test_the_timeline_is_exported(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain())

    async def test() -> None:
        async with watching(folder) as (app, press):
            await press("x")
            await app.workers.wait_for_complete()
            await press()
            told = [notification.message for notification in app._notifications]
            assert any("trace.json" in message for message in told)
            entries = json.loads((folder / "trace.json").read_text())["traceEvents"]
            assert any(entry["name"] == "adam 2" for entry in entries)

    go(test())


@pytest.mark.slow
def test_alerts_stand_on_every_screen(screens: Callable[..., Screens]) -> None:
    seen = screens("unlucky", "medium")
    assert "skips: 2 steps in a row were skipped" in seen["overview"]
    assert all("skips: 2 steps in a row" in shown for shown in seen.values())


def requests_in(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "control").glob("*.json"))]


@pytest.mark.slow
def test_requests_are_asked_for_twice(tmp_path: Path) -> None:
    folder = live(tmp_path / "run")

    async def test() -> None:
        async with watching(folder) as (app, press):
            await press("c")
            assert isinstance(app.screen, Confirm)
            await press("enter")
            assert not (folder / "control").exists(), "cancel has the focus"
            await press("c")
            await press("tab", "enter")
            assert [one["action"] for one in requests_in(folder)] == ["checkpoint"]
            await press("S")
            app.screen.query_one("#abort", Button).press()
            await press()
            await press("n")
            await press(*"hello", "enter")
            asked = [(one["action"], one["message"]) for one in requests_in(folder)]
            assert asked == [("checkpoint", ""), ("abort", ""), ("note", "hello")]

    with trainer(folder):
        go(test())


def test_nothing_is_asked_of_a_run_that_is_over_or_only_looked_at(tmp_path: Path) -> None:
    over, folder = write(tmp_path / "over", plain()), live(tmp_path / "run")

    async def test() -> None:
        async with watching(over) as (app, press):
            await press("c", "S", "n")
            assert not isinstance(app.screen, Confirm | Ask)
        async with watching(folder, readonly=True) as (app, press):
            await press("c", "S", "n")
            assert not isinstance(app.screen, Confirm | Ask)
            told = [notification.message for notification in app._notifications]
            assert told and all("readonly" in message for message in told)

    with trainer(folder):
        go(test())
    assert not (over / "control").exists() and not (folder / "control").exists()


@pytest.mark.slow
def test_runs_are_opened_and_drawn_beside(tmp_path: Path) -> None:
    write(tmp_path / "20260101-000000-first", plain(30, seed=1, name="first"))
    second = write(tmp_path / "20260201-000000-second", plain(50, name="second"))

    async def test() -> None:
        async with watching(second) as (app, press):
            await press("9", "down", "o")
            while len(app._snapshots) < 2 or not app.shown.other_runs:
                await press()
                app.settle()
            assert [other.name for other in app.shown.other_runs] == ["20260101-000000-first"]
            await press("5")
            labels = [c.label for c in app.query_one("#plots-loss", Chart).plot.curves]
            assert "000000-first" in labels
            await press("9", "enter")
            assert app.shown.snapshot.name == "20260101-000000-first"
            await press("r")
            assert app.shown.snapshot.name == "20260201-000000-second"

    go(test())


def test_a_replay_is_the_run_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain())
    clock = ReplayClock(BEGIN_S, BEGIN_S + 200.0, speed=0.0)

    async def test() -> None:
        async with watching(folder, clock=clock) as (app, press):
            clock.move(BEGIN_S + 50.0)
            app.settle()
            step = app.shown.view.step
            assert 45 < step < 55
            assert app.shown.newest.length == step
            assert "done" not in text(app).splitlines()[0]
            await press("{")
            assert app.shown.view.step == 25
            await press("]")
            await press("end")
            app.settle()
            assert app.shown.view.step == 100
            assert "done" in text(app).splitlines()[0]

    go(test())


def test_a_run_grows_on_the_screen(tmp_path: Path) -> None:
    folder = live(tmp_path / "run", steps=20)

    async def test() -> None:
        async with watching(folder) as (app, press):
            draw = recordings.random.Random(1)
            with open(folder / "events/rank000.jsonl", "ab") as log:
                line = recordings.lines([(BEGIN_S + 300, recordings.step(21, draw))])[0]
                log.write(line[:50])
                log.flush()
                await asyncio.sleep(0.3)
                assert app.shown.view.step == 20
                log.write(line[50:])
                log.flush()
            await until(lambda: app.shown.view.step == 21)
            await press()
            assert "step 21" in text(app)

    with trainer(folder):
        go(test())


def test_a_kill_is_on_the_screen(tmp_path: Path) -> None:
    folder = live(tmp_path / "run", steps=20)

    async def test(process: subprocess.Popen[str]) -> None:
        async with watching(folder) as (app, press):
            assert "running" in text(app).splitlines()[0]
            process.kill()
            await until(lambda: app.shown.snapshot.state == "killed")
            await press()
            assert "killed" in text(app).splitlines()[0]

    with trainer(folder) as process:
        go(test(process))


def test_without_a_run_there_is_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        app = Monitor([], runs_dir=Path("nowhere"))
        async with app.run_test(size=(120, 40)) as pilot:
            while not app.is_settled:
                await asyncio.sleep(0.01)
            app.settle()
            await pilot.pause()
            shown = text(app)
            assert "no run" in shown
            assert re.search(r"HOST [\d.]+ (GiB )?of [\d.]+ [GT]iB", shown), "this machine's memory"
            assert "all programs" in shown

    go(test())


@pytest.mark.slow
def test_themes(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain())

    async def test() -> None:
        async with watching(folder) as (app, press):
            before = text(app)
            for theme in ("color-blind-safe", "ansi-dark", "textual-light"):
                app.theme = theme
                await press("5", "1")
                assert text(app) == before, f"colors only: {theme}"
            await press("2")
            for widget in app.query("MemoryBars, AreaChart, Timeline, Chart"):
                for y in range(widget.size.height):
                    for segment in widget.render_line(y):
                        color = segment.style and segment.style.bgcolor
                        assert color and min(color.get_truecolor()) > 200, "light behind it"

    go(test())


@pytest.mark.slow
def test_owners_of_each_rank(tmp_path: Path) -> None:
    first, second = recordings.ranks(2, steps=5)
    (row, *rest) = recordings.memory(5).rows
    own = schema.Memory(step=5, rows=(replace(row, owner="its own", num_bytes=3 << 30), *rest))
    folder = write(tmp_path / "run", first, [*second, (second[-1][0], own)])

    async def test() -> None:
        async with watching(folder) as (app, press):
            await press("2")
            assert "owner on rank 0" in text(app) and "its own" not in text(app)
            await press("v")
            assert "owner on rank 1" in text(app) and "its own" in text(app)
            await press("v")
            assert "owner on rank 0" in text(app) and "its own" not in text(app)

    go(test())


def test_panels_behind_the_tenth_have_no_key() -> None:
    names = [f"panel {number}" for number in range(1, 12)]
    keys = [key for key, _ in with_keys(names)]
    assert keys == [*"1234567890", ""]
    assert [name for _, name in with_keys(names)] == names
    assert with_keys(names[:2]) == [("1", "panel 1"), ("2", "panel 2")]


def test_help_and_palette(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", plain())

    async def test() -> None:
        async with watching(folder) as (app, press):
            await press("question_mark")
            assert "hundred steps" in text(app) and "GPU→CPU" in text(app)
            await press("question_mark")
            assert not isinstance(app.screen, Help)
            await press("question_mark", "escape")
            assert not isinstance(app.screen, Help)
            await press("ctrl+p")
            await press(*"timeline")
            await until(lambda: "Screen 4: timeline" in text(app))

    go(test())


def test_requests_are_for_this_host_s_runs_too(tmp_path: Path) -> None:
    """A run on another host whose log is fresh may be asked as well: the folder is shared."""
    folder = live(tmp_path / "run")
    known = json.loads((folder / "run.json").read_text())
    assert known["host"] != socket.gethostname()

    async def test() -> None:
        import time

        async with watching(folder, clock=ManualClock(time.time())) as (app, press):
            assert app.shown.snapshot.state == "running"
            await press("c")
            assert isinstance(app.screen, Confirm)

    go(test())


def test_a_tick_while_the_widgets_go_one_by_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "20261121-080000-demo", plain())
    ticked: list[bool] = []

    async def test() -> None:
        async with watching(tmp_path / "20261121-080000-demo") as (app, _):
            prune = app._prune

            async def headline_first(*nodes: Widget, **keywords: Any) -> None:
                await prune(app.query_one("#headline"))
                ticked.append(not app.query("#headline") and bool(app.query("#panels")))
                app.settle()
                app.post_message(app.Listed([]))
                await prune(*nodes, **keywords)

            monkeypatch.setattr(app, "_prune", headline_first)

    go(test())
    assert ticked == [True]
