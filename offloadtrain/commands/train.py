"""`offloadtrain train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from offloadtrain.commands.jobs import find_job
from offloadtrain.commands.preview import preview
from offloadtrain.commands.progress_bar import ProgressBar

if TYPE_CHECKING:
    from offloadtrain.config import Config

STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: stopped on request, resumable."""


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
    """Train a job and print the run folder.

    Ctrl-C or SIGTERM stops after the current step with a checkpoint (exit code 75); a second one
    ends the process at once (exit code 1), and the last checkpoint is intact.

    Parameters
    ----------
    job
        A job file, or the name of a shipped job (`offloadtrain ls`).
    overrides
        KEY=VALUE ...: values that win over the job's, for example optim.lr=3e-4.
    run_dir
        Folder of this run. Default: runs/<UTC time>-<name>.
    resume
        never: a new run. auto: go on with the newest run of this job that is not complete, from its
        newest good checkpoint; a new run where there is none. Otherwise: the run folder to go on
        with.
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
    return run_job(config, path.read_text(encoding="utf-8"), run_dir=run_dir, resume=resume)


def run_job(config: Config, job_text: str, *, run_dir: Path | None, resume: str) -> int:
    """Open the run folder, train in it, say how it ended; return the exit code."""
    from offloadtrain import closing
    from offloadtrain.assembly import assemble
    from offloadtrain.console import Console
    from offloadtrain.control import Requests
    from offloadtrain.run_log import RunLog
    from offloadtrain.runs import open_run
    from offloadtrain.trainer import Trainer

    console = Console(every_s=config.train.log_every_s)
    run, resumes = open_run(config, job_text, run_dir=run_dir, resume=resume, say=console.say)
    requests = Requests(run.path)
    bar = ProgressBar("preparing the data")
    with run, RunLog(run, config, console) as log:
        parts = assemble(config, bar.show)
        bar.end()
        trainer = Trainer(config, parts, run.checkpoints, log, requests)
        if resumes:
            trainer.resume()
        log.started(parts, trainer.progress)
        outcome = trainer.train()
        log.ended(outcome.status)
        parts.optimizer.close()
        stopped = outcome.status == "stopped"
        if not stopped:
            console.say("\n" + closing.summary(run.events()))
        console.say("\n" + closing.duration(trainer.progress.seconds, outcome.step))
        console.say(closing.next_commands(run.path, config, stopped=stopped))
        print(run.path)
    return STOPPED if stopped else 0
