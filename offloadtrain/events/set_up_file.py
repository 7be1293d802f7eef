"""The progress of a start before its log begins, in a small file of the run folder.

A log begins when data, model and memory are ready: until then a start may be refused. Rank 0
replaces `set_up.json` while it sets up, and removes it when its log has begun or the start is
refused. If the process is killed, the file stays and names its last phase.
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
    """One moment of a set-up.

    Attributes:
        since_s, time_s: its beginning and this moment, Unix seconds.
        phase: the current activity.
        part: the current part of the phase; "": not known.
        oom_kills: counters at the beginning, as `oom_kills.count` has read them.
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
    """Replace the file.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(folder / FILE, json.dumps({"v": _VERSION, **asdict(now)}) + "\n")


def remove(folder: Path) -> None:
    (folder / FILE).unlink(missing_ok=True)


def read(folder: Path) -> SetUpNow | None:
    """Return the content of the file; None: the file is missing or invalid."""
    # A number that is too large for a float is an ArithmeticError.
    with suppress(OSError, ValueError, TypeError, ArithmeticError):
        now: SetUpNow = decode(SetUpNow, read_json(folder / FILE, max_bytes=_MOST_BYTES))
        counts = (now.pid, now.pid_start_ticks, now.done_bytes, now.total_bytes)
        times_s = (now.since_s, now.time_s)
        if all(0 <= count < 1 << 62 for count in counts) and all(0 <= t < 1e11 for t in times_s):
            return now
    return None
