"""Threads start before memory is filled: a refusal ends the start, not a later step."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offloadtrain.cli.main import main
from offloadtrain.config.errors import HostMemoryError
from offloadtrain.runtime import kernels, thread_pools
from offloadtrain.runtime.arena import Arena
from offloadtrain.runtime.kernels import selection
from tests.cli.test_exit_codes import ENVIRONMENT, job_file

LATE_THREADS = """
import os, sys
from offloadtrain.cli.main import main
from offloadtrain.runtime.arena import Arena
from offloadtrain.train.trainer import Trainer

def threads():
    return {
        (int(tid), open(f"/proc/self/task/{tid}/comm").read().strip())
        for tid in os.listdir("/proc/self/task")
    }

before, late = set(), set()
real_map, real_step = Arena.map, Trainer._between_steps
def first(self, rows):
    before.update(() if before else threads())
    return real_map(self, rows)
def look(self):
    late.update(threads() - before)
    return real_step(self)
Arena.map, Trainer._between_steps = first, look
code = main(sys.argv[1:])
print(sorted(name for _, name in late), file=sys.stderr)
assert len(before) > 10, before
sys.exit(code)
"""


DISK = ["offload.state_on=disk", "offload.state=split16"]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [pytest.param([], marks=pytest.mark.long), DISK])
def test_no_thread_starts_once_memory_is_filled(tmp_path: Path, overrides: list[str]) -> None:
    job = job_file(tmp_path, "train.steps=7", "train.checkpoint_every=2", *overrides)
    arguments = ["train", str(job), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", LATE_THREADS, *arguments],
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


class Limit:
    """Refuses the threads of Python after the first `free` ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free, self.mapped = free, 0
        start, arena_map = threading.Thread.start, Arena.map

        def limited(thread: threading.Thread) -> None:
            self.free -= 1
            if self.free < 0:
                raise RuntimeError("can't start new thread")
            start(thread)

        def counted(arena: Arena, rows: object) -> object:
            self.mapped += 1
            return arena_map(arena, rows)  # type: ignore[arg-type]

        thread_pools._pool_of_process.cache_clear()
        monkeypatch.setattr(threading.Thread, "start", limited)
        monkeypatch.setattr(Arena, "map", counted)


@pytest.mark.slow
def test_train_is_refused_a_thread_before_memory_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(job_file(tmp_path, "train.steps=2", "train.checkpoint_every=1"))
    for free in range(40):
        with monkeypatch.context() as patch:
            limit = Limit(patch, free)
            code = main(["train", job, "--run-dir", str(tmp_path / f"run{free}")])
        err = capsys.readouterr().err
        if code == 0:
            break
        assert code == 4 and limit.mapped == 0, (free, err)
        assert "can't start new thread; a limit of processes" in err.splitlines()[-1]
        assert "Traceback" not in err
    assert 10 < free < 39


@pytest.mark.parametrize("refuses", ["Python", "the kernels"])
def test_compute_threads_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    limit = Limit(monkeypatch, 0 if refuses == "Python" else 100)
    if refuses == "the kernels":

        def refuse(*operands: object) -> None:
            raise RuntimeError("Resource temporarily unavailable")

        monkeypatch.setattr(selection.active_backend(), "cast", refuse, raising=False)
    with pytest.raises(HostMemoryError, match="a limit of processes"):
        kernels.start_threads()
    assert limit.mapped == 0


def test_kernel_threads_start_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]

    kernels.set_threads(3)
    try:
        kernels.start_threads()
        assert sum(name.startswith("ot-kernel") for name in names()) == 2
    finally:
        kernels.set_threads(None)


LIMITED = """
import os, signal, sys
from pathlib import Path
import offloadtrain.cli.commands.train, offloadtrain.train.run, offloadtrain.train.trainer
from offloadtrain.cli.main import main

group, job, out = map(Path, sys.argv[1:])
for limit in range(1, 60):
    (group / "pids.max").write_text(str(limit))
    if (child := os.fork()) == 0:
        signal.alarm(300)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        sys.stderr = open(out / f"{limit}.err", "w")
        code = main(["train", str(job), "--run-dir", str(out / str(limit))])
        sys.stderr.close()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("limit", limit, code, flush=True)
    if code == 0:
        break
"""


@pytest.mark.slow
@pytest.mark.long
def test_every_limit_of_processes_refuses_before_memory_is_filled(tmp_path: Path) -> None:
    """A real one, which OpenMP and the kernels meet, too."""
    group = Path("/sys/fs/cgroup/pids") / f"test-{tmp_path.name}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of version 1 can be made here: {error}")
    job = job_file(tmp_path, "train.steps=2", "train.checkpoint_every=1")
    try:
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, str(group), str(job), str(tmp_path)],
            capture_output=True,
            text=True,
            env=ENVIRONMENT | {"OMP_NUM_THREADS": "3"},
        )
    finally:
        group.rmdir()
    *refused, trained = (
        line.split()[2] for line in done.stdout.splitlines() if line.startswith("limit ")
    )
    assert (set(refused), trained) == ({"4"}, "0"), done.stdout + done.stderr
    assert len(refused) > 12
    for limit in range(1, len(refused) + 1):
        err = (tmp_path / f"{limit}.err").read_text()
        assert "a limit of processes" in err.splitlines()[-1] and "loss" not in err, err
