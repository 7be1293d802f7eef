"""`offloadtrain prepare`: the names of the token files on stdout, everything else on stderr."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from offloadtrain.cli.main import main
from offloadtrain.data.tokens import TokenFile


def test_token_files_are_made_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "text"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.txt").write_text(f"text number {number}\n" * 50)
    out = tmp_path / "tokens"
    assert main(["prepare", str(source), str(out), "--val-fraction", "0.2"]) == 0
    printed, narrated = capsys.readouterr()
    assert printed == f"{out}/train.bin\n{out}/val.bin\n"
    assert "written" in narrated
    assert len(TokenFile(out / "train.bin")) > len(TokenFile(out / "val.bin")) > 0

    assert main(["prepare", str(source), str(out), "--val-fraction", "0.2"]) == 0
    assert "made before" in capsys.readouterr().err


def test_lengths_are_shown_with_what_each_sequence_would_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents of 3, 5, 5, 9 and 40 bytes: a sequence of 8 tokens and its last target is 9."""
    texts = ["abc", "abcde", "vwxyz", "123456789", "x" * 40]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    out = tmp_path / "out"
    assert main(["prepare", f"{tmp_path}/a.jsonl", f"{out}", "--val-fraction", "0"]) == 0
    ends = TokenFile(out / "train.bin").document_ends().tolist()
    lengths = [end - begin for begin, end in pairwise([0, *ends])]
    rows = [line.split() for line in capsys.readouterr().err.splitlines() if "≤" in line]
    beyond = {row[1]: [length - int(row[1]) - 1 for length in lengths] for row in rows}
    assert [row[1] for row in rows] == ["4", "8", "16", "32", "64"]
    shown = {row[1]: " ".join(row).partition("█ ")[2] or " ".join(row[2:]) for row in rows}
    inside = {
        bound: sum(2 * length > int(bound) >= length for length in lengths) for bound in shown
    }
    for bound, text in shown.items():
        lost = [tokens for tokens in beyond[bound] if tokens > 0]
        cut = f"{len(lost)} lose {sum(lost)} tokens" if lost else "none"
        assert text.startswith(f"{inside[bound]} {cut}"), (bound, text)
