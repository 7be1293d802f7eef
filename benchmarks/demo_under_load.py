"""The demo's steps beside other programs, by how torch's threads wait for each other.

    python -m benchmarks.demo_under_load --rounds 3

Each case is a process of its own, for OpenMP decides when it is loaded; the cases take turns. A
busy core is a Python process that counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offloadtrain.events import log_lines, schema
from offloadtrain.hardware.telemetry import probe

CASES: dict[str, dict[str, str]] = {
    "as chosen": {},
    "spinning": {"GOMP_SPINCOUNT": "300000"},  # what libgomp does by itself
    "asleep": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "300000"},
}
WARM_STEPS = 2
OVERRIDES = (
    "optim.warmup_steps=2",
    "train.eval_every=0",
    "train.checkpoint_every=0",
    "train.sample_tokens=0",
    "train.sample_prompt=",
)


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep so many cores busy."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def tokens_per_s(environ: dict[str, str], steps: int, data: Path) -> float:
    """Median over the steps of one start."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "offloadtrain", "train", "demo", "--run-dir", str(run)]
        command += ["--set", f"train.steps={steps}", f"data.cache={data}", *OVERRIDES]
        subprocess.run(command, env=os.environ | environ, check=True, capture_output=True)
        log = [record.event for record in log_lines.read(run / "events" / "rank000.jsonl")]
    rates = [event.tokens_per_s for event in log if isinstance(event, schema.Step)]
    return statistics.median(rates[WARM_STEPS:])


def main() -> None:
    """Print a table: tokens/s, and how many times slower than spinning on the quiet machine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14, help="of each start")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    asked = parser.parse_args()
    found: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as data:
        tokens_per_s({}, WARM_STEPS + 1, Path(data))  # makes the token files
        for number in range(asked.rounds):
            for load in (0, 1):
                for case in asked.cases:
                    print(f"round {number + 1}: {case}, {load} busy", file=sys.stderr, flush=True)
                    with busy(load):
                        rate = tokens_per_s(CASES[case], asked.steps, Path(data))
                    found.setdefault((case, load), []).append(rate)
    medians = {key: statistics.median(rates) for key, rates in found.items()}
    best = medians.get(("spinning", 0), max(medians.values()))
    told = probe()
    print(f"{told.cpu}, {told.cores_usable} cores; the demo, tokens/s (times slower)\n")
    print("| threads wait | quiet | one busy core |\n|---|---|---|")
    for case in asked.cases:
        cells = (
            f"{medians[case, load]:,.0f} ({best / medians[case, load]:.2f})" for load in (0, 1)
        )
        print(f"| {case} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
