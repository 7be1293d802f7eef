"""The job's commands at alerts and at the end: no shell, bounded time, the user's own word only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from offloadtrain.config import job as jobs
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.events import schema
from offloadtrain.train.log.command_hooks import CommandHooks
from tests.train.small_job import events_of, run, small_job

SHOWN = "\N{REPLACEMENT CHARACTER}"
WRITE = """
import os, sys
with open(sys.argv[1], "a") as out:
    facts = {k: v for k, v in os.environ.items() if k.startswith("OFFLOADTRAIN_")}
    print(sys.argv[2:], [facts.get("OFFLOADTRAIN_" + key) for key in sys.argv[2:]], file=out)
"""


def writer(out: Path, *keys: str) -> tuple[str, ...]:
    """A command that appends these facts to a file."""
    return (sys.executable, "-S", "-c", WRITE, str(out), *keys)


def with_commands(folder: Path, **commands: tuple[str, ...]) -> Config:
    job = small_job(folder)
    return replace(job, train=replace(job.train, **commands))


@pytest.mark.slow
def test_a_run_calls_its_commands(tmp_path: Path) -> None:
    out, marker = tmp_path / "out", tmp_path / "marker"
    ends = writer(out, "EVENT", "STATUS", "STEP", "RUN", f"; touch {marker}")
    job = with_commands(tmp_path, on_end=ends, on_alert=("does-not-exist",))
    path = tmp_path / "a run"
    assert run(replace(job, train=replace(job.train, steps=3, checkpoint_every=0)), path) == 0
    assert f"['end', 'done', '3', '{path}', None]" in out.read_text()
    assert not marker.exists(), "there is no shell"
    assert not events_of(path, schema.Warning_), "no alert, no command"


@pytest.mark.slow
def test_a_command_that_fails_is_reported_once_in_the_log(tmp_path: Path) -> None:
    job = with_commands(tmp_path, on_end=(sys.executable, "-S", "-c", "raise SystemExit(3)"))
    path = tmp_path / "run"
    assert run(replace(job, train=replace(job.train, steps=2, checkpoint_every=0)), path) == 0
    (warning,) = events_of(path, schema.Warning_)
    assert warning.code == "command-failed" and "train.on_end" in warning.message
    assert "exit code 3" in warning.message


def alert(state: str = "raised", message: str = "nan") -> schema.Alert:
    return schema.Alert(code="not-finite", state=state, message=message, level="error", step=7)


def test_an_alert_runs_its_command_when_it_is_raised(tmp_path: Path) -> None:
    out, warnings = tmp_path / "out", list[str]()
    job = with_commands(tmp_path, on_alert=writer(out, "EVENT", "CODE", "LEVEL", "STEP", "MESSAGE"))
    hooks = CommandHooks(job, tmp_path, warnings.append)
    hooks.alert(alert())
    hooks.alert(alert("cleared"))
    hooks.alert(alert(message="x\0\x1b[31m$(touch y)\n"))
    hooks.close()
    first, second = (line.partition("] [")[2] for line in out.read_text().splitlines())
    assert first == "'alert', 'not-finite', 'error', '7', 'nan']"
    assert second == f"'alert', 'not-finite', 'error', '7', 'x{SHOWN}{SHOWN}[31m$(touch y) ']"
    assert warnings == []
    for command, problem in (("/nowhere/x", "No such file or directory"), ("a\0", "null byte")):
        warnings.clear()
        job = with_commands(tmp_path, on_alert=(command,))
        hooks = CommandHooks(job, tmp_path, warnings.append)
        for _ in range(3):
            hooks.alert(alert())
        hooks.close()
        (message,) = warnings
        assert f"{command}: cannot be run: " in message and problem in message


@pytest.mark.slow
def test_a_command_is_ended_after_its_limit_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is over once the child is there."""
    out, warnings, wait = tmp_path / "pid", list[str](), subprocess.Popen.wait

    def times_out(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        while not (out.exists() and out.read_text().endswith("\n")):
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", times_out)
    job = with_commands(tmp_path, on_alert=("sh", "-c", f"sleep 600 & echo $! > {out}; wait"))
    hooks = CommandHooks(job, tmp_path, warnings.append, limit_s=60.0)
    hooks.alert(alert())
    hooks.close()
    assert warnings == ["train.on_alert: sh: was ended after 60 s. It is not said again"]
    assert _is_gone(int(out.read_text()))


def _is_gone(pid: int) -> bool:
    """An orphan's end is its new parent's to collect: until then it is a zombie."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def job_with_a_command(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "job.toml"
    path.write_text(jobs.dump(with_commands(folder, on_end=("true",))))
    return path


def test_a_run_folder_may_name_no_commands(tmp_path: Path) -> None:
    """A file of one's own may, and the command line is the user's own word."""
    assert jobs.load(job_with_a_command(tmp_path)).train.on_end == ("true",)
    for number, mark in enumerate(("run.json", "resolved.toml", "events/rank000.jsonl")):
        path = job_with_a_command(tmp_path / f"sent{number}")
        (path.parent / mark).parent.mkdir(exist_ok=True)
        (path.parent / mark).touch()
        deeper = job_with_a_command(path.parent / "checkpoints")
        link = tmp_path / f"link{number}.toml"
        link.symlink_to(path)
        for source in (path, deeper, link):
            with pytest.raises(ConfigError, match=r"train\.on_end run commands.*in the run folder"):
                jobs.load(source)
        job = jobs.load(path, ['train.on_end=["touch", "x"]'])
        assert job.train.on_end == ("touch", "x")
        with pytest.raises(ConfigError, match=r"train\.on_end"):
            jobs.load(path, ['train.on_alert=["touch"]'])
    for value in ('["", "x"]', '["a\\nb"]', '"touch x"', "[1]"):
        with pytest.raises(ConfigError, match=r"train\.on_end"):
            small_job(tmp_path, f"train.on_end={value}")


def test_a_file_of_another_user_may_name_no_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_with_a_command(tmp_path)
    os.chown(path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(
        os, "geteuid", lambda: 1
    )
    with pytest.raises(ConfigError, match="it belongs to user"):
        jobs.load(path)
