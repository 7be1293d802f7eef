"""The memory the host has left for this process, or is stated to have."""

from __future__ import annotations

import os
from pathlib import Path

from offloadtrain.config.errors import HostMemoryError
from offloadtrain.config.units import parse_bytes
from offloadtrain.hardware import cgroup

HOST_MEMORY_VARIABLE = "OFFLOADTRAIN_HOST_MEMORY"


def available_bytes() -> int:
    """Return the available host memory: the kernel's estimate, or the stated size minus this
    process's memory; capped by the cgroup's limit."""
    stated = stated_bytes()
    free = _meminfo_available() if stated is None else max(stated - _held_bytes(), 0)
    return min(free, _cgroup_available(Path("/sys/fs/cgroup")))


def stated_bytes() -> int | None:
    """Return the host's memory stated in OFFLOADTRAIN_HOST_MEMORY; None: not set.

    It is for virtual machines whose memory grows on demand: the kernel knows the current size only.

    Raises:
        HostMemoryError: it is not a size.
    """
    text = os.environ.get(HOST_MEMORY_VARIABLE, "")
    if not text:
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise HostMemoryError(f"{HOST_MEMORY_VARIABLE}: {error}") from None


def _held_bytes() -> int:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise HostMemoryError("/proc/meminfo has no MemAvailable: Linux 3.14 or newer is needed")


def _cgroup_available(mount: Path) -> int:
    """Return memory.max - memory.current + reclaimable cache, the least of this cgroup and its
    ancestors."""
    unlimited = 1 << 62
    return min([_cgroup_room(folder) for folder in cgroup.folders(mount)] or [unlimited])


def _cgroup_room(folder: Path) -> int:
    unlimited = 1 << 62
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return unlimited
        current = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:  # the root cgroup and cgroup v1 have no such files
        return unlimited
    return int(limit) - current + int(stat.get("inactive_file", 0))
