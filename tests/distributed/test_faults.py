"""A rank that is killed, or fails: who is left ends soon and says whose fault it was; started
again, the job loses no more than the steps since the last checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from offloadtrain.cli import main
from offloadtrain.config import job as jobs
from offloadtrain.events import schema
from offloadtrain.runtime.failure_detector import FailureDetector, RankInfo
from tests.distributed.faulty_job import POINTS, in_a_fork
from tests.distributed.pool import forkserver
from tests.distributed.test_jobs import job_of
from tests.train.small_job import events_of, tensor_hashes, write_text

pytestmark = pytest.mark.usefixtures("pools")  # they are forked from where those are
ROOT = Path(__file__).resolve().parent.parent.parent
WITHIN_S = 300.0
"""A bound of what hangs."""
CLI = [sys.executable, "-m", "offloadtrain"]


def environ(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tui'}"} | more


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_text(tmp_path)
    made = job_of(tmp_path, **{"train.steps": 9, "train.checkpoint_every": 4, "optim.lr": 3e-3})
    path = tmp_path / "small.toml"
    path.write_text(jobs.dump(made))
    return path


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def started(job: Path, point: str, victim: int, step: int = 5) -> Iterator[list[BaseProcess]]:
    """Two ranks without a launcher that would end the other one."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    arguments = [point, str(step), str(victim), "train", str(job)]
    arguments += ["--run-dir", str(job.parent / "run")]
    processes = []
    for rank in range(2):
        rank_info = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | shared
        said = job.parent / f"said{rank}"
        processes.append(forkserver().Process(target=in_a_fork, args=(said, rank_info, arguments)))
        processes[-1].start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def ended(process: BaseProcess) -> int | None:
    process.join(WITHIN_S)
    return process.exitcode


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("backward", 0),  # rank 0 keeps the store
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (*((point, 1) for point in POINTS), ("error", 0))
        ),
    ],
)
def test_the_other_rank_ends_and_says_why(job: Path, point: str, victim: int) -> None:
    with started(job, point, victim) as processes:
        codes = [ended(process) for process in processes]
    assert codes[1 - victim] == 1
    assert codes[victim] == (1 if point == "error" else -signal.SIGKILL)
    said = (job.parent / f"said{1 - victim}").read_text()
    cause = f"rank {victim}: FloatingPointError" if point == "error" else f"rank {victim} (pid"
    assert f"another rank has failed: {cause}" in said
    log = job.parent / "run" / "events" / f"rank{1 - victim:03d}.jsonl"
    last = [record.event for record in schema.read(log)][-1]
    assert isinstance(last, schema.RunEnded) and last.status == "failed"
    assert cause in last.message


def by_torchrun(module: list[str], job: Path, run: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "-m", *module]
    command += ["train", str(job), "--run-dir", str(run)]
    done = subprocess.run(command, cwd=ROOT, env=environ(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_job_that_is_started_again_loses_nothing(job: Path, tmp_path: Path) -> None:
    """The same bits as a job that nobody killed, whatever it was doing."""
    by_torchrun(["offloadtrain"], job, tmp_path / "whole")
    for point in ("all-gather", "checkpoint"):
        broken = tmp_path / point
        by_torchrun(["tests.distributed.faulty_job", point, "6", "1"], job, broken)
        steps = [event.step for event in events_of(broken, schema.Step)]
        again = steps.index(5, 5)  # after the fifth, for the second time
        assert steps[again:] == [5, 6, 7, 8, 9]
        assert tensor_hashes(broken, 9) == tensor_hashes(tmp_path / "whole", 9)


@pytest.mark.slow
def test_a_rank_that_fails_in_the_first_step_leaves_no_run(job: Path) -> None:
    with started(job, "error", 1, step=0) as processes:
        assert [ended(process) for process in processes] == [1, 1]
    assert "FloatingPointError" in (job.parent / "said0").read_text()
    assert not (job.parent / "run").exists()


@pytest.mark.slow
def test_ranks_killed_before_the_first_checkpoint_start_over(job: Path, tmp_path: Path) -> None:
    by_torchrun(["tests.distributed.faulty_job", "backward", "1", "1"], job, tmp_path / "run")
    steps = [event.step for event in events_of(tmp_path / "run", schema.Step)]
    assert steps == [1, *range(1, 10)]


@pytest.mark.slow
def test_nproc_stops_on_request_and_goes_on(job: Path, tmp_path: Path) -> None:
    many = ["--set", "train.steps=5000", "train.eval_every=0"]
    command = [*CLI, "train", str(job), "--nproc", "2", "--run-dir", str(tmp_path / "run")]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [*command, *many], cwd=ROOT, env=environ(), stdout=said, stderr=said
        )
    logs = [tmp_path / "run" / "events" / f"rank00{rank}.jsonl" for rank in range(2)]
    deadline = time.monotonic() + WITHIN_S
    while not all(log.exists() and b'"k":"step"' in log.read_bytes() for log in logs):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=WITHIN_S)
    assert process.returncode == 75
    stopped = events_of(tmp_path / "run", schema.RunEnded)[-1]
    assert stopped.status == "stopped"
    goes_on = ["--resume", str(tmp_path / "run"), "--set", f"train.steps={stopped.step + 2}"]
    done = subprocess.run(
        [*CLI, "train", str(job), *goes_on], cwd=ROOT, env=environ(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert events_of(tmp_path / "run", schema.Step)[-1].step == stopped.step + 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nproc", "none"], "--nproc none: give a number"),
        (["--nproc", "3"], "take 2, or a batch that 3 divides"),
        (["--nproc", "auto"], "this torch sees none"),
        (["--max-restarts", "2"], "it needs --nproc"),
    ],
)
def test_bad_numbers_of_ranks(
    job: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main.main(["train", str(job), *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said
    assert not (job.parent / "runs").exists()


class Board:
    """A store in this process."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)


def test_a_host_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of another host is known by what it says only."""
    monkeypatch.setattr("offloadtrain.runtime.failure_detector.LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("offloadtrain.runtime.failure_detector.GRACE_S", 0.01)
    board, now = Board(), [0.0]
    board.set("who1", '{"pid": 7, "home": ["elsewhere", "", ""]}')
    lost: list[str] = []
    failures = FailureDetector(board, RankInfo(0, 2), lost.append, clock=lambda: now[0])
    deadline = time.monotonic() + WITHIN_S
    for beat in range(5):  # it lives, whatever the clock says
        now[0] += 15.0
        board.set("beat1", str(beat))
        time.sleep(0.05)
    assert failures.cause(0.0) is None
    while not lost and time.monotonic() < deadline:
        now[0] += 5.0
        time.sleep(0.02)
    assert "rank 1 (pid 7 on elsewhere) is silent" in lost[0]
    assert failures.cause() == lost[0] == board.get("failed").decode()


def test_who_has_done_its_work_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offloadtrain.runtime.failure_detector.LOOK_EVERY_S", 0.01)
    board = Board()
    board.set("who1", '{"pid": 7, "home": ["elsewhere", "", ""]}')
    board.set("done1", "1")
    now = [0.0]
    failures = FailureDetector(board, RankInfo(0, 2), pytest.fail, clock=lambda: now[0])
    now[0] = 1e6
    time.sleep(0.1)
    assert failures.cause(0.0) is None
    failures.close()
    assert board.check(["done0"])
