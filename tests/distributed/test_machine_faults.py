"""What the machine does to a job of two ranks: the kernel kills one for memory, the scratch drive
is really full, ranks and launcher are stopped. Each is named and resumable; no process is left."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from offloadtrain.cli.main import main
from offloadtrain.events import schema
from tests.distributed.rank_faults import ROOT, Job, job_file, none_left, processes_of
from tests.train.small_job import events_of, tensor_hashes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pools")]
MEMORY = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20
_HOG = """
import time
held = []
for _ in range(20):
    held.append(bytearray(b"x") * (8 << 20))
    time.sleep(0.1)
time.sleep(600)
"""
"""Takes 160 MiB little by little: it is never the largest process of its group."""


def steps_of(run: Path) -> dict[int, float]:
    return {step.step: step.loss for step in events_of(run, schema.Step)}


def last_hashes(run: Path) -> dict[str, str]:
    return tensor_hashes(run, max(steps_of(run)))


LONG = ("train.steps=150", "train.checkpoint_every=3")
"""Steps enough for a fault between them."""


def assert_resumes(job: Path, run: Path, undisturbed: Path) -> None:
    """Resume a run, and compare its losses and its tensors with those of one without a fault."""
    Job.finished(job, run, "--nproc", "2", "--resume", "auto")
    assert steps_of(run) == steps_of(undisturbed)
    assert last_hashes(run) == last_hashes(undisturbed)
    assert none_left(run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, pools: object) -> Path:
    """The run of a long job without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    Job.finished(job_file(folder, *LONG), folder / "run", "--nproc", "2")
    return folder / "run"


