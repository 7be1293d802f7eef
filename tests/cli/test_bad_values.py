"""Values that no key of a job can have, key by key: code 2, few lines, nothing made or obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config.job import _all_keys
from tests.cli.test_bad_input import HOSTILE, JOB, NINES, files

Captured = pytest.CaptureFixture[str]
KEYS = [key for key in _all_keys() if "." in key]
OF_NO_TYPE = ("{x = 1}", "1979-05-27", "[[1]]", "[{x = 1}]")
"""A table, a date, lists of what no key lists."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)


def told(capsys: Captured, override: str, code: int = 2) -> str:
    before = files()
    assert main(["plan", "job.toml", "--machine", "cpu2", "--set", override]) == code
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and files() == before and len(lines) <= 3, err
    assert all(line.isprintable() and len(line) < 1000 for line in lines)
    return err


def test_there_are_enough() -> None:
    assert len(KEYS) * len(OF_NO_TYPE) >= 200


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_no_key_takes_a_value_of_no_type(key: str, capsys: Captured) -> None:
    for value in OF_NO_TYPE:
        assert key.split(".")[0] in told(capsys, f"{key}={value}")


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_no_number_is_too_large_to_be_told(key: str, capsys: Captured) -> None:
    """A key of text may have digits: whether it is refused is not asked here."""
    before = files()
    for value in (NINES, f"-{NINES}", f"1e{NINES}", "nan", "-inf", HOSTILE):
        code = main(["plan", "job.toml", "--machine", "cpu2", "--set", f"{key}={value}"])
        out, err = capsys.readouterr()
        assert code in (0, 2, 4) and files() == before
        assert "Traceback" not in err and len(err) < 4000
        assert all(line.isprintable() for line in (*out.splitlines(), *err.splitlines()))
