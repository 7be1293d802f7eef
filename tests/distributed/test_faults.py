"""A rank that is killed, or fails: who is left ends soon and says whose fault it was; started
again, the job loses no more than the steps since the last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rank_faults
from offloadtrain.config import job as jobs
from offloadtrain.events import log_lines, schema
from offloadtrain.runtime import rendezvous
from offloadtrain.runtime.failure_detector import FailureDetector, RankInfo, _home
from offloadtrain.runtime.launcher_link import Pulse
from offloadtrain.runtime.process_group import RankError, Ranks
from offloadtrain.train import distributed_run
from offloadtrain.train.distributed_run import DistributedRun
from offloadtrain.train.signals import StoppedEarlyError, StopRequests
from tests.conftest import Command
from tests.distributed.faulty_job import POINTS, in_a_fork
from tests.distributed.pool import forkserver
from tests.distributed.rank_faults import (
    HANG_S,
    LOOPBACK,
    Job,
    listening,
    none_left,
    processes_of,
)
from tests.distributed.rank_jobs import events_of_rank, job_of
from tests.train.small_job import events_of, tensor_hashes, write_text

pytestmark = pytest.mark.usefixtures("pools")  # they are forked from where those are
ROOT = Path(__file__).resolve().parent.parent.parent
WITHIN_S = 300.0
"""A bound of what hangs."""


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def started(job: Path, point: str, victim: int, step: int = 5) -> Iterator[list[BaseProcess]]:
    """Two ranks without a launcher that would end the other one."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    arguments = [point, str(step), str(victim), "train", str(job)]
    arguments += ["--run-dir", str(job.parent / "run")]
    processes = []
    for rank in range(2):
        rank_info = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | shared
        output = job.parent / f"output{rank}"
        processes.append(
            forkserver().Process(target=in_a_fork, args=(output, rank_info, arguments))
        )
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
            pytest.param(point, victim, marks=pytest.mark.slow)
            for point, victim in (*((point, 1) for point in POINTS), ("error", 0))
        ),
    ],
)
def test_the_other_rank_ends_and_reports_why(job: Path, point: str, victim: int) -> None:
    with started(job, point, victim) as processes:
        codes = [ended(process) for process in processes]
    assert codes[1 - victim] == 1
    assert codes[victim] == (1 if point == "error" else -signal.SIGKILL)
    output = (job.parent / f"output{1 - victim}").read_text()
    cause = f"rank {victim}: FloatingPointError" if point == "error" else f"rank {victim} (pid"
    assert f"another rank has failed: {cause}" in output
    log = job.parent / "run" / "events" / f"rank{1 - victim:03d}.jsonl"
    last = [record.event for record in log_lines.read(log)][-1]
    assert isinstance(last, schema.RunEnded) and last.status == "failed"
    assert cause in last.message


