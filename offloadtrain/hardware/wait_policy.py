"""How torch's threads wait for each other; chosen once, before torch is loaded.

[Note: Waiting]
torch cuts each operation into as many parts as it has threads, thousands of times per step, and
whoever is done first waits for the others. OpenMP lets it spin for milliseconds, which is the
fastest where each thread has a core of its own. Where another program has one of the cores, the
thread that shares it is late each time, and the others burn the time that it needs. Asleep they
leave it. So the cores are looked at before the run, and where there are fewer idle ones than
threads these wait asleep (OMP_WAIT_POLICY, which OpenMP reads once, when it is loaded). The number
of threads stays, since bits depend on it: two runs of a job are the same on a busy machine too.
What comes later only slows the run down, and raises the alert "slower".

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
"""What a user says wins."""
_NOISE, _SPARE = 0.1, 1 / 3
"""Shares of a core: less is no program; so much may be missing."""


@dataclass(frozen=True, slots=True)
class Busy:
    """`cores`: physical, that this process may use; `busy`: how many of them others use."""

    cores: int
    busy: float


def look(
    allowed: Collection[int] | None = None,
    *,
    stat: Path = Path("/proc/stat"),
    sysfs: Path = cpus.SYSFS,
    sleep: Callable[[float], None] = time.sleep,
) -> Busy:
    """See for a moment what the cores do while this process sleeps."""
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
    """Set how to wait in `environ`, and return words for it; "" where it is as OpenMP does.

    Args:
        threads: of torch, as the job says; 0: it does not.
        look: None: choose nothing.
        quota: CPUs' worth of time that bounds them; None: no limit.
    """
    if said := next((name for name in VARIABLES if name in environ), ""):
        return f"waiting as {said}={environ[said]} says"
    if look is None:
        return ""
    found = look()
    most = found.cores if quota is None else max(1, min(found.cores, int(quota)))
    wanted = threads or _first_number(environ.get("OMP_NUM_THREADS", "")) or most
    if wanted <= max(1.0, found.cores - found.busy + _SPARE):
        return ""
    environ["OMP_WAIT_POLICY"] = "passive"
    return f"waiting asleep: {found.busy:.1f} of {found.cores} cores were busy"


def _first_number(text: str) -> int:
    """Of "4,2", threads by depth of nesting; 0 where there is none."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _ticks(stat: Path) -> dict[int, tuple[int, int]]:
    """CPU → (idle, all) ticks since boot; waiting for a disk is idle."""
    found = {}
    for line in stat.read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(field) for field in fields[:8]]  # what follows is counted in these
            found[int(name[3:])] = (ticks[3] + ticks[4], sum(ticks))
    return found


def _busy_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    idle, every = after[0] - before[0], after[1] - before[1]
    return 1 - idle / every if every > 0 else 0.0
