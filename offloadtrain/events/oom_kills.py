"""Detects whether a run was killed for lack of memory, which the kernel only counts.

A run records the counters in run.json at its start; a reader compares them after its death. The
counter is that of the run's cgroup if it has one, otherwise of the machine, so the answer is only
"probably".
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import read_text

_MOST_BYTES = 1 << 16
_PLACES = ("/sys/fs/cgroup/", "/proc/vmstat")
"""Allowed prefixes: run.json is untrusted, and must not name other files."""


def count(counters: Iterable[Path]) -> dict[str, int]:
    """Return counter file → number of killed processes; unreadable files are left out."""
    counts = {str(path): _read(path) for path in counters}
    return {path: number for path, number in counts.items() if number is not None}


def risen(at_start: Any) -> bool:
    """Return True if a counter is higher than in `at_start`, a result of `count`."""
    if not isinstance(at_start, dict):
        return False
    return any(
        isinstance(before, int) and (now := _read(Path(path))) is not None and now > before
        for path, before in at_start.items()
        if path.startswith(_PLACES) and ".." not in path
    )


def _read(path: Path) -> int | None:
    try:
        lines = read_text(path, max_bytes=_MOST_BYTES).splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError, IndexError):
        return None
