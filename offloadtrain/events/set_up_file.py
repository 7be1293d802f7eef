"""The progress of a start before its log begins, in a small file of the run folder.

A log begins when data, model and memory are ready: until then a start may fail. Rank 0
replaces `set_up.json` during the set-up, and removes it when its log has begun or the start has
failed. If the process is killed, the file stays and names its last phase.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from offloadtrain.boundary.safe_open import read_json
from offloadtrain.boundary.safe_write import replace_file
from offloadtrain.events.log_lines import decode

FILE = "set_up.json"
_VERSION = 1
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUpNow:
    """State of a set-up at one moment.

    Attributes:
        since_s, time_s: start of the set-up and this moment, Unix seconds.
        phase: the current activity.
        part: the current part of the phase; "" if unknown.
        oom_kills: counters at the start, as returned by `oom_kills.count`.
    """

    pid: int
    pid_start_ticks: int
    host: str
    since_s: float
    time_s: float
    phase: str
    part: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    oom_kills: dict[str, int] = field(default_factory=dict)


def write(folder: Path, now: SetUpNow) -> None:
    """Replace the file atomically.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(folder / FILE, json.dumps({"v": _VERSION, **asdict(now)}) + "\n")


def remove(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def read(folder: Path) -> SetUpNow | None:
    """Return the content of the file; None if it is missing or invalid."""
    # ArithmeticError: a number is too large for a float.
    with suppress(OSError, ValueError, TypeError, ArithmeticError):
        now: SetUpNow = decode(SetUpNow, read_json(folder / FILE, max_bytes=_MOST_BYTES))
        counts = (now.pid, now.pid_start_ticks, now.done_bytes, now.total_bytes)
        times_s = (now.since_s, now.time_s)
        if all(0 <= count < 1 << 62 for count in counts) and all(0 <= t < 1e11 for t in times_s):
            return now
    return None
