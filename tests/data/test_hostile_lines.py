"""JSONL of others: a line of gigabytes is never in memory, and what is no line ends the reading."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offloadtrain.boundary.safe_open import UnsafeFileError
from offloadtrain.data import records
from offloadtrain.data.records import Bad, cut
from offloadtrain.data.source import SourceFile


def read(path: Path) -> list[object]:
    file = SourceFile(path.name, str(path), path.stat().st_size, 0)
    return [one for piece in cut(file) for one in records.records(piece, ())]


def test_a_line_that_is_too_long_is_one_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "LONGEST_LINE", 100)
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": "' + "x" * 200 + '"}\n{"n": 3}\n')
    one, two, three = read(tmp_path / "a.jsonl")
    assert one == {"n": 1} and three == {"n": 3}
    assert isinstance(two, Bad) and "a line of 210 bytes, and at most 100 are read" in two.problem


def test_a_file_without_lines_ends_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "LONGEST_LINE", 100)
    (tmp_path / "a.jsonl").touch()
    os.truncate(tmp_path / "a.jsonl", 1 << 40)
    file = SourceFile("a.jsonl", str(tmp_path / "a.jsonl"), 4 << 20, 0)
    with pytest.raises(UnsafeFileError, match="a line of more than"):
        [one for piece in cut(file) for one in records.records(piece, ())]
