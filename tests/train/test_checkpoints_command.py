"""`offloadtrain checkpoints` lists what is there, and reads every byte where it is asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offloadtrain.cli.main import main
from offloadtrain.train.checkpoint.save import save
from tests.train.toy_state import filled


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save(tmp_path / "checkpoints", step, *filled(step), {"step": step})
    return tmp_path


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


def test_checkpoints_are_listed_the_newest_first(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", str(run)]) == 0
    found = lines(capsys)
    assert [name for name, *_ in found] == [f"step-{step:08d}" for step in (3, 2, 1)]
    assert {tuple(rest) for _, *rest in found} == {("listed", "48.0 KiB", "1")}


def test_a_changed_byte_is_found_only_by_reading_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "checkpoints" / "step-00000002" / "rank-000.bin"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    assert main(["checkpoints", str(run)]) == 0
    capsys.readouterr()
    assert main(["checkpoints", str(run), "--verify", "--json"]) == 1
    out, err = capsys.readouterr()
    states = {row["name"][-1]: row["state"] for row in map(json.loads, out.splitlines())}
    assert states == {"3": "verified", "2": "damaged", "1": "verified"}
    assert (err.count("\n") == 1 and "first.bias" in err) or "first.weight" in err


def test_a_folder_that_is_no_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
