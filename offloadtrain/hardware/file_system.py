"""The kind of file system that a folder is on, and its free space."""

from __future__ import annotations

import os
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds whose files are in host memory."""

_MOUNTS = Path("/proc/self/mountinfo")


def kind_of(folder: Path, mounts: Path = _MOUNTS) -> str:
    """Return the kind, such as "ext4" or "tmpfs", by the longest mount point above the folder; ""
    where the kernel does not tell."""
    if not mounts.exists():
        return ""
    resolved, best, kind = folder.resolve(), Path(), ""
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        # The kernel writes blanks and backslashes in octal.
        octal = before.split()[4].encode("latin-1", "backslashreplace")
        point = Path(octal.decode("unicode_escape"))
        # Later lines are mounted over earlier ones.
        if resolved.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, after.split()[0]
    return kind


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may write there."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
