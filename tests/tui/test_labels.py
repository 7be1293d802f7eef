"""Tags, notes and pins of runs: stored with the run, and listed."""

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


REFUSED = {
    "printable": (["two\nlines"], ["--note", "\x1b[31m"]),
    "at most 40": (["x" * 41],),
    "at most 32": ([f"t{number}" for number in range(33)],),
}


def test_bad_labels_are_refused_and_foreign_ones_are_text_on_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", plain(3))
    for message, commands in REFUSED.items():
        for arguments in commands:
            assert main(["tag", str(run), *arguments]) == 2
            assert message in capsys.readouterr().err and labels.read(run) == NONE
    for content in ("", "[]", '{"tags": 3, "note": [], "pinned": "yes"}', "{" * 99):
        (run / "labels.json").write_text(content)
        assert labels.read(run) == NONE
    foreign = {"tags": ["a\x1b[31m\nb", 7], "note": "x" * 9999, "pinned": True}
    (run / "labels.json").write_text(json.dumps(foreign))
    shown = labels.read(run)
    assert len(shown.tags) == 1 and shown.text.isprintable() and len(shown.text) < 600


def test_a_link_is_neither_followed_nor_written_through(tmp_path: Path) -> None:
    run, elsewhere = write(tmp_path / "run", plain(3)), tmp_path / "target.json"
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
