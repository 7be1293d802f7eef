"""Jobs of `train --nproc` in which something happens to a rank, the launcher, or by signal; for
tests, and for `python -m benchmarks.rank_faults`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offloadtrain.config import job as jobs
from offloadtrain.events import log_lines, schema
from tests.distributed.forked_job import MARKER, ForkedJob
from tests.train.small_job import JOB, write_text

ROOT = Path(__file__).resolve().parent.parent.parent
WITHIN_S = 300.0
"""A bound of what hangs."""
HANG_S = 15.0
"""Longer than a rank takes to start again on a machine that is busy with other tests."""
_LAUNCH = """
import sys
from offloadtrain.cli import supervisor
supervisor.PROGRAM = tuple(sys.argv[1].split())
from offloadtrain.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def job_file(folder: Path, *overrides: str) -> Path:
    """Write a job of nine steps for two ranks."""
    write_text(folder)
    chosen = ("train.steps=9", "train.checkpoint_every=3", "train.eval_every=4", *overrides)
    path = folder / "job.toml"
    path.write_text(jobs.dump(jobs.loads(JOB.format(folder=folder), "small", chosen)))
    return path


@dataclass(slots=True)
class Job:
    """A running command, its output with the time of each line, and its run folder."""

    process: subprocess.Popen[str] | ForkedJob
    run: Path
    lines: list[tuple[float, str]] = field(default_factory=list)
    _reader: threading.Thread | None = None

    @classmethod
    def start(cls, job: Path, run: Path, *arguments: str, fault: Sequence[str] = ()) -> Job:
        """`fault`: POINT:ACTION, STEP, RANK as `faulty_job` takes them."""
        program = " ".join(("-m", "tests.distributed.faulty_job", *fault))
        launcher = ("-c", _LAUNCH, program) if fault else ("-m", "offloadtrain")
        environ = os.environ | {"OMP_NUM_THREADS": "1", "FAULT_AT": str(file_of(run, "fault"))}
        process = subprocess.Popen(
            [sys.executable, *launcher, "train", str(job), "--run-dir", str(run), *arguments],
            cwd=ROOT,
            env=environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tui'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return cls._followed(process, run)

    @classmethod
    def fork(
        cls, job: Path, run: Path, *arguments: str, fault: Sequence[str] = (), heard: bool = True
    ) -> Job:
        """As `start`, in processes that have imported everything.

        Args:
            heard: somebody reads what they print.
        """
        program = " ".join(("tests.distributed.faulty_job", *fault)) if fault else "offloadtrain"
        command = ["train", str(job), "--run-dir", str(run), *arguments]
        process = ForkedJob(f"-m {program}", command, file_of(run, "fault"))
        if not heard:
            process.stdout.close()
            return cls(process, run)
        return cls._followed(process, run)

    @classmethod
    def finished(cls, job: Path, run: Path, *arguments: str, code: int = 0, **how: Any) -> Job:
        """As `fork`, and wait for its end, with this exit code."""
        started = cls.fork(job, run, *arguments, **how)
        assert started.ended() == code, started.text
        return started

    @classmethod
    def _followed(cls, process: subprocess.Popen[str] | ForkedJob, run: Path) -> Job:
        started = cls(process, run)
        started._reader = threading.Thread(target=started._read, daemon=True)
        started._reader.start()
        return started

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.lines.append((time.time(), line.rstrip("\n")))

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def ended(self) -> int:
        """Wait for the end; return the exit code."""
        try:
            code = self.process.wait(WITHIN_S)
        except subprocess.TimeoutExpired as error:
            self.process.kill()  # the ranks end with it
            self.process.wait()  # else its end is a warning in a later test
            raise AssertionError(f"it hangs:\n{self.text}") from error
        if self._reader is not None:
            self._reader.join(WITHIN_S)
        return code

    def handles_signals(self, within_s: float = WITHIN_S) -> bool:
        """Wait until the command handles SIGTERM: before, the interpreter itself is loading."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and self.process.poll() is None:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
            if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
                return True
            time.sleep(0.02)
        return False

    def wait_for_step(self, ranks: int = 1, steps: int = 1) -> None:
        """Wait until every rank has logged so many steps."""
        logs = [self.run / "events" / f"rank{rank:03d}.jsonl" for rank in range(ranks)]
        self.wait(
            lambda: all(
                log.exists() and log.read_bytes().count(b'"k":"step"') >= steps for log in logs
            )
        )

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def named_after_s(self, rank: int) -> float:
        """Return the seconds from the fault to the launcher's first line that names the rank."""
        at = float(file_of(self.run, "fault").read_text())
        named = re.compile(rf"rank {rank} \(pid \d+\) (was killed|makes no progress)")
        return next(time_s for time_s, line in self.lines if named.match(line)) - at

    def steps(self) -> list[int]:
        """Return the steps in the log of rank 0."""
        path = self.run / "events" / "rank000.jsonl"
        log = log_lines.read(path) if path.exists() else ()
        return [record.event.step for record in log if isinstance(record.event, schema.Step)]


def file_of(run: Path, what: str) -> Path:
    """A file of one run, which is not in its folder."""
    return Path(f"{run}.{what}")


def processes_of(run: Path) -> list[int]:
    """Return the processes whose command line names the run folder, or that hold its file."""
    pids, marker = [], str(file_of(run, "marker"))
    for path in Path("/proc").glob("[0-9]*"):
        try:
            named = os.fsencode(run) in (path / "cmdline").read_bytes()
            if int(path.name) != os.getpid() and (named or _holds(path, marker)):
                pids.append(int(path.name))
        except OSError:
            continue  # it has ended meanwhile
    return pids


def _holds(process: Path, file: str) -> bool:
    link = process / "fd" / str(MARKER)
    return link.is_symlink() and os.readlink(link) == file


def none_left(run: Path, within_s: float = WITHIN_S) -> bool:
    """Wait for the end of all processes of a run."""
    deadline = time.monotonic() + within_s
    while pids := processes_of(run):
        if time.monotonic() > deadline:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.1)
    return True


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1 as the kernel writes them."""


def listening(pids: list[int]) -> set[str]:
    """Return the addresses at which these processes listen, as /proc/net/tcp writes them."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
