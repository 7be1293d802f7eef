"""What happens to ranks, counted: `python -m benchmarks.rank_faults faults|signals|orphans`.

    faults   a rank is killed, stopped or hangs, at a random point of a step, in building, in an
             evaluation or a save; one restart is allowed. Good: named in time, the job comes back
             and ends with all its steps, no process is left.
    signals  SIGTERM, SIGINT or SIGHUP at a random time from the start on. Good: exit code 75, and
             the same command with --resume auto goes on and ends.
    orphans  SIGKILL to the launcher at a random time. Good: no process is left.

Most cases run in processes that begin with everything imported; one in ten is the command itself,
whose imports take most of its time, and most of the signals that come early.

One line per case; the last line is the count. The cases follow from --seed, however many are run
--at-once.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks import parts
from tests.distributed.faulty_job import ACTIONS, MORE_POINTS, POINTS
from tests.distributed.rank_faults import HANG_S, Job, job_file, none_left

KILLED_WITHIN_S, SLACK_S = 5.0, 2.0
COMMANDS = 10
"""One case in so many is started as a command."""
_POINTS = [point for point in (*POINTS, *MORE_POINTS) if point != "error"]
_HANGS = [action for action in ACTIONS if action not in ("kill", "error")]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LONGEST_S = {True: 15.0, False: 2.5}
"""Signals come at most this long after the start of a command, of a process with all imports: about
half of them before the first step."""


class Setting(NamedTuple):
    """What a case runs with.

    Attributes:
        number: the case's; kinds of faults take turns.
        hang_s: `train.hang_timeout_s` of the job.
    """

    number: int
    draw: random.Random
    job: Path
    run: Path
    hang_s: float

    @property
    def is_command(self) -> bool:
        return self.number % COMMANDS == COMMANDS - 1

    def start(self, *arguments: str, fault: Sequence[str] = ()) -> Job:
        start = Job.start if self.is_command else Job.fork
        return start(self.job, self.run, *arguments, fault=fault)


Case = Callable[[Setting], tuple[bool, str]]


def fault(case: Setting) -> tuple[bool, str]:
    """Kills, stops and hangs of one of three ways take turns."""
    draw, run = case.draw, case.run
    action = ("kill", "stop", draw.choice(_HANGS))[case.number % 3]
    point, step, rank = draw.choice(_POINTS), draw.randrange(8), draw.randrange(2)
    if point in ("checkpoint", "evaluation"):
        step = min(step, 3)  # there is one behind it
    least = ("--set", f"train.hang_timeout_s={case.hang_s}")
    said = (f"{point}:{action}", str(step), str(rank))
    started = case.start("--nproc", "2", "--max-restarts", "1", *least, fault=said)
    code, named_s = started.ended(), started.named_after_s(rank)
    limit_s = KILLED_WITHIN_S if action == "kill" else case.hang_s + SLACK_S
    good = code == 0 and started.steps()[-1] == 9 and none_left(run)
    what = f"{action} at {point}, step {step}, rank {rank}: exit {code}, named after {named_s:.1f}"
    return good and named_s <= limit_s, f"{what} s (limit {limit_s:g} s)"


def stop_signal(case: Setting) -> tuple[bool, str]:
    """One or two ranks."""
    draw, run, longest_s = case.draw, case.run, _LONGEST_S[case.is_command]
    number, after_s, ranks = draw.choice(_SIGNALS), draw.uniform(0, longest_s), draw.choice("12")
    started = case.start("--nproc", ranks, "--set", "train.steps=100000")
    began_s = time.monotonic()
    handled = started.handles_signals()
    time.sleep(max(0.0, after_s - (time.monotonic() - began_s)))
    started.process.send_signal(number)
    code = started.ended()
    again = case.start("--resume", "auto", *_few_more(started))
    what = f"{number.name} after {after_s:.1f} s, {ranks} ranks, exit {code}, step"
    orderly = "Traceback" not in started.text and handled
    last = started.steps()[-1:]
    return (
        code == 75 and orderly and again.ended() == 0 and none_left(run),
        f"{what} {last[0] if last else 'none'}",
    )


def _few_more(started: Job) -> tuple[str, str]:
    done = started.steps()
    return "--set", f"train.steps={(done[-1] if done else 0) + 3}"


def orphan(case: Setting) -> tuple[bool, str]:
    after_s = case.draw.uniform(0.1, _LONGEST_S[case.is_command])
    started = case.start("--nproc", "2", "--set", "train.steps=100000")
    time.sleep(after_s)
    started.process.kill()
    killed_s = time.monotonic()
    gone = none_left(case.run)
    started.process.wait()
    return gone, f"after {after_s:.1f} s: gone after {time.monotonic() - killed_s:.1f} s"


CASES: dict[str, Case] = {"faults": fault, "signals": stop_signal, "orphans": orphan}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_faults")
    parser.add_argument("what", choices=CASES)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1, help="most of them only wait")
    parser.add_argument("--hang-timeout", type=float, default=HANG_S, help="of faults, in seconds")
    parts.add_to(parser)
    options = parser.parse_args(arguments)
    # Under nohup it is ignored, and a run inherits that: it would outlive the SIGHUP of its case.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        job = job_file(Path(folder))
        settings = [
            Setting(
                number,
                random.Random(f"{options.seed} {number}"),
                job,
                Path(folder) / f"run{number}",
                options.hang_timeout,
            )
            for number in range(options.count)
        ]
        chosen = options.part.of(settings)
        good = sum(pool.map(partial(_told, CASES[options.what]), chosen))
    print(f"{options.what}: {good} of {len(chosen)} good (seed {options.seed})")
    return 0 if good == len(chosen) else 1


def _told(run: Case, case: Setting) -> bool:
    good, line = run(case)
    print(f"{case.number + 1:4} {'good' if good else 'BAD '} {line}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
