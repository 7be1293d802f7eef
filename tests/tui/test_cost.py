"""What the monitor costs, in counts, bytes and ratios to work of a known size; see
`python -m benchmarks.monitor` for seconds and percents."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from offloadtrain_tui.app import Monitor
from offloadtrain_tui.plots import KINDS, plot
from offloadtrain_tui.reading.history import fold
from offloadtrain_tui.reading.log_reader import Snapshot
from offloadtrain_tui.reading.view import View
from offloadtrain_tui.view_state import ViewState
from offloadtrain_tui.widgets.chart import Chart
from textual.geometry import Region
from textual.screen import Screen

from offloadtrain.events import log_lines
from tests.tui import recordings
from tests.tui.recordings import BEGIN_S, append, lines, write
from tests.tui.test_app import watching
from tests.tui.test_runs import live, trainer

SLACK = 3.0
Press = Callable[..., Awaitable[None]]


def cpu_s(work: Callable[[], object], times: int = 5) -> float:
    """The least CPU time of a few rounds on this thread."""
    spent = []
    for _ in range(times):
        began = time.thread_time()
        work()
        spent.append(time.thread_time() - began)
    return min(spent)


def steps(count: int) -> list[bytes]:
    draw = random.Random(0)
    return lines((BEGIN_S + n, recordings.step(n, draw)) for n in range(1, count + 1))


def test_folding_a_log_costs_less_than_parsing_it_with_the_standard_library() -> None:
    """100,000 steps within two seconds: about 8 µs each for `json.loads` alone."""
    log = steps(4000)
    folding, parsing = cpu_s(lambda: fold(log), 3), cpu_s(lambda: list(map(json.loads, log)), 3)
    assert folding < 0.8 * SLACK * parsing


def test_a_chart_of_a_long_run_reads_as_little_as_one_of_a_short_run() -> None:
    long, short = fold(steps(12_000)), fold(steps(400))

    def look(history: object) -> None:
        view = View.at(history)  # type: ignore[arg-type]
        shown = ViewState(Snapshot("run", None, (view,), "running"), now_s=0.0)
        for name in KINDS:
            for curve in plot(name, shown).curves:
                for lo, hi in shown.window.columns(100):
                    curve.series.extent(lo, min(hi, len(curve.series)))

    look(long)  # stretches are measured once
    look(short)
    assert cpu_s(lambda: look(long)) < 3.0 * SLACK * cpu_s(lambda: look(short))


async def add_steps(app: Monitor, press: Press, folder: Path, first: int, count: int) -> None:
    """Append steps to the log of a run, one after the other is on the screen."""
    draw = random.Random(1)
    for number in range(first, first + count):
        append(folder, (time.time(), recordings.step(number, draw)))
        while app.shown.view.step < number:
            await asyncio.sleep(0.01)
        await press()


@pytest.mark.slow
async def test_a_new_step_redraws_few_lines_and_lays_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twelve charts with 1,000 steps. A layout of the whole screen takes longer than drawing
    what has changed in it."""
    folder = live(tmp_path / "run", steps=1000)
    redrawn: list[int] = []
    laid_out: list[object] = []
    refresh, layout = Chart.refresh, Screen._refresh_layout

    def count_lines(self: Chart, *regions: Region, **options: Any) -> Chart:
        redrawn.append(sum(region.height for region in regions))
        return refresh(self, *regions, **options)

    def count_layouts(self: Screen[object], *sizes: Any, **options: Any) -> None:
        laid_out.append(self)
        layout(self, *sizes, **options)

    with trainer(folder):
        async with watching(folder, size="wide") as (app, press):
            for panel in ("plots", "overview", "transfers", "ranks"):
                app.action_panel(panel)
                await press()
                with monkeypatch.context() as patch:
                    patch.setattr(Chart, "refresh", count_lines)
                    patch.setattr(Screen, "_refresh_layout", count_layouts)
                    redrawn.clear()
                    laid_out.clear()
                    first = app.shown.view.step
                    await add_steps(app, press, folder, first + 1, 4)
                if panel == "plots":
                    charts = [chart for chart in app.query("#plots-charts Chart") if chart.display]
                    assert len(charts) == 12
                    height = sum(chart.size.height for chart in charts)
                    assert 0 < sum(redrawn) < 0.7 * 4 * height
                else:
                    assert len(laid_out) <= 2, panel


def test_the_monitor_loads_no_torch_and_scripts_load_no_textual() -> None:
    program = (
        "import json, sys, offloadtrain_tui.reports; reports = 'textual' in sys.modules;"
        "import offloadtrain_tui.app, offloadtrain_tui.command;"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'));"
        "print(json.dumps([reports, sorted(sys.modules), int(status['VmHWM'].split()[0])]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loads_textual, modules, kib = json.loads(done.stdout)
    assert not loads_textual
    assert not {"torch", "numpy", "numba", "safetensors"} & set(modules)
    assert kib < 80 * 1024


@pytest.mark.slow
async def test_each_record_is_decoded_once_for_all_screens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a screen shows of it, and however often: a sampled step of a large model has
    thousands of spans."""
    folder = write(tmp_path / "run", *recordings.ranks(4, steps=10))
    append(folder, *((BEGIN_S + 11, span) for span in recordings.spans(10)))
    decoded: Counter[bytes | str] = Counter()
    from_line = log_lines.from_line

    def counted(line: bytes | str) -> log_lines.Record | None:
        decoded[line] += 1
        return from_line(line)

    monkeypatch.setattr(log_lines, "from_line", counted)

    async with watching(folder) as (app, press):
        for key in "1234567891":
            await press(key)
            app.settle()
    assert len(decoded) >= 20 + 1, "the timeline, and a sample of the machine"
    assert set(decoded.values()) == {1}