@pytest.mark.slow
def test_a_job_that_is_started_again_loses_nothing(job: Path, tmp_path: Path) -> None:
    """By torchrun: the same bits as a job that nobody killed, whatever it was doing."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "1", "-m"]
    Job.finished(job, tmp_path / "undisturbed", "--nproc", "2")
    for point in ("all-gather", "checkpoint"):
        broken = tmp_path / point
        command = [*torchrun, "tests.distributed.faulty_job", point, "6", "1", "train", str(job)]
        command += ["--run-dir", str(broken)]
        done = subprocess.run(command, cwd=ROOT, env=environ(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        steps = [event.step for event in events_of(broken, schema.Step)]
        again = steps.index(5, 5)  # after the fifth, for the second time
        assert steps[again:] == [5, 6, 7, 8, 9]
        assert tensor_hashes(broken, 9) == tensor_hashes(tmp_path / "undisturbed", 9)


@pytest.mark.slow
def test_a_rank_that_fails_in_the_first_step_leaves_no_run(job: Path) -> None:
    with started(job, "error", 1, step=0) as processes:
        assert [ended(process) for process in processes] == [1, 1]
    assert "FloatingPointError" in (job.parent / "output0").read_text()
    assert not (job.parent / "run").exists()


@pytest.mark.slow
def test_ranks_killed_before_the_first_checkpoint_start_over(job: Path, tmp_path: Path) -> None:
    again = ("--nproc", "2", "--max-restarts", "1")
    Job.finished(job, tmp_path / "run", *again, fault=("backward:kill", "1", "1"))
    steps = [event.step for event in events_of(tmp_path / "run", schema.Step)]
    assert steps == [1, *range(1, 10)]


@pytest.mark.slow
def test_nproc_stops_on_request_and_continues(job: Path, tmp_path: Path) -> None:
    run, many = tmp_path / "run", ("train.steps=5000", "train.eval_every=0")
    started = Job.start(job, run, "--nproc", "2", "--set", *many)
    started.wait_for_step(ranks=2)
    started.process.send_signal(signal.SIGINT)
    assert started.ended() == 75, started.text
    stopped = events_of(run, schema.RunEnded)[-1]
    assert stopped.status == "stopped"
    status = subprocess.run(
        [sys.executable, "-m", "offloadtrain", "status", run], capture_output=True
    )
    assert b"resolved.toml --nproc 2 --resume" in status.stdout, "as many ranks go on"
    last = stopped.step + 2
    Job.finished(job, run, "--resume", str(run), "--set", f"train.steps={last}")
    assert events_of(run, schema.Step)[-1].step == last


@pytest.mark.slow
def test_nproc_listens_on_loopback_only(job: Path, tmp_path: Path) -> None:
    """The store, Gloo's pairs, and whatever else the processes of a job open."""
    started = Job.fork(job, tmp_path / "run", "--nproc", "2", "--set", "train.steps=5000")
    started.wait_for_step(ranks=2)
    addresses = listening(processes_of(tmp_path / "run"))
    started.process.send_signal(signal.SIGTERM)
    assert started.ended() == 75, started.text
    assert addresses and addresses <= LOOPBACK
    assert "resolved.toml --nproc 2 --resume" in started.text, "as many ranks go on"


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_the_job_comes_back(job: Path, tmp_path: Path) -> None:
    least = ("--set", f"train.hang_timeout_s={HANG_S}")
    arguments = ("--nproc", "2", "--max-restarts", "1", *least)
    started = Job.finished(job, tmp_path / "run", *arguments, fault=("adam:stop", "5", "0"))
    assert started.named_after_s(0) > 0
    assert started.steps()[-1] == 9
    assert events_of(tmp_path / "run", schema.RunEnded)[-1].status == "done"
    warnings = events_of_rank(tmp_path / "run", schema.Warning_, 1)
    message = next(warning.message for warning in warnings if warning.code == "hung")
    assert "rank 0 (pid" in message and "stopped by a signal" in message
    assert "lanes: " in message and "all_gather" in message, "stacks"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_stop_while_building_leaves_nothing_and_starts_again(
    job: Path, tmp_path: Path, ranks: str
) -> None:
    started = Job.start(job, tmp_path / "run", "--nproc", ranks)
    assert started.handles_signals()
    time.sleep(1.0)
    started.process.send_signal(signal.SIGHUP)
    assert started.ended() == 75, started.text
    assert "stopped before the first step" in started.text and "Traceback" not in started.text
    assert not (tmp_path / "run").exists()
    assert none_left(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_run_outlives_those_who_read_its_output(job: Path, tmp_path: Path, ranks: str) -> None:
    """`train 2>&1 | head -1`: nothing can be printed any more, from the first step on."""
    started = Job.fork(job, tmp_path / "run", "--nproc", ranks, heard=False)
    assert started.ended() == 0
    ended = events_of(tmp_path / "run", schema.RunEnded)[-1]
    assert ended.status == "done" and ended.step == 9


@pytest.mark.slow
def test_usr1_saves_and_continues(job: Path, tmp_path: Path) -> None:
    never = ("train.steps=5000", "train.checkpoint_every=0", "train.eval_every=0")
    started = Job.fork(job, tmp_path / "run", "--nproc", "2", "--set", *never)
    started.wait_for_step(ranks=2)
    started.process.send_signal(signal.SIGUSR1)
    saved = tmp_path / "run" / "checkpoints"
    started.wait(lambda: any(saved.glob("step-????????")))
    (first,) = saved.glob("step-????????")
    steps = len(started.steps())
    started.wait(lambda: len(started.steps()) > steps + 2)
    started.process.send_signal(signal.SIGTERM)
    assert started.ended() == 75, started.text
    assert first.exists()


@pytest.mark.slow
def test_a_start_that_is_refused_prints_no_traceback(job: Path, tmp_path: Path) -> None:
    """Rank 0 alone knows that the folder is taken; the others lose their peer."""
    first = Job.fork(job, tmp_path / "run", "--set", "train.steps=5000")
    first.wait_for_step()
    second = Job.finished(job, tmp_path / "run", "--nproc", "2", "--resume", "auto", code=2)
    lines = [line for line in second.text.splitlines() if line.startswith(("rank", "[rank"))]
    assert "is already running, pid" in lines[0]
    assert "Traceback" not in second.text and "RuntimeError" not in second.text
    assert any("another rank has failed" in line for line in lines)
    first.process.send_signal(signal.SIGTERM)
    assert first.ended() == 75


@pytest.mark.long
@pytest.mark.parametrize(("what", "count"), [("faults", 60), ("signals", 200), ("orphans", 20)])
def test_random_faults(what: str, count: int) -> None:
    """`python -m benchmarks.rank_faults`, whole."""
    assert rank_faults.main([what, "--count", str(count), "--at-once", "2"]) == 0


def test_bad_numbers_of_ranks(job: Path, command: Command) -> None:
    for arguments, message in (
        (["--nproc", "none"], "--nproc none: give a number"),
        (["--nproc", "3"], "take 2, or a batch that 3 divides"),
        (["--nproc", "auto"], "this torch sees none"),
        (["--max-restarts", "2"], "it needs --nproc"),
    ):
        errors = command("train", job, *arguments, code=2).err
        assert message in errors and "Traceback" not in errors
    assert not (job.parent / "runs").exists()


def test_ranks_that_cannot_be_connected_report_it_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Too few descriptors, no such interface, a rank that has ended: torch tells it at length."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")

    def refused(*args: object, **more: object) -> None:
        raise RuntimeError("Too many open files\nException raised from somewhere:\nframe #0")

    monkeypatch.setattr(rendezvous, "_connected", refused)
    with pytest.raises(RankError) as raised:
        rendezvous.connect(RankInfo(0, 2), on_gpu=False, timeout_s=1.0)
    message = "the ranks cannot be connected through 127.0.0.1:1234: Too many open files"
    assert str(raised.value) == message


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offloadtrain.runtime.failure_detector.LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("offloadtrain.runtime.failure_detector.GRACE_S", 0.01)


