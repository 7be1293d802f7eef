"""Was a run killed for memory? The kernel ends it without a word, and counts.

A run notes the counters at its start, in run.json; a reader compares them after its death. The
counter is of the run's cgroup where groups count, otherwise of the machine: "probably" is all that
can be said.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import read_text

_MOST_BYTES = 1 << 16
_PLACES = ("/sys/fs/cgroup/", "/proc/vmstat")
"""run.json is untrusted: no other file is read for it."""


def count(counters: Iterable[Path]) -> dict[str, int]:
    """Return the number of killed processes by file; those that cannot be read are left out."""
    counts = {str(path): _read(path) for path in counters}
    return {path: number for path, number in counts.items() if number is not None}


def risen(at_start: Any) -> bool:
    """Return whether a counter is higher than `at_start`, which `count` has made."""
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
