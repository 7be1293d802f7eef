"""Control groups: the folders whose limits bind this process."""

from __future__ import annotations

from pathlib import Path

MOUNT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def folders(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> list[Path]:
    """Return this process's folder of the unified hierarchy (v2) and its ancestors, its own
    first."""
    relative = _paths(membership).get("", "/")
    return _with_ancestors(mount, relative)


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Return the CPU quota of this process and its ancestors, in CPUs; None: no limit."""
    found = [_quota_v2(folder) for folder in folders(mount, membership)]
    for controllers, relative in _paths(membership).items():
        if "cpu" in controllers.split(","):
            found += [_quota_v1(f) for f in _with_ancestors(mount / controllers, relative)]
    return min((quota for quota in found if quota is not None), default=None)


def _paths(membership: Path) -> dict[str, str]:
    """Return controllers → path; the unified hierarchy has the empty name."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    fields = (line.split(":", 2) for line in lines)
    return {controllers: path for _, controllers, path in fields}


def _with_ancestors(mount: Path, relative: str) -> list[Path]:
    folder = mount / relative.lstrip("/")
    return [f for f in (folder, *folder.parents) if f.is_relative_to(mount)]


def _quota_v2(folder: Path) -> float | None:
    file = folder / "cpu.max"
    if not file.exists():  # the root group has none
        return None
    limit, _, period = file.read_text().strip().partition(" ")
    if not (limit.isdecimal() and period.isdecimal() and int(period)):  # "max 100000"
        return None
    return int(limit) / int(period)


def _quota_v1(folder: Path) -> float | None:
    limit, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    if not (limit.exists() and period.exists()):
        return None
    quota = int(limit.read_text())
    return None if quota <= 0 else quota / int(period.read_text())
