"""Comparing and saving: jobs' differences, charts as CSV, SVG and PNG, the clipboard."""

from __future__ import annotations

import csv
import io
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from offloadtrain_tui import exports, plots
from offloadtrain_tui.app import Monitor
from offloadtrain_tui.panels.job import differences
from offloadtrain_tui.reading.series import Series, Smoothed
from PIL import Image
from textual.widgets import Input

from tests.tui.recordings import Timed, plain, start, unlucky, write
from tests.tui.test_app import go, text, watching

pytestmark = pytest.mark.slow


def another(steps: int = 30) -> list[Timed]:
    """A run of another job, which differs in two keys."""
    (at_s, _), *rest = plain(steps, seed=1, name="other")
    config = {"train": {"steps": steps, "seed": 7}, "model": {"d_model": 5120}}
    return [(at_s, start("other", config=config)), *rest]


def test_two_runs_are_compared(tmp_path: Path) -> None:
    """Their jobs, their charts as CSV and SVG, and their smoothed losses."""
    job = {"train": {"steps": 3, "seed": 1}, "model": {"d": 5}}
    other = {"train": {"steps": 4, "seed": 1}, "model": {}, "name": "x"}
    rows = [("train.steps", "3", "4"), ("model.d", "5", "-"), ("name", "-", "x")]
    assert list(differences(job, other)) == rows
    first, second = write(tmp_path / "first", plain()), write(tmp_path / "second", another())

    async def test() -> None:
        async with watching(first, second) as (app, press):
            await press("8")
            assert "differences" not in text(app)
            app._overlaid = {second}
            app._show()
            await press("8")
            shown = " ".join(text(app).split())
            assert "differences to second" in shown
            assert "train.steps 100 here, 30 there" in shown
            assert "train.seed - here, 7 there" in shown and "d_model 5120 here" not in shown
            rows = list(csv.reader(io.StringIO(exports.as_csv("loss", app.shown))))
            assert rows[0] == ["step", "loss", "val_loss", "loss of second"]
            assert len(rows) == 101 and rows[100][3] == "" and rows[30][3] != ""
            series = app.shown.newest.history.series
            assert [float(row[1]) for row in rows[1:]] == list(series["loss"].values)
            picture = ElementTree.fromstring(exports.as_svg("loss", app.shown))
            curves = [element for element in picture if element.tag.endswith("polyline")]
            assert [len(curve.attrib["points"].split()) for curve in curves] == [100, 4, 30]
            smoothed = {}
            await press("1")  # with the chart of the loss
            for _ in range(4):
                await press("m")
                mean, *_, overlaid = plots.plot("loss", app.shown).curves
                kinds = (type(mean.series), type(overlaid.series))
                newest = mean.series.values[-1] if mean.label else None
                smoothed[app.shown.span] = (kinds, newest)
            assert list(smoothed) == [100, 500, 0, 20]
            assert smoothed.pop(0)[0] == (Series, Series)
            assert all(kinds == (Smoothed, Smoothed) for kinds, _ in smoothed.values())
            assert smoothed[20][1] != smoothed[500][1]

    go(test())


def test_a_repeated_step_and_a_loss_that_is_no_number_are_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", unlucky())

    async def test() -> None:
        async with watching(folder) as (app, _):
            rows = list(csv.reader(io.StringIO(exports.as_csv("loss", app.shown))))
            steps = [int(row[0]) for row in rows[1:]]
            assert steps == sorted(set(steps)) and 12 not in steps, "its loss is not a number"
            for shown in (app.shown, replace(app.shown, log=True)):
                assert "nan" not in exports.as_svg("loss", shown)

    go(test())


def test_charts_are_saved_and_copied_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    messages: list[str] = []
    monkeypatch.setattr(Monitor, "copy_to_clipboard", lambda self, text: copied.append(text))
    monkeypatch.setattr(Monitor, "tell", lambda self, text, level="": messages.append(text))
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "run", plain())

    async def test() -> None:
        async with watching(folder) as (app, press):

            async def answer(key: str, name: str) -> str:
                await press(key)
                app.screen.query_one(Input).value = name
                await press("enter")
                return messages[-1]

            assert "saved" in await answer("e", "loss.csv")
            assert "exists: it is left" in await answer("e", "loss.csv")
            assert "saved" in await answer("e", "lr.svg")
            assert "saved" in await answer("e", "loss.png")
            monkeypatch.setitem(sys.modules, "PIL", None)
            assert "a .png needs Pillow" in await answer("e", "lr.png")
            assert "give a chart's name" in await answer("e", "none.csv")
            assert "give a chart's name" in await answer("e", "loss.pdf")
            assert "cannot be written: No such file" in await answer("e", "nowhere/mfu.csv")
            assert copied == []
            assert "copied as CSV" in await answer("k", "lr")
            app.shown = replace(app.shown, readonly=True)
            await press("e")
            assert "nothing is written" in messages[-1]

    go(test())
    files = ["loss.csv", "loss.png", "lr.svg", "run"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert (tmp_path / "loss.csv").read_text().startswith("step,loss,val_loss\n1,")
    assert curve_in(tmp_path / "loss.png")
    assert copied[0].startswith("step,lr\n1,") and len(copied) == 1


def curve_in(picture: Path) -> bool:
    """Whether a picture is white and has a curve that falls from its upper left to its lower right,
    in the color of the first curve of the SVG."""
    with Image.open(picture) as image:
        width, height = image.size
        pixels = image.convert("RGB").load()
        assert pixels is not None and pixels[0, height - 1] == (255, 255, 255)
        blue = (0, 0x72, 0xB2)
        curve = [(x, y) for x in range(width) for y in range(height) if pixels[x, y] == blue]
    left, right = curve[0], curve[-1]
    return left[0] < 0.2 * width and right[0] > 0.9 * width and left[1] < right[1] - 0.3 * height
