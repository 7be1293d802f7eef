"""The progress of a start before its log begins, in a small file of the run folder.

A log begins when data, model and memory are ready: until then a start may be refused. Rank 0
replaces `set_up.json` while it sets up, and removes it when its log has begun or the start is
refused. If the process is killed, the file stays and names its last phase.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import read_json
from offloadtrain.boundary.safe_write import replace_file

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
    values: Any = None
    with suppress(OSError, ValueError):
        values = read_json(folder / FILE, max_bytes=_MOST_BYTES)
    if not isinstance(values, dict):
        return None
    fields = {name: values.get(name) for name in _FIELDS}
    if not all(is_one(fields[name]) for name, is_one in _FIELDS.items()):
        return None
    return SetUpNow(**fields)  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e11  # type: ignore[operator]


_FIELDS: dict[str, Callable[[object], bool]] = {
    "pid": _is_count,
    "pid_start_ticks": _is_count,
    "host": lambda value: isinstance(value, str),
    "since_s": _is_time,
    "time_s": _is_time,
    "phase": lambda value: isinstance(value, str),
    "part": lambda value: isinstance(value, str),
    "done_bytes": _is_count,
    "total_bytes": _is_count,
    "oom_kills": lambda value: isinstance(value, dict),
}
