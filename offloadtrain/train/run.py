"""One start of a run: folder, log, training, end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from offloadtrain.boundary.output import tell
from offloadtrain.config import job as jobs
from offloadtrain.config.batch_split import explain
from offloadtrain.config.errors import HostMemoryError
from offloadtrain.config.job import Config
from offloadtrain.events import oom_kills, set_up_file
from offloadtrain.events.control import Requests
from offloadtrain.events.set_up_file import SetUpNow
from offloadtrain.hardware import cgroup
from offloadtrain.hardware.host_memory import is_out_of_memory, refusal, require_threads_room
from offloadtrain.runtime.arena import Ledger
from offloadtrain.runtime.heartbeat import HEARTBEAT, Heartbeat, Watchdog
from offloadtrain.runtime.process_group import ALONE
from offloadtrain.train.build import TrainingContext, assemble, described
from offloadtrain.train.distributed_run import DistributedRun
from offloadtrain.train.log.console import Console, run_summary
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.run_folder import Opened, RunFolder, open_run, start_ticks
from offloadtrain.train.signals import StopRequests
from offloadtrain.train.trainer import trainer_of


@contextmanager
def named_memory_errors() -> Iterator[Callable[[Ledger], None]]:
    """Turn an out-of-memory error of Python, torch or the kernel into a HostMemoryError that names
    the tightest limit and the largest owners. Yields a function that takes the engine's Ledger once
    it exists.
    """
    ledgers = [Ledger()]
    try:
        yield ledgers.append
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        raise HostMemoryError(
            f"{refusal(error)}. Held by the engine: {ledgers[-1].summary()}. Set a smaller "
            'train.micro_batch, offload.activation = "recompute" or a narrower offload.state'
        ) from error


EVERY_S = 0.5


@contextmanager
def shown_set_up(
    folder: Path, warn: Callable[[str], None], heartbeat: Heartbeat = HEARTBEAT
) -> Iterator[None]:
    """Publish a heartbeat's state in the folder from a thread. At the end of the context, when the
    log has begun or the start has failed, the file is removed.

    Args:
        warn: called once if the file cannot be written; the set-up continues without it.
    """
    over, since_s = threading.Event(), time.time()
    kills = oom_kills.count(cgroup.oom_counters())

    def show() -> None:
        while True:
            try:
                set_up_file.write(folder, set_up_now(heartbeat, since_s, kills))
            except OSError as error:
                warn(f"the set-up's progress cannot be written: {error}")
                return
            if over.wait(EVERY_S):
                return

    thread = threading.Thread(target=show, name="shown-set-up", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        set_up_file.remove(folder)


def set_up_now(heartbeat: Heartbeat, since_s: float, kills: dict[str, int]) -> SetUpNow:
    """Return the current state of a set-up since `since_s`, with these OOM kill counters."""
    part = heartbeat.part
    return SetUpNow(
        pid=os.getpid(),
        pid_start_ticks=start_ticks(),
        host=socket.gethostname(),
        since_s=since_s,
        time_s=time.time(),
        phase=heartbeat.phase,
        part=part.what if part else "",
        done_bytes=part.done_bytes if part else 0,
        total_bytes=part.total_bytes if part else 0,
        oom_kills=kills,
    )


MOST_WARNINGS = 20
"""Most warnings about damaged checkpoints in one start."""


def run(
    config: Config,
    job_text: str,
    *,
    run_dir: Path | None,
    resume: str,
    distributed: DistributedRun | None,
    waiting: str,
    console: Console,
    stop: StopRequests,
    watchdog: Watchdog,
) -> str:
    """Train to the last step or until a stop is requested; rank 0 prints the summary.

    Args:
        resume: value of `offloadtrain train --resume`.
        distributed: the connection to other ranks; None for a single rank.
        waiting: wait policy of torch's threads, for the log; "" is the default.

    Returns:
        "done" or "stopped".
    """
    require_threads_room()
    config = described(config)
    open_folder = open_run if distributed is None else distributed.open_run
    opened = open_folder(config, run_dir=run_dir, resume=resume, say=console.say)
    ranks = ALONE if distributed is None else distributed.ranks
    with ExitStack() as stack:
        folder = stack.enter_context(opened.run)
        log = stack.enter_context(RunLog(folder, config, console, ranks.rank, run_commands=True))
        watchdog.log = log.hung
        stack.callback(setattr, watchdog, "log", None)
        if distributed is not None:
            stack.enter_context(distributed.reporting(log))
        set_ledger = stack.enter_context(named_memory_errors())
        set_up = stack.enter_context(ExitStack())
        if ranks.rank == 0:
            # See [Note: Nothing before it begins].
            folder.announce()
            set_up.enter_context(shown_set_up(folder.path, partial(log.warn, "set-up-unseen")))
        context = _build(config, opened, distributed, console)
        set_ledger(context.optimizer.ledger)
        watchdog.watch_lanes(context.optimizer.lanes_state)
        trainer = trainer_of(config, context, folder, log)
        # See [Note: Reading once].
        if opened.checkpoint and not trainer.resume(opened.checkpoint, opened.skip):
            raise opened.no_checkpoint()
        trainer.saving.check_room(trainer.progress.step)
        resolved = jobs.dump(trainer.saving.update_choice.resolved)
        problems = opened.begin(job=job_text, resolved=resolved, ranks=ranks)
        if ranks.rank == 0:
            _warn_of_folder(folder, problems, log)
        if distributed is not None:
            distributed.began(folder)
        watchdog.run = str(folder.path.resolve())
        # Only now, so that earlier requests are refused.
        requests = Requests(folder.path) if ranks.rank == 0 else None
        log.started(context, trainer.progress, waiting)
        set_up.close()
        stop.defer()
        status = trainer.train(requests, stop)
        log.ended(status)
        context.optimizer.close()
        if ranks.rank == 0:
            nproc = 1 if distributed is None else distributed.nproc
            facts = folder.path, folder.events(), config, trainer.progress, status, nproc
            console.say(run_summary(*facts))
            tell(str(folder.path))
    return status


def _warn_of_folder(folder: RunFolder, problems: Sequence[str], log: RunLog) -> None:
    """Warn of checkpoints that were set aside, up to MOST_WARNINGS, and of missing file locks."""
    for problem in problems[:MOST_WARNINGS]:
        log.warn("checkpoint-damaged", problem)
    if (more := len(problems) - MOST_WARNINGS) > 0:
        log.warn("checkpoint-damaged", f"{more} more damaged checkpoints are set aside")
    if not folder.has_locks:
        log.warn(
            "no-locks",
            f"the file system of {folder.path} keeps no locks (flock): nothing stops a second "
            "process from training in this folder",
        )


def _build(
    config: Config, opened: Opened, distributed: DistributedRun | None, console: Console
) -> TrainingContext:
    """Build data, model and engine; the console shows the progress."""
    console.doing("preparing data and model")
    if distributed is None:
        return assemble(config, ALONE, None, opened.settings)
    ranks = distributed.ranks
    context = assemble(config, ranks, distributed.rank_info, opened.settings)
    console.say(explain(config, context.local, ranks.size))
    return context
