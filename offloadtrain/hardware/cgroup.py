"""Control groups: the folders with the limits of this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MOUNT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folders(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> list[Path]:
    """Return this process's folder of the unified hierarchy (v2) and its ancestors, starting with
    its own folder."""
    relative = _paths(membership).get("", "/")
    return _with_ancestors(mount, relative)


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Return the CPU quota of this process and its ancestors, in CPUs; None: no limit."""
    v2 = (_text(folder / "cpu.max").partition(" ")[::2] for folder in folders(mount, membership))
    v1 = (
        (_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))
        for folder in _v1_folders("cpu", mount, membership)
    )
    # "max", -1 or an empty file: no limit.
    limits = (pair for pair in (*v2, *v1) if all(text.isdecimal() and int(text) for text in pair))
    return min((int(quota) / int(period) for quota, period in limits), default=None)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A memory limit of one level.

    Attributes:
        file: the file with the limit.
        free_bytes: bytes below the limit, including page cache that the kernel can drop.
    """

    file: Path
    num_bytes: int
    free_bytes: int


def memory_limits(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> list[MemoryLimit]:
    """Return the memory limits of this process's groups and their ancestors, in both versions."""
    v2 = (_memory_limit(folder, *_V2_MEMORY) for folder in folders(mount, membership))
    v1 = (_memory_limit(f, *_V1_MEMORY) for f in _v1_folders("memory", mount, membership))
    return [limit for limit in (*v2, *v1) if limit is not None]


def oom_counters(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> list[Path]:
    """Return the files that count processes killed for memory: the files of this process's group,
    or the machine's file if groups do not count."""
    v2 = [folder / "memory.events" for folder in folders(mount, membership)[:1]]
    v1 = [folder / "memory.oom_control" for folder in _v1_folders("memory", mount, membership)[:1]]
    return [file for file in (*v2, *v1) if file.exists()] or [Path("/proc/vmstat")]


_V2_MEMORY = ("memory.max", "memory.current", "inactive_file")
_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NO_LIMIT = 1 << 62


def _v1_folders(controller: str, mount: Path, membership: Path) -> list[Path]:
    """Return this process's folder of a controller and its ancestors, starting with its own
    folder."""
    for controllers, relative in _paths(membership).items():
        if controller in controllers.split(","):
            return _with_ancestors(mount / controllers, relative)
    return []


def _memory_limit(folder: Path, limit: str, usage: str, reclaimable: str) -> MemoryLimit | None:
    text = _text(folder / limit)
    if not text.isdecimal() or (num_bytes := int(text)) >= _NO_LIMIT:  # "max", or none
        return None
    pairs = (line.split() for line in _text(folder / "memory.stat").splitlines())
    cache = int(dict(pair for pair in pairs if len(pair) == 2).get(reclaimable, 0))
    return MemoryLimit(
        folder / limit, num_bytes, num_bytes - int(_text(folder / usage) or 0) + cache
    )


def _text(file: Path) -> str:
    """Return the text of a file; "" in the root group, which has no such files."""
    return file.read_text().strip() if file.exists() else ""


def _paths(membership: Path) -> dict[str, str]:
    """Return the path of each list of controllers; the unified hierarchy has the empty name."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    fields = (line.split(":", 2) for line in lines)
    return {controllers: path for _, controllers, path in fields}


def _with_ancestors(mount: Path, relative: str) -> list[Path]:
    folder = mount / relative.lstrip("/")
    return [f for f in (folder, *folder.parents) if f.is_relative_to(mount)]
