"""Tags, notes and pins of runs: kept beside the run, whole, and listed."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from offloadtrain_tui import labels
from offloadtrain_tui.labels import NONE, Labels
from offloadtrain_tui.panels.runs import RunsPanel
from textual.widgets import DataTable

from offloadtrain.cli.main import main
from tests.tui.recordings import plain, write
from tests.tui.test_app import text, watching


def test_a_run_is_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "20260101-000000-old", plain(30))
    write(tmp_path / "20260201-000000-new", plain(30))
    assert main(["tag", str(old), "baseline", "lr", "--note", "good one", "--pin"]) == 0
    assert labels.read(old) == Labels(("baseline", "lr"), "good one", True)
    assert main(["tag", str(old), "lr", "--remove"]) == 0
    assert main(["tag", str(old), "baseline", "long"]) == 0
    assert labels.read(old) == Labels(("baseline", "long"), "good one", True)
    capsys.readouterr()
    assert main(["runs", str(tmp_path)]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(old.name) and first.endswith("pinned  #baseline #long  good one")
    assert "new" in second and second.endswith("ago")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert row["labels"] == {"tags": ["baseline", "long"], "note": "good one", "pinned": True}
    assert main(["tag", str(old), "--no-pin", "--note", ""]) == 0
    assert labels.read(old) == Labels(("baseline", "long"))
    assert sorted(os.listdir(old)) == ["events", "labels.json", "lock", "run.json"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["two\nlines"], "printable"),
        (["x" * 41], "at most 40"),
        (["--note", "\x1b[31m"], "printable"),
        ([f"t{number}" for number in range(33)], "at most 32"),
    ],
)
def test_labels_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    run = write(tmp_path / "run", plain(3))
    assert main(["tag", str(run), *arguments]) == 2
    assert told in capsys.readouterr().err and labels.read(run) == NONE


@pytest.mark.parametrize(
    "content", ["", "[]", '{"tags": 3, "note": [], "pinned": "yes"}', "{" * 99]
)
def test_a_file_of_something_else_is_no_label(tmp_path: Path, content: str) -> None:
    (tmp_path / "labels.json").write_text(content)
    assert labels.read(tmp_path) == NONE


def test_foreign_labels_are_text_on_a_line(tmp_path: Path) -> None:
    foreign = {"tags": ["a\x1b[31m\nb", 7], "note": "x" * 9999, "pinned": True}
    (tmp_path / "labels.json").write_text(json.dumps(foreign))
    found = labels.read(tmp_path)
    assert len(found.tags) == 1 and found.text.isprintable() and len(found.text) < 600


def test_a_link_is_neither_followed_nor_written_through(tmp_path: Path) -> None:
    run, elsewhere = write(tmp_path / "run", plain(3)), tmp_path / "mine.json"
    elsewhere.write_text('{"pinned": true}')
    (run / "labels.json").symlink_to(elsewhere)
    assert labels.read(run) == NONE
    labels.write(run, Labels(("a",)))
    assert labels.read(run).tags == ("a",) and elsewhere.read_text() == '{"pinned": true}'


@pytest.mark.slow
def test_p_pins_a_run_on_the_screen(tmp_path: Path) -> None:
    folder = write(tmp_path / "runs/20260101-000000-a", plain(30))
    write(tmp_path / "runs/20260201-000000-b", plain(30))

    async def test(readonly: bool) -> None:
        async with watching(folder, readonly=readonly) as (app, press):
            await press("9")
            app.query_one(RunsPanel).query_one(DataTable).move_cursor(row=1)
            await press("p")
            assert labels.read(folder).pinned is not readonly
            app._look_for_runs()
            while ("pinned" in text(app)) is readonly:
                await press()
            if not readonly:
                assert text(app).index("-a ") < text(app).index("-b ")

    for readonly in (True, False):
        asyncio.run(test(readonly))
