"""Comparing and saving: jobs' differences, charts as CSV, the clipboard."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from offloadtrain_tui import plots
from offloadtrain_tui.app import Monitor
from offloadtrain_tui.panels.job import differences
from offloadtrain_tui.reading.columns import Series, Smoothed
from textual.widgets import Input

from tests.tui.recordings import Timed, plain, start, unlucky, write
from tests.tui.test_app import text, watching

pytestmark = pytest.mark.slow


def another(steps: int = 30) -> list[Timed]:
    """A run of another job, which differs in two keys."""
    (at_s, _), *rest = plain(steps, seed=1, name="other")
    config = {"train": {"steps": steps, "seed": 7}, "model": {"d_model": 5120}}
    return [(at_s, start("other", config=config)), *rest]


async def test_two_runs_are_compared(tmp_path: Path) -> None:
    """Their jobs, their charts as CSV, and their smoothed losses."""
    job = {"train": {"steps": 3, "seed": 1}, "model": {"d": 5}}
    other = {"train": {"steps": 4, "seed": 1}, "model": {}, "name": "x"}
    rows = [("train.steps", "3", "4"), ("model.d", "5", "-"), ("name", "-", "x")]
    assert list(differences(job, other)) == rows
    first, second = write(tmp_path / "first", plain()), write(tmp_path / "second", another())

    async with watching(first, second) as (app, press):
        app._overlaid = set()  # both are named, and so overlaid
        app.settle()
        await press("8")
        assert "differences" not in text(app)
        app._overlaid = {second}
        app.settle()
        await press("8")
        shown = " ".join(text(app).split())
        assert "differences to second" in shown
        assert "train.steps 100 here, 30 there" in shown
        assert "train.seed - here, 7 there" in shown and "d_model 5120 here" not in shown
        rows = list(csv.reader(io.StringIO(plots.as_csv("loss", app.shown))))
        assert rows[0] == ["step", "loss", "val_loss", "loss of second"]
        assert len(rows) == 101 and rows[100][3] == "" and rows[30][3] != ""
        series = app.shown.newest.history.series
        assert [float(row[1]) for row in rows[1:]] == list(series["loss"].values)
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


async def test_a_repeated_step_and_a_loss_that_is_no_number_are_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", unlucky())

    async with watching(folder) as (app, _):
        rows = list(csv.reader(io.StringIO(plots.as_csv("loss", app.shown))))
        steps = [int(row[0]) for row in rows[1:]]
        assert steps == sorted(set(steps)) and 12 not in steps, "its loss is not a number"


async def test_charts_are_saved_and_copied_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    messages: list[str] = []
    monkeypatch.setattr(Monitor, "copy_to_clipboard", lambda self, text: copied.append(text))
    monkeypatch.setattr(Monitor, "tell", lambda self, text, level="": messages.append(text))
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "run", plain())

    async with watching(folder) as (app, press):

        async def answer(key: str, name: str) -> str:
            await press(key)
            app.screen.query_one(Input).value = name
            await press("enter")
            return messages[-1]

        assert "saved" in await answer("e", "loss.csv")
        assert "exists: it is left" in await answer("e", "loss.csv")
        assert "give a chart's name" in await answer("e", "none.csv")
        assert "give a chart's name" in await answer("e", "loss.pdf")
        assert "cannot be written: No such file" in await answer("e", "nowhere/mfu.csv")
        assert copied == []
        assert "copied as CSV" in await answer("e", "lr")
        app.shown = replace(app.shown, readonly=True)
        assert "nothing is written" in await answer("e", "lr.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.csv", "run"]
    assert (tmp_path / "loss.csv").read_text().startswith("step,loss,val_loss\n1,")
    assert copied[0].startswith("step,lr\n1,") and len(copied) == 1