class Board:
    """A store in this process.

    Attributes:
        looks: how often the detector of rank 0 has begun to look at the other ranks.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.looks = 0

    def set(self, key: str, value: str) -> None:
        self.looks += key == "beat0"
        self.values[key] = value.encode()

    def wait_for_a_look(self, judged: Callable[[], object] = lambda: False) -> None:
        """Wait for a look that begins after this call to end, or until the detector has judged."""
        before, deadline = self.looks, time.monotonic() + WITHIN_S
        while self.looks < before + 2 and not judged():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Reporter:
    """Of a rank that waits for another one."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self.ended: list[str] = []

    def pulse(self) -> Pulse:
        return self._pulse

    def end_hung(self, cause: str) -> None:
        self.ended.append(cause)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.usefixtures("looks_often")
def test_ranks_of_torchrun_find_who_hangs(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """A stopped rank says nothing any more, a hung one that it is silent."""
    monkeypatch.setattr("offloadtrain.runtime.failure_detector._open_pid", lambda _: 0)
    monkeypatch.setattr("offloadtrain.runtime.failure_detector._has_ended", lambda _: False)
    home = json.dumps({"pid": 7, "home": _home()})
    board, now = Board(), [0.0]
    board.set("who1", home)
    says = Pulse(phase="update of step 3", silent_s=0, limit_s=60, collectives=4, waits=False)
    waits = replace(says, silent_s=61, waits=True)
    reporter = Reporter(waits)
    board.set("beat1", json.dumps({"at": -1, "pulse": asdict(says)}))  # before the first look
    failures = FailureDetector(
        board,
        RankInfo(0, 2),
        lambda _: None,
        lambda: now[0],
        reporter,  # type: ignore[arg-type]
    )
    for beat in range(3):
        board.set("beat1", json.dumps({"at": beat, "pulse": asdict(says)}))
        board.wait_for_a_look()
    assert failures.cause(0.0) is None, "rank 1 works"
    if not stopped:
        board.set("beat1", json.dumps({"at": 9, "pulse": asdict(replace(says, silent_s=60))}))
    while not reporter.ended:
        now[0] += 5.0 if stopped else 0.0
        board.wait_for_a_look(lambda: reporter.ended)
    assert "rank 1 (pid 7) makes no progress for 6" in reporter.ended[0]
    assert "update of step 3" in reporter.ended[0]


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_has_ended_its_work_is_not_missed() -> None:
    board = Board()
    board.set("who1", '{"pid": 7, "home": ["elsewhere", "", ""]}')
    board.set("done1", "1")
    now = [0.0]
    failures = FailureDetector(board, RankInfo(0, 2), pytest.fail, clock=lambda: now[0])
    now[0] = 1e6
    board.wait_for_a_look()
    assert failures.cause(0.0) is None
    failures.close()
    assert board.check(["done0"])


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_ends_while_the_ranks_meet_is_one_line(
    monkeypatch: pytest.MonkeyPatch, job: Path
) -> None:
    """The detector does not watch yet: torch's own error would be a traceback."""
    board = Board()
    board.set("who1", '{"pid": 7, "home": ["elsewhere", "", ""]}')
    monkeypatch.setattr(distributed_run, "connect", lambda *_, **__: board)
    monkeypatch.setattr(distributed_run, "attempt_store", lambda store, _: store)

    def reset(*_: object) -> None:
        raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error: Connection reset")

    monkeypatch.setattr(Ranks, "of", reset)
    detectors: list[FailureDetector] = []

    def noted(*args: Any, **kwargs: Any) -> FailureDetector:
        detectors.append(FailureDetector(*args, **kwargs))
        return detectors[-1]

    monkeypatch.setattr(distributed_run, "FailureDetector", noted)
    with pytest.raises(RankError, match="the connection of the ranks has lost another rank"):
        DistributedRun(RankInfo(0, 2), jobs.load(job), lambda _: 1, StopRequests())
    detectors[0].close()  # or it ends this process, whose peer stays silent


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_has_to_stop_too_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, job: Path, stops: bool
) -> None:
    """The rank that has ended was stopped in a moment in which it could say nothing."""
    monkeypatch.setattr(distributed_run, "connect", lambda *_, **__: board)
    monkeypatch.setattr(distributed_run, "attempt_store", lambda store, _: store)
    board, stop = Board(), StopRequests()
    board.set("who1", '{"pid": 7, "home": ["elsewhere", "", ""]}')
    run = DistributedRun(RankInfo(0, 2), jobs.load(job), lambda _: 1, stop)
    board.set("failed", "rank 1 (pid 7) has ended")
    stop.requested = "SIGHUP" if stops else None
    error = StoppedEarlyError if stops else RankError
    with pytest.raises(error, match="rank 1"), run.reporting(None):  # type: ignore[arg-type]
        raise RuntimeError("a collective without its peer")
    run._failures.close()  # or it ends this process, which is not a rank
