"""Pools of threads that start with the run, so that a refusal ends the start, not a later step.

A pool of Python or OpenMP starts its threads when work arrives. By then memory is filled, and under
a limit (`ulimit -v`, `ulimit -u`, pids.max) a thread may fail to start; OpenMP then ends the
process.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from offloadtrain.config.errors import HostMemoryError
from offloadtrain.hardware.direct_io import THREADS
from offloadtrain.hardware.host_memory import refusal, require_threads_room

POOLS = {"batches": 1, "checkpoint": THREADS}
"""Name → number of threads of the pools that a run needs during training."""


def started_pool(name: str, size: int) -> ThreadPoolExecutor:
    """Return a pool whose threads all run already.

    Raises:
        HostMemoryError: a thread cannot be started, or an rlimit leaves too little memory.
    """
    require_threads_room()
    pool, gate = ThreadPoolExecutor(size, f"offloadtrain-{name}"), threading.Event()
    try:
        for _ in range(size):
            pool.submit(gate.wait)
    except RuntimeError as error:
        raise HostMemoryError(refusal(error)) from error
    finally:
        gate.set()
    return pool


@cache
def _pool_of_process(name: str, pid: int) -> ThreadPoolExecutor:
    return started_pool(name, POOLS[name])


def shared_pool(name: str) -> ThreadPoolExecutor:
    """Return this process's pool of this name in `POOLS`; it lives as long as the process."""
    return _pool_of_process(name, os.getpid())  # threads do not survive a fork
