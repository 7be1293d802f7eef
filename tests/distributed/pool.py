"""Processes that are ranks of one Gloo group, kept for many calls: starting them takes longer than
what they are asked."""

from __future__ import annotations

import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from offloadtrain.plan.costs.microbatch import TracedStep
from offloadtrain.plan.tracing import tracer
from offloadtrain.plan.tracing.tracer import Microbatch

TIMEOUT_S = 300
MOST_GROUPS = 24
"""Process groups that meshes have left behind; each has threads that poll. With hundreds of them
ranks do little else."""
PRELOADED = [
    "offloadtrain.engine",
    "torch._dynamo",  # what the first torch optimizer of a process imports, for a second
    "torch.distributed.fsdp",
    "offloadtrain.train.run",
    "offloadtrain.cli.supervisor",
    "tests.distributed.faulty_job",
    "tests.distributed.rank_jobs",
    "tests.distributed.reference",
    "tests.parallel.mesh_runs",
]


def forkserver() -> ForkServerContext:
    """Processes that begin with what ranks import, instead of importing it for seconds each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankFailedError(AssertionError):
    """A call failed on some of the ranks."""


class Pool:
    """So many ranks; `run` calls a module-level function on each of them."""

    def __init__(self, size: int) -> None:
        context = forkserver()
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        self._groups = 0
        for rank in range(size):
            pipe, pipe_of_rank = context.Pipe()
            store = str(Path(self._folder.name, "store"))
            args = (pipe_of_rank, store, self._stacks(rank), rank, size)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            pipe_of_rank.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Its results, in the order of ranks.

        Raises:
            RankFailedError: with every rank's traceback; the pool is of no use afterwards.
        """
        for pipe in self._pipes:
            pipe.send((fn, args, kwargs))
        answers = [self._answer(rank) for rank in range(len(self._pipes))]
        failed = [f"rank {rank}: {text}" for rank, (ok, text, _) in enumerate(answers) if not ok]
        if failed:
            raise RankFailedError("\n".join(failed))
        self._groups = max(groups for _, _, groups in answers)
        return [value for _, value, _ in answers]

    @property
    def is_worn(self) -> bool:
        """New processes would be faster."""
        return self._groups > MOST_GROUPS

    def _answer(self, rank: int) -> tuple[bool, Any, int]:
        if not self._pipes[rank].poll(TIMEOUT_S):
            stacks = self._stacks(rank).read_text()
            return False, f"no answer in {TIMEOUT_S} s; it was at\n{stacks}", 0
        try:
            return self._pipes[rank].recv()
        except EOFError:
            return False, "ended", 0

    def _stacks(self, rank: int) -> Path:
        """Where a rank writes what its threads do, once a call takes too long."""
        return Path(self._folder.name, f"stacks-{rank}")

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _traced_once(batch: Microbatch) -> TracedStep:
    """The trace of a microbatch takes a third of the processor time of a small job. It depends on
    its arguments alone, so the first process that needs one leaves it to the others."""
    path = Path(os.environ["OFFLOADTRAIN_CACHE"], sha256(repr(batch).encode()).hexdigest())
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the others wait for the result
        file.seek(0)
        # A process that was killed meanwhile may have written a part.
        with suppress(EOFError, pickle.UnpicklingError):
            step: TracedStep = pickle.loads(file.read())
            return step
        step = _trace(batch)
        file.truncate(0)
        file.write(pickle.dumps(step))
    return step


_trace = tracer.traced_microbatch


def _serve(pipe: Connection, store: str, stacks: Path, rank: int, size: int) -> None:
    tracer.traced_microbatch = _traced_once  # type: ignore[assignment]
    dump = stacks.open("w")
    # From the start on: making the group may be what never ends.
    faulthandler.dump_traceback_later(TIMEOUT_S * 0.9, file=dump)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )
    while True:
        try:
            fn, args, kwargs = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(TIMEOUT_S * 0.9, file=dump)
        try:
            value = fn(*args, **kwargs)
            pipe.send((True, value, len(dist.distributed_c10d._world.pg_map)))
        except BaseException:
            pipe.send((False, traceback.format_exc(), 0))
        faulthandler.cancel_dump_traceback_later()
