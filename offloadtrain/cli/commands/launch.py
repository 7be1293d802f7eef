"""`offloadtrain train --nproc N`: torchrun on this host, with the exit codes of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from offloadtrain.cli.exit_codes import STOPPED
from offloadtrain.train.run_summary import ended_as

STOP_WITHIN_S = 600
"""For the checkpoint of a run that is asked to stop."""


def launch(ranks: int, max_restarts: int, arguments: Sequence[str]) -> int:
    """Run `offloadtrain` with these arguments on so many ranks; return the exit code.

    The ranks' standard output is passed on. Ctrl-C and SIGTERM reach them as one SIGTERM: from the
    terminal every process would get its own, and the second one ends a rank at once.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    command += ["--shutdown-timeout", str(STOP_WITHIN_S)] if _has_shutdown_timeout() else []
    command += ["-m", "offloadtrain", *arguments]
    environ = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    began_s = time.time()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environ
    )
    asked = 0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run = _echo(process)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return _exit_code(run, code, began_s)


def _echo(process: subprocess.Popen[str]) -> Path | None:
    """Pass standard output on; its last line is the run folder."""
    assert process.stdout is not None
    last = ""
    with process.stdout:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return Path(last) if last else None


def _exit_code(run: Path | None, code: int, began_s: float) -> int:
    """torchrun ends with 1 where its ranks were asked to stop and did: the log knows better."""
    if run is None:
        return code or 1
    log = run / "events" / "rank000.jsonl"
    status = ended_as(log, began_s)
    if status is None:
        print(f"{log} does not tell how this start ended: taken for failed", file=sys.stderr)
    if status == "stopped":
        return STOPPED
    return 0 if status == "done" and code in (0, 1) else code or 1


def _has_shutdown_timeout() -> bool:
    """Since torch 2.13."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)
