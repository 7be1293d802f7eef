"""One start of a run: folder, log, training, end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from offloadtrain.config import job as jobs
from offloadtrain.config.batch_split import explain
from offloadtrain.config.job import Config
from offloadtrain.events.control import Requests
from offloadtrain.runtime.process_group import ALONE, Ranks
from offloadtrain.train import run_summary
from offloadtrain.train.build import TrainingContext, assemble, described
from offloadtrain.train.checkpoint.manifest import DamagedCheckpointError
from offloadtrain.train.console import Console
from offloadtrain.train.distributed_run import DistributedRun
from offloadtrain.train.guards import Guards
from offloadtrain.train.memory_errors import NamedMemoryErrors
from offloadtrain.train.progress_bar import ProgressBar
from offloadtrain.train.resume import Opened, open_run
from offloadtrain.train.run_log import RunLog
from offloadtrain.train.trainer import Trainer


def run(
    config: Config,
    job_text: str,
    run_dir: Path | None,
    resume: str,
    distributed: DistributedRun | None,
    waiting: str,
    console: Console,
    guards: Guards,
) -> str:
    """Train to the end, or until a stop is requested; rank 0 prints the summary.

    Args:
        resume: as `offloadtrain train --resume` takes it.
        distributed: the other ranks; None: a single rank.
        waiting: how torch's threads wait, for the log; "" is the default.

    Returns:
        "done" or "stopped".
    """
    config = described(config)
    if distributed is None:
        opened = open_run(config, run_dir=run_dir, resume=resume, say=console.say)
    else:
        opened = distributed.open_run(config, run_dir, resume, console.say)
    ranks = ALONE if distributed is None else distributed.ranks
    folder = opened.run
    with ExitStack() as stack:
        stack.enter_context(folder)
        log = stack.enter_context(
            RunLog(folder, config, console, ranks.rank, run_commands=ranks.rank == 0)
        )
        stack.enter_context(guards.reporting(log.hung))
        if distributed is not None:
            stack.enter_context(distributed.reporting(log))
        memory = stack.enter_context(NamedMemoryErrors())
        context = _build(config, opened, distributed, console)
        memory.ledger = context.optimizer.ledger
        guards.watchdog.watch_lanes(context.optimizer.lanes.state)
        trainer = Trainer(config, context, folder, log)
        _resume(trainer, opened, ranks)
        trainer.saving.check_room(trainer.progress.step)
        for told in opened.begin(job=job_text, resolved=jobs.dump(config), ranks=ranks):
            log.warn("checkpoint-damaged", told)
        if distributed is not None:
            distributed.began(folder)
        guards.watchdog.run = str(folder.path.resolve())
        # Only now: earlier requests are refused.
        requests = Requests(folder.path) if ranks.rank == 0 else None
        log.started(context, trainer.progress, waiting)
        guards.stop.defer()
        outcome = trainer.train(requests, guards.stop)
        log.ended(outcome.status)
        context.optimizer.close()
        if ranks.rank == 0:
            seconds, stopped = trainer.progress.seconds, outcome.status == "stopped"
            events = folder.events()
            told = run_summary.words(
                folder.path, events, config, seconds, outcome.step, stopped=stopped
            )
            console.say(told)
            print(folder.path, flush=True)
    return outcome.status


def _resume(trainer: Trainer, opened: Opened, ranks: Ranks) -> None:
    """Load the newest checkpoint whose tensors verify: see [Note: Reading once]."""
    while opened.found is not None:
        try:
            trainer.resume(opened.found)
            return
        except DamagedCheckpointError as damage:
            opened.fall_back(damage, ranks)


def _build(
    config: Config, opened: Opened, distributed: DistributedRun | None, console: Console
) -> TrainingContext:
    """Build data, model and engine, with a progress bar."""
    console.doing("preparing data and model")
    labels = ("preparing the data", "verifying the tokens")
    preparing, verifying = (ProgressBar(label, on_shown=console.spoken) for label in labels)
    ranks = ALONE if distributed is None else distributed.ranks
    rank_info, resumed = None if distributed is None else distributed.rank_info, opened.settings
    with preparing, verifying:
        context = assemble(config, preparing.show, ranks, rank_info, resumed, verifying.show)
    if distributed is not None:
        console.say(explain(config, context.local, ranks.size))
    return context
