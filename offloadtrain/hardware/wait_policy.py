"""The wait policy of torch's threads, chosen once, before torch is loaded.

[Note: Waiting]
torch divides each operation among its threads, thousands of times per step, and the first thread to
finish waits for the others. OpenMP lets this thread spin for milliseconds, which is fastest if each
thread has its own core. If another program occupies a core, the thread on that core is always late,
and the spinning threads take the CPU time that it needs. Sleeping threads do not. Therefore the
load is measured before the run. With fewer idle cores than threads, the threads sleep while they
wait (OMP_WAIT_POLICY, which OpenMP reads once, when it is loaded). The number of threads does not
change, because bits depend on it: two runs of a job are identical also on a busy machine. A program
that starts later only slows the run down, and raises the alert "slower".

Measured by `python -m benchmarks.demo_under_load`; see docs/load.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from offloadtrain.hardware import cpus

WINDOW_S = 0.2
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""If the user sets one of these, the policy does not change."""
_NOISE, _SPARE = 0.1, 1 / 3
"""Shares of a core: loads below `_NOISE` are not a program; `_SPARE` is the tolerated shortage."""


@dataclass(frozen=True, slots=True)
class Busy:
    """`cores` is the number of physical cores that this process may use, `busy` the cores in use by
    others."""

    cores: int
    busy: float


def look(
    allowed: Collection[int] | None = None,
    *,
    stat: Path = Path("/proc/stat"),
    sysfs: Path = cpus.SYSFS,
    sleep: Callable[[float], None] = time.sleep,
) -> Busy:
    """Measure the load of the cores for a moment while this process sleeps."""
    cores = cpus.physical_cores(allowed or os.sched_getaffinity(0), sysfs)
    before = _ticks(stat)
    sleep(WINDOW_S)
    after = _ticks(stat)
    shares = {cpu: _busy_share(before[cpu], after[cpu]) for cpu in before.keys() & after.keys()}
    of_cores = (max(shares.get(cpu, 0.0) for cpu in core) for core in cores)
    return Busy(len(cores), sum(share for share in of_cores if share >= _NOISE))


def choose(
    threads: int,
    environ: MutableMapping[str, str],
    look: Callable[[], Busy] | None,
    quota: float | None = None,
) -> str:
    """Set the wait policy in `environ`, and return its description; "" for OpenMP's default.

    Args:
        threads: torch's threads in the job; 0: not set.
        look: measures the load; None: do not change the policy.
        quota: CPU quota in CPUs; None: no limit.
    """
    if variable := next((name for name in VARIABLES if name in environ), ""):
        return f"waiting as set by {variable}={environ[variable]}"
    if look is None:
        return ""
    load = look()
    most = load.cores if quota is None else max(1, min(load.cores, int(quota)))
    wanted = threads or _first_number(environ.get("OMP_NUM_THREADS", "")) or most
    if wanted <= max(1.0, load.cores - load.busy + _SPARE):
        return ""
    environ["OMP_WAIT_POLICY"] = "passive"
    return f"waiting asleep: {load.busy:.1f} of {load.cores} cores were busy"


def _first_number(text: str) -> int:
    """Return the first number of a list such as "4,2" (threads by nesting depth); 0: none."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _ticks(stat: Path) -> dict[int, tuple[int, int]]:
    """Return (idle, all) ticks since boot for each CPU; waiting for a disk counts as idle."""
    ticks_by_cpu = {}
    for line in stat.read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(field) for field in fields[:8]]  # the later fields are included in these
            ticks_by_cpu[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    return ticks_by_cpu


def _busy_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    idle, every = after[0] - before[0], after[1] - before[1]
    return 1 - idle / every if every > 0 else 0.0
