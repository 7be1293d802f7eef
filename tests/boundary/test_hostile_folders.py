"""Run folders of others: no command hangs, shows a traceback, or reads and writes elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offloadtrain.boundary.safe_write import own_folder, replace_file
from offloadtrain.cli.main import main
from offloadtrain.events.control import Requests, send
from offloadtrain.events.writer import EventWriter
from tests.boundary.hostile import FOLDERS, LOG, hostile_run, obeyed
from tests.tui.recordings import plain, write

HANGS_S = 120
JOB = """
name = "small"
data.source = "text"
data.seq_len = 8
model.size = "debug"
device.kind = "cpu"
train.steps = 1
"""
Captured = pytest.CaptureFixture[str]


@contextmanager
def not_for_ever() -> Iterator[None]:
    """A command that hangs is interrupted, and fails the test."""

    def hangs(*_: object) -> None:
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def output_of(capsys: Captured, *arguments: str, most_lines: int = 4) -> tuple[int, str, str]:
    with not_for_ever():
        code = main(list(arguments))
    out, err = capsys.readouterr()
    assert "Traceback" not in err, err[-2000:]
    assert obeyed(out) == obeyed(err) == []
    assert len(err.splitlines()) <= most_lines and len(err) < 500 * most_lines
    return code, out, err


@pytest.mark.slow
@pytest.mark.parametrize("kind", FOLDERS)
def test_no_command_trusts_a_run_folder(kind: str, tmp_path: Path, capsys: Captured) -> None:
    run = hostile_run(tmp_path / "runs" / "20260101-000000-bad", kind)
    good = write(tmp_path / "runs" / "20250101-000000-good", plain(12))
    (tmp_path / "job.toml").write_text(JOB)
    elsewhere = set(tmp_path.iterdir())
    folder = str(run)
    for arguments in (["status"], ["status", "--json"], ["events"], ["events", "--json"]):
        assert output_of(capsys, *arguments[:1], folder, *arguments[1:])[0] in (0, 1, 2)
    for arguments in ([], ["--json"]):
        code, out, _ = output_of(capsys, "runs", str(run.parent), *arguments)
        assert code == 0 and good.name in out, "one bad folder does not hide the others"
    assert output_of(capsys, "ctl", folder, "note", "x", "--wait", "0")[0] in (1, 2)
    assert output_of(capsys, "trace", folder)[0] in (0, 1, 2)
    job = str(tmp_path / "job.toml")
    assert output_of(capsys, "train", job, "--resume", folder)[0] in (1, 2)
    assert (run / "secret").read_text() == "secret" and set(tmp_path.iterdir()) == elsewhere


DRAWN = [
    kind for kind in FOLDERS if "FIFO" in kind or kind.startswith("the log") or "device" in kind
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in DRAWN[:4] else pytest.mark.long) for kind in DRAWN],
)
def test_the_monitor_trusts_no_run_folder(kind: str, tmp_path: Path, capsys: Captured) -> None:
    run = hostile_run(tmp_path / "runs" / "20260101-000000-bad", kind)
    code, out, err = output_of(capsys, "tui", str(run), "--once", "--runs-dir", str(run.parent))
    assert code in (0, 1, 2) and (code == 2 or out.strip())
    assert code != 1 or err.strip()  # 1: no record of a run can be read, which is said


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (f"{LOG} is a FIFO", "it is a FIFO, not a regular file"),
        (f"{LOG} is a link to a device", "it is a symbolic link, which is not followed here"),
    ],
)
def test_a_log_that_is_not_read_is_named(
    kind: str, why: str, tmp_path: Path, capsys: Captured
) -> None:
    run = hostile_run(tmp_path / "run", kind)
    for command in (["status"], ["events"], ["events", "--json"]):
        _, _, err = output_of(capsys, *command[:1], str(run), *command[1:])
        assert err == f"not read: {run / LOG}: {why}\n"
    _, _, err = output_of(capsys, "trace", str(run))
    assert why in err


def test_what_a_run_makes_is_its_owners_only(tmp_path: Path) -> None:
    """By mode, whatever the umask: logs quote texts and paths."""
    run = own_folder(tmp_path / "run")
    Requests(run)
    send(run, "note", "x")
    writer = EventWriter()
    writer.open(own_folder(run / "events") / "rank000.jsonl")
    writer.close()
    replace_file(run / "run.json", "{}")
    made = [run, *run.rglob("*")]
    assert len(made) == 7
    wrong = [p for p in made if p.stat().st_mode & 0o777 != (0o700 if p.is_dir() else 0o600)]
    assert wrong == []
