"""`offloadtrain prepare`: the names of the token files on stdout, everything else on stderr."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("source", "options", "code", "message"),
    [
        ("absent", [], 2, "absent"),
        ("empty", [], 2, "empty"),
        ("empty", ["--val-fraction", "2"], 2, "[0, 1)"),
    ],
)
def test_what_cannot_be_prepared_is_told(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    options: list[str],
    code: int,
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["prepare", str(tmp_path / source), str(tmp_path / "out"), *options]) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err
