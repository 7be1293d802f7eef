"""`offloadtrain train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from offloadtrain.commands.jobs import find_job
from offloadtrain.commands.preview import preview


def train(
    job: str,
    /,
    *,
    overrides: Annotated[
        tuple[str, ...],
        Parameter(name="--set", consume_multiple=True, negative=(), show_default=False),
    ] = (),
    run_dir: Path | None = None,
    resume: str = "never",
    dry_run: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Train a job.

    The run folder, its checkpoints and how to go on are told at the end. Ctrl-C or SIGTERM stops
    after the current step with a checkpoint (exit code 75); a second one ends at once.

    Parameters
    ----------
    job
        A job file, or the name of a shipped job (`offloadtrain ls`).
    overrides
        KEY=VALUE ...: values that win over the job's, for example optim.lr=3e-4.
    run_dir
        Folder of this run. Default: runs/<UTC time>-<name>.
    resume
        never: a new run. auto: go on from the newest good checkpoint of the newest run of this job,
        or a new run where there is none. Otherwise a run folder to go on with.
    dry_run
        Print the resolved job and what it needs, and train nothing.
    """
    from offloadtrain import config as jobs

    path = find_job(job)
    config = jobs.load(path, overrides)
    if dry_run:
        print(preview(config), file=sys.stderr)
        print(jobs.dump(config), end="")
        return 0

    from offloadtrain.trainer import train_job

    return 0
