"""What happens to checkpoints when storage fails, counted:
`python -m benchmarks.storage_faults kills|power|errors|tmpfs|damage|exports|converts`.

    kills    SIGKILL before each call of a save, and half-way through what it writes: first,
             steady, asynchronous (update modes, formats, state on the disk), pruning, on 1, 2 and 4
             ranks. Good: the checkpoint before it or the new one loads to the bit, and the next
             save works.
    power    every state that a loss of power can leave between two calls of a save: what was not
             fsynced is lost, torn or out of order. Good: the same, and a save that has returned is
             there.
    errors   ENOSPC, EIO, EROFS and EDQUOT at each call of a save, once, for a while and for good.
             Good: one error of the program's own, the older checkpoints are intact, and the next
             save works.
    tmpfs    trainings on a file system that is too small, or full for some steps (mounted, as
             root). Good: the run goes on, or ends with one line; what is saved loads; the log is
             whole, or says what it lost.
    damage   bytes flipped, files cut, lengthened, exchanged or missing, manifests that lie, with a
             hash that fits. Good: noticed, what has changed is named, and the checkpoint before it
             is loaded.
    exports  SIGKILL at each call of `offloadtrain export`. Good: the folder is absent or whole, and
             the run's checkpoint is untouched.
    converts the same at calls of `offloadtrain convert`, to torch's files and from one to a run.

A line for each case that is not good, and the outcomes; the last line is the count. Without --count
all cases are run; with it a draw from them, which follows from --seed.
"""

from __future__ import annotations

import argparse
import importlib
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import parts
from tests.train.storage.saves import Case

SETS = ("kills", "power", "errors", "tmpfs", "damage", "exports", "converts")


def run_all(cases: Sequence[Case], folder: Path) -> tuple[Counter[str], int]:
    """Run cases in new folders; return their outcomes, and how many were not good."""
    outcomes: Counter[str] = Counter()
    bad = 0
    for case in cases:
        root = folder / "case"
        root.mkdir()
        try:
            outcomes[f"{case.name.partition(':')[0]}: {case.run(root)}"] += 1
        except Exception:  # an assertion, or whatever a save has let through
            bad += 1
            print(f"BAD  {case.name}\n{traceback.format_exc(limit=-4)}", flush=True)
        shutil.rmtree(root)
    return outcomes, bad


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage_faults")
    parser.add_argument("what", choices=SETS)
    parser.add_argument("--count", type=int, default=0, help="0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to save; default: the temporary folder")
    parts.add_to(parser)
    options = parser.parse_args(arguments)
    # Processes are forked from this one: no pool of torch's may have begun.
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = importlib.import_module(f"tests.train.storage.{options.what}").cases(Path(folder))
        drawn = random.Random(options.seed).sample(found, options.count or len(found))
        drawn = options.part.of(drawn)
        outcomes, bad = run_all(drawn, Path(folder))
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:6} {outcome}")
    seconds = time.perf_counter() - began_s
    print(f"{options.what}: {len(drawn) - bad} of {len(drawn)} good, in {seconds:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
