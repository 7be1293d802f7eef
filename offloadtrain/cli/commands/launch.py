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
"""Time for the checkpoint of a run that was asked to stop."""


def launch(ranks: int, max_restarts: int, arguments: Sequence[str]) -> int:
    """Run `offloadtrain` with these arguments on `ranks` ranks; return the exit code.

    The ranks' standard output is forwarded. Ctrl-C and SIGTERM reach them as one SIGTERM: from the
    terminal every process would get its own, and a second one ends a rank at once.
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
    """Forward standard output; its last line is the run folder."""
    assert process.stdout is not None
    last = ""
    with process.stdout:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return Path(last) if last else None


def _exit_code(run: Path | None, code: int, began_s: float) -> int:
    """Return the exit code from the log: torchrun ends with 1 if its ranks stopped on request."""
    if run is None:
        return code or 1
    log = run / "events" / "rank000.jsonl"
    status = ended_as(log, began_s)
    if status is None:
        print(f"{log} does not say how this start ended: it counts as failed", file=sys.stderr)
    if status == "stopped":
        return STOPPED
    return 0 if status == "done" and code in (0, 1) else code or 1


def _has_shutdown_timeout() -> bool:
    """Return whether torchrun has the option, new in torch 2.13."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)