def start_in(group: Path, job: Path, run: Path) -> Job:
    process = subprocess.Popen(
        [sys.executable, "-m", "offloadtrain", "train", job, "--run-dir", run, "--nproc", "2"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: joined(group),
    )
    return Job._followed(process, run)


def joined(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def memory_group(name: str) -> Iterator[Path]:
    """Make a cgroup of version 1; skips where this machine lets nobody make one."""
    group = MEMORY / name
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of version 1 can be made here: {error}")
    try:
        yield group
    finally:
        (group / "memory.limit_in_bytes").write_text("-1")
        end_s = time.monotonic() + 60
        while (group / "cgroup.procs").read_text() and time.monotonic() < end_s:
            time.sleep(0.1)
        group.rmdir()


def test_a_rank_that_the_kernel_kills_for_memory(
    tmp_path: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, run = job_file(tmp_path, *LONG), tmp_path / "run"
    with memory_group(f"offloadtrain-{os.getpid()}") as group:
        started = start_in(group, job, run)
        started.wait_for_step(2, 7)
        stat = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
        limit = int(stat["total_rss"]) + 64 * MIB
        (group / "memory.limit_in_bytes").write_text(str(limit))
        hog = subprocess.Popen([sys.executable, "-c", _HOG], preexec_fn=lambda: joined(group))
        try:
            assert started.ended() == 1, started.text
        finally:
            hog.kill()
            hog.wait()
        assert none_left(run)
        line = next(line for line in started.text.splitlines() if "was killed by SIGKILL" in line)
        assert line.startswith("rank ") and "probably out of memory" in line, line
        assert "Traceback" not in started.text and main(["status", str(run)]) == 1
    assert_resumes(job, run, undisturbed)


COMBINED = {
    "delayed, state on the disk": (
        *("offload.update=delayed", "offload.state_on=disk", "offload.scratch_dir={folder}"),
    ),
    "speculative, split16, accumulation": (
        *("offload.update=speculative", "offload.state=split16", "train.grad_accum_steps=4"),
    ),
    "int8, streamed, activations on the host": (
        *("offload.state=int8", "offload.working=host", "offload.activation=offload"),
    ),
}


@pytest.mark.parametrize("mode", COMBINED)
def test_random_kills_in_combined_modes(tmp_path: Path, mode: str) -> None:
    """Of the launcher or of a rank, at any time of set-up or training: no step is lost, no process
    left, and the bits are those of an undisturbed run."""
    options = [option.format(folder=tmp_path) for option in COMBINED[mode]]
    job = job_file(tmp_path, "train.steps=40", *options)
    arguments, runs = ("--nproc", "2", "--resume", "auto"), (tmp_path / "run", tmp_path / "other")
    draw, codes = random.Random(mode), []
    for kill in range(3):
        started = Job.fork(job, runs[0], *arguments)
        if kill:
            started.wait_for_step(2, kill + 1)
        time.sleep(draw.uniform(0.0, 1.0))
        if pids := processes_of(runs[0]):
            os.kill(draw.choice(pids), signal.SIGKILL)
        codes.append(started.ended())
        assert none_left(runs[0]), started.text
        assert "Traceback" not in started.text, started.text
    assert sum(code != 0 for code in codes) >= 2, codes
    Job.finished(job, runs[1], "--nproc", "2")
    assert_resumes(job, *runs)
    assert len(steps_of(runs[0])) == 40


@contextmanager
def small_drive(folder: Path, num_mib: int, backed_mib: int) -> Iterator[tuple[Path, Path]]:
    """Mount a file system that promises more than the memory behind it holds; yield both folders.
    Skips where nobody may mount."""
    backing, drive = folder / "backing", folder / "drive"
    with ExitStack() as mounts:
        for at, command in (
            (backing, ["mount", "-t", "tmpfs", "-o", f"size={backed_mib}m", "none", backing]),
            (drive, ["mount", "-o", "loop", backing / "image", drive]),
        ):
            at.mkdir()
            if at == drive:
                with (backing / "image").open("wb") as image:
                    image.truncate(num_mib * MIB)
                subprocess.run(["mkfs.ext4", "-q", "-m", "0", backing / "image"], check=True)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"nothing can be mounted here: {done.stderr}")
            mounts.callback(subprocess.run, ["umount", at], check=True)
        yield backing, drive


def test_a_scratch_drive_that_is_really_full(tmp_path: Path) -> None:
    """Its file system has reserved the space, and the drive behind it has none: writes fail."""
    disk = ("offload.state_on=disk", "offload.update=exact", "model.d_model=256")
    good, run = tmp_path / "good", tmp_path / "run"
    good.mkdir()
    job = job_file(tmp_path, *disk, f"offload.scratch_dir={good}", "train.steps=60")
    first = Job.fork(job, run, "--nproc", "2")
    first.wait_for_step(2, 2)
    first.process.send_signal(signal.SIGTERM)
    assert first.ended() == 75, first.text
    with small_drive(tmp_path, num_mib=200, backed_mib=24) as (backing, drive):
        with (backing / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.write(bytes(1 << 12)):
                pass  # until there is no space
        resume = ("--resume", "auto", "--set", f"offload.scratch_dir={drive}")
        full = Job.finished(job, run, "--nproc", "2", *resume, code=1)
        assert "Traceback" not in full.text, full.text
        assert re.search(rf"scratch_dir = '{drive}' failed: .* \(E(IO|NOSPC)\)", full.text), (
            full.text
        )
        assert none_left(run)
    Job.finished(job, tmp_path / "undisturbed", "--nproc", "2")
    assert_resumes(job, run, tmp_path / "undisturbed")


@pytest.mark.parametrize("stopped", ["launcher", "launcher and rank"])
def test_a_launcher_that_is_stopped(tmp_path: Path, undisturbed: Path, stopped: str) -> None:
    """Ranks go on without it. Killed then, it leaves no process; continued, it names the rank that
    is stopped, too."""
    job, run = job_file(tmp_path, *LONG), tmp_path / "run"
    limit_s = "15" if stopped == "launcher" else "5"
    least = ("--set", f"train.hang_timeout_s={limit_s}")
    started = Job.fork(job, run, "--nproc", "2", *least)
    started.wait_for_step(2, 4)
    started.process.send_signal(signal.SIGSTOP)
    before = len(started.steps())
    if stopped == "launcher":
        started.wait(lambda: len(started.steps()) > before + 3)
        started.process.kill()
        assert started.ended() == -signal.SIGKILL
    else:
        ranks = [pid for pid in processes_of(run) if pid != started.process.pid]
        os.kill(ranks[-1], signal.SIGSTOP)
        time.sleep(3.0)  # of which the launcher sees nothing
        started.process.send_signal(signal.SIGCONT)
        assert started.ended() == 70, started.text
        assert "stopped by a signal" in started.text
    assert none_left(run)
    assert_resumes(job, run, undisturbed)
