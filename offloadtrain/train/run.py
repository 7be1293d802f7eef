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
from types import TracebackType

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
from offloadtrain.runtime.heartbeat import HEARTBEAT, Heartbeat
from offloadtrain.runtime.process_group import ALONE
from offloadtrain.train.build import TrainingContext, assemble, described
from offloadtrain.train.distributed_run import DistributedRun
from offloadtrain.train.log.console import Console, run_summary
from offloadtrain.train.log.run_log import RunLog
from offloadtrain.train.run_folder import Opened, RunFolder, open_run, start_ticks
from offloadtrain.train.signals import Guards
from offloadtrain.train.trainer import trainer_of


@contextmanager
def named_memory_errors() -> Iterator[Callable[[Ledger], None]]:
    """Turn a refusal of Python, of torch or of the kernel into a HostMemoryError, which names the
    tightest limit and the largest owners. Yields a function that takes the engine's Ledger, once
    there is one.
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


class ShownSetUp:
    """Writes what a heartbeat says into the folder, from a thread, until the context is left."""

    def __init__(
        self, folder: Path, warn: Callable[[str], None], heartbeat: Heartbeat = HEARTBEAT
    ) -> None:
        """`warn`: called once if the file cannot be written; the set-up goes on unseen."""
        self._folder, self._warn, self._heartbeat = folder, warn, heartbeat
        self._over = threading.Event()
        self._since_s = time.time()
        self._kills = oom_kills.count(cgroup.oom_counters())
        self._thread = threading.Thread(target=self._run, name="shown-set-up", daemon=True)

    def __enter__(self) -> ShownSetUp:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Remove the file: the log has begun, or the start is refused. Idempotent."""
        self._over.set()
        self._thread.join()
        set_up_file.remove(self._folder)

    def _run(self) -> None:
        while True:
            try:
                set_up_file.write(self._folder, self._now())
            except OSError as error:
                self._warn(f"the set-up's progress cannot be written: {error}")
                return
            if self._over.wait(EVERY_S):
                return

    def _now(self) -> SetUpNow:
        part = self._heartbeat.part
        return SetUpNow(
            pid=os.getpid(),
            pid_start_ticks=start_ticks(),
            host=socket.gethostname(),
            since_s=self._since_s,
            time_s=time.time(),
            phase=self._heartbeat.phase,
            part=part.what if part else "",
            done_bytes=part.done_bytes if part else 0,
            total_bytes=part.total_bytes if part else 0,
            oom_kills=self._kills,
        )


MOST_WARNINGS = 20
"""Warnings of damaged checkpoints at one start."""


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
    require_threads_room()
    config = described(config)
    if distributed is None:
        opened = open_run(config, run_dir=run_dir, resume=resume, say=console.say)
    else:
        opened = distributed.open_run(config, run_dir, resume, console.say)
    ranks = ALONE if distributed is None else distributed.ranks
    with ExitStack() as stack:
        folder = stack.enter_context(opened.run)
        run_log = RunLog(folder, config, console, ranks.rank, run_commands=ranks.rank == 0)
        log = stack.enter_context(run_log)
        stack.enter_context(guards.reporting(log.hung))
        if distributed is not None:
            stack.enter_context(distributed.reporting(log))
        set_ledger = stack.enter_context(named_memory_errors())
        set_up = stack.enter_context(ExitStack())
        if ranks.rank == 0:
            # See [Note: Nothing before it begins].
            folder.announce()
            set_up.enter_context(ShownSetUp(folder.path, partial(log.warn, "set-up-unseen")))
        context = _build(config, opened, distributed, console)
        set_ledger(context.optimizer.ledger)
        guards.watchdog.watch_lanes(context.optimizer.lanes_state)
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
        guards.watchdog.run = str(folder.path.resolve())
        # Only now: earlier requests are refused.
        requests = Requests(folder.path) if ranks.rank == 0 else None
        log.started(context, trainer.progress, waiting)
        set_up.close()
        guards.stop.defer()
        status = trainer.train(requests, guards.stop)
        log.ended(status)
        context.optimizer.close()
        if ranks.rank == 0:
            progress, nproc = trainer.progress, 1 if distributed is None else distributed.nproc
            facts = (folder.path, folder.events(), config, progress.seconds, progress.step)
            console.say(run_summary(*facts, stopped=status == "stopped", nproc=nproc))
            tell(str(folder.path))
    return status


def _warn_of_folder(folder: RunFolder, problems: Sequence[str], log: RunLog) -> None:
    """Warn of each checkpoint that was set aside; of a folder full of junk, of the first ones; and
    of a file system without locks."""
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
    """Build data, model and engine; the console shows how far it is."""
    console.doing("preparing data and model")
    preparing = partial(HEARTBEAT.advance, "preparing the data")
    verifying = partial(HEARTBEAT.advance, "verifying the tokens")
    ranks = ALONE if distributed is None else distributed.ranks
    rank_info, resumed = None if distributed is None else distributed.rank_info, opened.settings
    context = assemble(config, preparing, ranks, rank_info, resumed, verifying)
    if distributed is not None:
        console.say(explain(config, context.local, ranks.size))
    return context
