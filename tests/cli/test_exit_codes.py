"""The table of exit codes, on the real command in a process of its own."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from offloadtrain.cli.main import main
from offloadtrain.config import job as jobs
from offloadtrain.train.signals import REPEAT_S
from tests.conftest import Command
from tests.train.small_job import events_of, small_job

Process = subprocess.Popen[str]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def job_file(folder: Path, *overrides: str) -> Path:
    path = folder / "job.toml"
    path.write_text(jobs.dump(small_job(folder, *overrides)))
    return path


def start(*arguments: object, program: Sequence[str] = ("-m", "offloadtrain")) -> Process:
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def wait_for_step(path: Path, process: Process, seconds: float = 300.0) -> None:
    """Wait until a step is in the event log."""
    log = path / "events" / "rank000.jsonl"
    deadline = time.monotonic() + seconds
    while not (log.exists() and b'"k":"step"' in log.read_bytes()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def wait_for(process: Process, words: str) -> None:
    """Read its stderr up to the line with these words."""
    assert process.stderr is not None
    line = process.stderr.readline()
    while words not in line:
        assert line, f"ended with {process.wait()}"
        line = process.stderr.readline()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_75_stopped_on_request_then_0_done(tmp_path: Path, number: int) -> None:
    job, path = job_file(tmp_path, "train.steps=5000", "train.checkpoint_every=0"), tmp_path / "run"
    process = start("train", job, "--run-dir", path)
    wait_for_step(path, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err
    assert out == f"{path}\n" and "Traceback" not in err
    assert f"{signal.Signals(number).name}: stopping after this step" in err
    from offloadtrain.events import schema
    from offloadtrain.train.checkpoint import checkpoint

    stopped = checkpoint.verify(checkpoint.find(path / "checkpoints")[0]).step
    assert events_of(path, schema.RunEnded)[0].status == "stopped"
    assert [e.step for e in events_of(path, schema.Step)] == list(range(1, stopped + 1))

    go_on = next(line for line in err.splitlines() if line.startswith("resume: "))
    arguments = [*go_on.split()[2:], "--set", f"train.steps={stopped + 3}"]
    assert main(arguments) == 0
    assert [e.step for e in events_of(path, schema.Step)] == list(range(1, stopped + 4))


_ENDLESS = """
import sys, time
from offloadtrain.cli.main import main
from offloadtrain.train.trainer import Trainer
real = Trainer._step
def endless(self, *rest):
    if self.progress.step:
        print("in a step without end", file=sys.stderr, flush=True)
        time.sleep(600)
    return real(self, *rest)
Trainer._step = endless
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_1_ended_at_once_by_a_second_signal(tmp_path: Path) -> None:
    """In a step that would not end in time."""
    job, path = job_file(tmp_path), tmp_path / "run"
    process = start("train", job, "--run-dir", path, program=("-c", _ENDLESS))
    wait_for(process, "in a step without end")
    process.send_signal(signal.SIGTERM)
    wait_for(process, "stopping after this step")
    time.sleep(REPEAT_S)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "ended at once" in err
    assert list((path / "checkpoints").iterdir()) == []


def test_0_and_the_commands_that_it_proposes(tmp_path: Path, command: Command) -> None:
    job, path = job_file(tmp_path, "train.steps=2"), tmp_path / "run"
    err = command("train", job, "--run-dir", path).err
    proposed = [line.split("  # ")[0] for line in err.splitlines() if "  offloadtrain " in line]
    assert len(proposed) == 5
    for line in proposed[:4]:
        arguments = line.split()[1:]
        if arguments[0] == "tui":
            arguments.append("--once")
        if arguments[0] == "train" and "--resume" not in arguments:
            arguments += ["--run-dir", str(tmp_path / "again")]
        assert main(arguments) == 0, line


