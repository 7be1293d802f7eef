"""`offloadtrain train --nproc N`: the supervisor, and what its ranks are started with."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from offloadtrain.cli.supervisor import Supervisor

PROGRAM = ("-m", "offloadtrain")


def launch(
    ranks: int,
    max_restarts: int,
    arguments: Sequence[str],
    opening: Sequence[str],
    least_limit_s: float,
    roles: Sequence[str] = (),
) -> int:
    """Run `offloadtrain` with these arguments on `ranks` ranks; return the exit code.

    Args:
        opening: arguments that choose the run folder; restarted ranks go on in the one that began.
        least_limit_s: `train.hang_timeout_s` of the job.
        roles: description of each rank in a pipeline, for messages.
    """

    def command(run: str) -> list[str]:
        chosen = ("--run-dir", run, "--resume", "auto") if run else opening
        return [sys.executable, *PROGRAM, *arguments, *chosen]

    environ = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    supervisor = Supervisor(
        ranks,
        command,
        max_restarts=max_restarts,
        least_limit_s=least_limit_s,
        environ=environ,
        roles=roles,
    )
    return supervisor.run()
