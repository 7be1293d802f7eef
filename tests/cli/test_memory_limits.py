"""Limits of address space and data: a run trains, or ends in one line with exit code 4."""

from __future__ import annotations

import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offloadtrain.cli.main import main
from offloadtrain.hardware import host_memory
from tests.cli.test_exit_codes import ENVIRONMENT, job_file, start, wait_for_step

Captured = pytest.CaptureFixture[str]
MIB = 1 << 20
FROM_THE_START = (300, 400, 500, 600, 700, 800, 900, 1000, 1100, 1200, 1400, 2048)
AFTER_IMPORTS = (0, 1, 8, 32, 64, 110, 128, 140, 200, 256, 320, 512)
AFTER = """
import os, resource, sys
from offloadtrain.__main__ import watched

def command():
    import torch, numpy, safetensors, xxhash
    from offloadtrain.cli.main import main
    import offloadtrain.cli.commands.train, offloadtrain.train.run, offloadtrain.train.trainer
    pages = [int(text) for text in open("/proc/self/statm").read().split()]
    kind, field = {"RLIMIT_AS": (resource.RLIMIT_AS, 0), "RLIMIT_DATA": (resource.RLIMIT_DATA, 5)}[
        sys.argv[1]
    ]
    limit = pages[field] * resource.getpagesize() + (int(sys.argv[2]) << 20)
    resource.setrlimit(kind, (limit, limit))
    return main(sys.argv[3:])

sys.exit(watched(command))
"""


def trains_or_is_refused(done: subprocess.CompletedProcess[str], kind: str) -> bool:
    """Return whether it was refused, in one line that names the limit."""
    assert "Traceback" not in done.stderr and "Fatal Python" not in done.stderr, done.stderr[-4000:]
    if done.returncode == 0:
        return False
    assert done.returncode == 4, done.stderr[-4000:]
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"(the host gives no more memory \(.+\)|does not fit|needs .* of host)", last)
    assert f"({kind} = " in last, last
    return True


def limited(tmp_path: Path, kind: str, mib: int, *, imported: bool) -> bool:
    job = job_file(tmp_path, "train.steps=4", "train.checkpoint_every=2")
    command = ["train", str(job), "--run-dir", str(tmp_path / "run")]
    program = ["-m", "offloadtrain"]
    if imported:
        program = ["-c", AFTER, kind, str(mib)]
    number = getattr(resource, kind)

    def limit() -> None:
        if not imported:
            resource.setrlimit(number, (mib * MIB, mib * MIB))

    done = subprocess.run(
        [sys.executable, *program, *command],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=limit,
    )
    return trains_or_is_refused(done, kind)


def marked(limits: tuple[int, ...], drawn: tuple[int, ...]) -> list[object]:
    return [pytest.param(mib, marks=[] if mib in drawn else pytest.mark.long) for mib in limits]


@pytest.mark.slow
@pytest.mark.parametrize("mib", marked(FROM_THE_START, (300, 700, 1200)))
def test_a_limit_refuses_in_one_line(tmp_path: Path, mib: int) -> None:
    assert limited(tmp_path, "RLIMIT_AS", mib, imported=False) or mib > 1000


@pytest.mark.slow
@pytest.mark.parametrize("mib", marked(AFTER_IMPORTS, (0, 64, 128)))
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_above_the_imports_refuses_in_one_line(tmp_path: Path, kind: str, mib: int) -> None:
    assert limited(tmp_path, kind, mib, imported=True) or mib > 64


@pytest.mark.slow
def test_the_small_parent_hands_signals_on_and_ends_as_its_child(tmp_path: Path) -> None:
    job, path = job_file(tmp_path, "train.steps=5000", "train.checkpoint_every=0"), tmp_path / "run"
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, unlimited[1]))
    try:
        stopped, killed = (start("train", job, "--run-dir", at) for at in (path, tmp_path / "b"))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
    wait_for_step(path, stopped)
    stopped.send_signal(signal.SIGTERM)
    err = stopped.communicate(timeout=300)[1]
    assert stopped.returncode == 75, err
    assert "SIGTERM: stopping after this step" in err
    wait_for_step(tmp_path / "b", killed)
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    assert len(children) == 2
    killed.kill()
    killed.communicate(timeout=300)
    end_s = time.monotonic() + 60
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end_s, "a child outlives its parent"
        time.sleep(0.05)


COUNTS = """
import os, signal, sys, time
from offloadtrain.__main__ import watched

def command():
    came = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: came.append(time.monotonic()))
    print("ready", flush=True)
    while not came or time.monotonic() - came[-1] < 1.5:
        time.sleep(0.01)
    return len(came)

sys.exit(watched(command))
"""


def start_counting() -> tuple[int, int]:
    """Start a command that counts its stops, in a session of its own; return its process and its
    terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", COUNTS])
    output = b""
    while b"ready" not in output:
        output += os.read(terminal, 1000)
    return pid, terminal


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SENT = [(sender, n) for sender in ("group", "pkill", "parent", "child") for n in STOPS]


def test_a_stop_counts_once_however_late_the_small_parent_hears_it() -> None:
    """A terminal, and a kill of the group, reach both. A second stop would end a run at once."""
    sent = [("terminal", signal.SIGINT), *SENT]
    started = [start_counting() for _ in sent]
    try:
        for (pid, terminal), (sender, number) in zip(started, sent, strict=True):
            child = children_of(pid)[-1]
            os.kill(pid, signal.SIGSTOP)
            if sender == "terminal":
                os.write(terminal, b"\x03")
            elif sender == "group":
                os.killpg(pid, number)
            else:
                all_of_them = {"pkill": [pid, *children_of(pid)], "parent": [pid], "child": [child]}
                for process in all_of_them[sender]:
                    os.kill(process, number)
        time.sleep(0.5)
        for pid, _ in started:
            os.kill(pid, signal.SIGCONT)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in started]
        assert dict(zip(sent, ends, strict=True)) == dict.fromkeys(sent, 1)
    finally:
        for _, terminal in started:
            os.close(terminal)


def test_each_stop_of_a_group_counts_under_a_small_parent() -> None:
    """Also after Ctrl-Z and a continuation of the group, as a shell's `fg` sends it."""
    pid, terminal = start_counting()
    try:
        os.killpg(pid, signal.SIGTERM)
        time.sleep(0.3)
        os.killpg(pid, signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
        os.killpg(pid, signal.SIGCONT)
        os.killpg(pid, signal.SIGTERM)
        time.sleep(0.3)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    finally:
        os.close(terminal)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "(MemoryError)"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
        (
            ImportError("IMPORTANT\n x.so: failed to map segment from shared object"),
            "(x.so: failed",
        ),
        (RuntimeError("could not create a primitive"), "(could not create a primitive)"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError("std::bad_alloc"), "(std::bad_alloc)"),
        (RuntimeError("CUDA out of memory"), None),
        (ImportError("No module named 'x'"), None),
        (ValueError("Cannot allocate memory"), None),
    ],
)
def test_a_refusal_has_many_forms(
    error: Exception, words: str | None, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def refuse(folder: Path) -> None:
        raise error

    monkeypatch.setattr("offloadtrain.events.chrome_trace.read_run", refuse)
    code, (_, err) = main(["trace", "run"]), capsys.readouterr()
    if words is None:
        assert code == 1 and "host gives no more memory" not in err
    else:
        assert code == 4 and words in err and err.count("\n") == 1
        assert str(host_memory.least_room()).rpartition("(")[2] in err