@pytest.mark.parametrize(
    ("error", "code", "last_line", "has_traceback"),
    [
        (
            torch.OutOfMemoryError("no 24.8 GiB on the device"),
            4,
            "no 24.8 GiB on the device",
            False,
        ),
        (OSError(errno.ESTALE, os.strerror(errno.ESTALE), "a.bin"), 1, "a.bin: Stale file", False),
        (OSError(errno.ENOSPC, "No space left", "a.bin"), 1, "a.bin: No space left", False),
        (OSError(errno.EIO, "Input/output error", "a.bin"), 1, "a.bin: Input/output", False),
        (OSError(errno.EROFS, "Read-only file system", "a"), 1, "a: Read-only", False),
        (OSError(errno.EACCES, "Permission denied", "a.bin"), 2, "a.bin: Permission", False),
        (OSError(errno.EACCES, "Permission denied"), 1, "Permission denied (--debug", False),
        (RuntimeError("Symlink loop from 'a'"), 2, "Symlink loop from 'a'", False),
        (ZeroDivisionError("a mistake of ours"), 1, "ZeroDivisionError: a mistake of ours", True),
    ],
)
def test_codes_of_exceptions(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    error: Exception,
    code: int,
    last_line: str,
    has_traceback: bool,
) -> None:
    """A full device; a refusal of the system, in one line without --debug; an unknown one."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("offloadtrain.train.run.assemble", fail)
    arguments = ["train", str(job_file(tmp_path)), "--run-dir", str(tmp_path / "run")]
    err = command(*arguments, code=code).err
    assert err.splitlines()[-1].startswith(last_line) and ("Traceback" in err) == has_traceback
    assert "Traceback" in command(*arguments, "--debug", code=code).err


_COMMANDS = (
    *("train PATH", "train JOB --resume PATH", "plan PATH", "plan --hf PATH"),
    *("plan JOB --machine PATH", "checkpoints PATH", "export PATH OUT"),
    *("convert PATH OUT --to torch", "convert PATH --job JOB", "generate PATH --prompt a"),
    *("eval PATH --data PATH", "prepare PATH OUT", "report PATH", "trace PATH", "status PATH"),
    *("runs PATH", "tui PATH --once", "events PATH", "ctl PATH stop", "tag PATH x"),
    *("import-deepspeed PATH OUT", "train JOB --set data.source=PATH"),
)
_WRITERS = ("export RUN PATH", "cp demo PATH", "trace RUN --out PATH", "prepare TEXT PATH")
_WRITERS += ("train JOB --run-dir PATH", "train JOB --set data.cache=PATH")


@pytest.mark.parametrize("cause", ["missing", "loop/a", "file/a", "x" * 300])
def test_2_for_a_path_that_leads_nowhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cause: str,
) -> None:
    """Whoever reads it, or would write there: in one line, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("x")
    names = {"PATH": cause, "JOB": str(job_file(tmp_path)), "OUT": "out", "TEXT": "text"}
    names["RUN"] = str(_run_of_a_step(tmp_path)) if cause != "missing" else ""
    before = sorted(tmp_path.rglob("*"))
    # A missing folder is made by what writes into it.
    for command in (*_COMMANDS, *(_WRITERS if cause != "missing" else ())):
        words = [names.get(word, word).replace("PATH", cause) for word in command.split()]
        code, err = main(words), capsys.readouterr().err
        assert (code, "Traceback" in err) == (2, False), (command, code, err)
        assert sorted(tmp_path.rglob("*")) == before, command


_NO_RUNS = {
    "an empty folder": lambda path: path.mkdir(),
    "a folder of files": lambda path: (path.mkdir(), (path / "notes.txt").write_text("hello")),
    "an empty file": lambda path: path.touch(),
    "a text": lambda path: path.write_text("hello\nworld\n"),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "other JSON": lambda path: path.write_text('{"k":"step"}\n{"a":1}\n[]\n'),
    "a FIFO": lambda path: os.mkfifo(path),
    "an empty log": lambda path: write_log(path, b""),
    "a log of nothing": lambda path: write_log(path, b"\0" * 3000 + b"\n{}\n\xff\n"),
    "no checkpoints": lambda path: (path / "checkpoints").mkdir(parents=True),
}
_READERS = (
    *("status PATH", "status PATH --json", "status PATH --watch", "events PATH"),
    *("events PATH --json", "tui PATH --once", "trace PATH", "checkpoints PATH"),
    *("export PATH OUT", "generate PATH --prompt a", "eval PATH --data PATH", "ctl PATH stop"),
    *("train JOB --resume PATH", "convert PATH OUT --to torch"),
)


def write_log(folder: Path, content: bytes) -> None:
    (folder / "events").mkdir(parents=True)
    (folder / "events" / "rank000.jsonl").write_bytes(content)


@pytest.mark.parametrize("kind", _NO_RUNS)
def test_2_for_what_is_no_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever reads runs says in one line that it was given something else."""
    monkeypatch.chdir(tmp_path)
    _NO_RUNS[kind](tmp_path / "no run")
    names = {"PATH": "no run", "JOB": str(job_file(tmp_path)), "OUT": "out"}
    before = sorted(tmp_path.rglob("*"))
    for command in _READERS:
        if (kind, command) == ("no checkpoints", "checkpoints PATH"):
            continue  # a run that has saved none: an empty list
        words = [names.get(word, word) for word in command.split()]
        code, err = main(words), capsys.readouterr().err
        assert (code, len(err.splitlines())) == (2, 1) and "no run" in err, (command, code, err)
    assert sorted(tmp_path.rglob("*")) == before


def _run_of_a_step(folder: Path) -> Path:
    sets = ["--set", "train.steps=1", "--run-dir", str(folder / "run")]
    assert main(["train", str(job_file(folder)), *sets]) == 0
    return folder / "run"


@pytest.mark.parametrize("closed", ["<&- >&-", ">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_the_null_device(closed: str, tmp_path: Path) -> None:
    """Else what libraries print is written into the file that was opened next."""
    program = (
        "import os, pathlib, sys; from offloadtrain.__main__ import main; sys.argv = ['', 'ls']; "
        "code = main(); assert code == 0, code; "
        "names = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]; "
        "pathlib.Path(sys.argv_out).write_text(' '.join(names))"
    ).replace("sys.argv_out", repr(str(tmp_path / "names")))
    shell = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, program], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    names = (tmp_path / "names").read_text().split()
    numbers = [n for n, sign in enumerate(("<&-", ">&-", "2>&-")) if sign in closed.split()]
    assert [names[number] for number in numbers] == ["/dev/null"] * len(numbers)
