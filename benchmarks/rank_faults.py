"""What happens to ranks, counted: `python -m benchmarks.rank_faults faults|signals|orphans`.

    faults   a rank is killed, stopped or hangs, at a random point of a step, in building, in an
             evaluation or a save; one restart is allowed. Good: named in time, the job comes back
             and ends with all its steps, no process is left.
    signals  SIGTERM, SIGINT or SIGHUP at a random time from the start on. Good: exit code 75, and
             the same command with --resume auto goes on and ends.
    orphans  SIGKILL to the launcher at a random time. Good: no process is left.

One line per case; the last line is the count. The cases follow from --seed.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.distributed.faulty_job import ACTIONS, MORE_POINTS, POINTS
from tests.distributed.rank_faults import HANG_S, Job, job_file, none_left

KILLED_WITHIN_S, SLACK_S = 5.0, 2.0
_POINTS = [point for point in (*POINTS, *MORE_POINTS) if point != "error"]
_HANGS = [action for action in ACTIONS if action not in ("kill", "error")]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LONGEST_S = 20.0
"""Signals come at most this long after the start."""

Case = Callable[[random.Random, Path, Path], tuple[bool, str]]


def fault(draw: random.Random, job: Path, run: Path) -> tuple[bool, str]:
    """A third is killed, a third stopped; the others hang in one of three ways."""
    action = draw.choice(["kill", "stop", draw.choice(_HANGS)])
    point, step, rank = draw.choice(_POINTS), draw.randrange(8), draw.randrange(2)
    if point in ("checkpoint", "evaluation"):
        step = min(step, 3)  # there is one behind it
    least = ("--set", f"train.hang_timeout_s={HANG_S}")
    said = (f"{point}:{action}", str(step), str(rank))
    started = Job.start(job, run, "--nproc", "2", "--max-restarts", "1", *least, fault=said)
    code, named_s = started.ended(), started.named_after_s(rank)
    limit_s = KILLED_WITHIN_S if action == "kill" else HANG_S + SLACK_S
    good = code == 0 and started.steps()[-1] == 9 and none_left(run)
    what = f"{action} at {point}, step {step}, rank {rank}: exit {code}, named after {named_s:.1f}"
    return good and named_s <= limit_s, f"{what} s (limit {limit_s:g} s)"


def stop_signal(draw: random.Random, job: Path, run: Path) -> tuple[bool, str]:
    """One or two ranks."""
    number, after_s, ranks = draw.choice(_SIGNALS), draw.uniform(0, _LONGEST_S), draw.choice("12")
    started = Job.start(job, run, "--nproc", ranks, "--set", "train.steps=100000")
    began_s = time.monotonic()
    handled = started.handles_signals()
    time.sleep(max(0.0, after_s - (time.monotonic() - began_s)))
    started.process.send_signal(number)
    code = started.ended()
    again = Job.start(job, run, "--resume", "auto", *_few_more(started))
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


def orphan(draw: random.Random, job: Path, run: Path) -> tuple[bool, str]:
    after_s = draw.uniform(0.5, _LONGEST_S)
    started = Job.start(job, run, "--nproc", "2", "--set", "train.steps=100000")
    time.sleep(after_s)
    started.process.kill()
    killed_s = time.monotonic()
    gone = none_left(run)
    return gone, f"after {after_s:.1f} s: gone after {time.monotonic() - killed_s:.1f} s"


CASES: dict[str, Case] = {"faults": fault, "signals": stop_signal, "orphans": orphan}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_faults")
    parser.add_argument("what", choices=CASES)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    good = 0
    with tempfile.TemporaryDirectory() as folder:
        job = job_file(Path(folder))
        for number in range(options.count):
            draw = random.Random(f"{options.seed} {number}")
            held, line = CASES[options.what](draw, job, Path(folder) / f"run{number}")
            good += held
            print(f"{number + 1:4} {'good' if held else 'BAD '} {line}", flush=True)
    print(f"{options.what}: {good} of {options.count} good (seed {options.seed})")
    return 0 if good == options.count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
