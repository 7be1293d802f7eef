"""The event list: each record as a line of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offloadtrain.config import units
from offloadtrain.events import schema
from offloadtrain.events.log_lines import Record
from offloadtrain.events.set_up_file import SetUpNow
from offloadtrain_tui.text import clean


@dataclass(frozen=True, slots=True)
class Moment:
    """A line of the event list.

    Attributes:
        level: "info", "good", "warning" or "error".
        raw: the record's line in the log.
    """

    time_s: float
    step: int | None
    kind: str
    level: str
    text: str
    rank: int = 0
    raw: bytes = b""


def moment_of(record: Record, line: bytes) -> Moment | None:
    """Return the line of the event list for a record, if any."""
    describe = _DESCRIBE.get(type(record.event))
    if describe is None:
        return None
    level, text = describe(record.event)
    if not text:
        return None
    step = getattr(record.event, "step", None)
    kind = record.event.KIND
    return Moment(record.time_s, step, kind, level, clean(text), record.rank, line)


def set_up_words(event: schema.SetUp) -> str:
    """Return, for example, "set up in 1m32s (reading weights 40 s, page-locking memory 22 s)"."""
    longest = sorted(event.parts_s.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{clean(what, 60)} {units.format_seconds(s)}" for what, s in longest)
    text = f"set up in {units.format_duration(event.duration_s)}"
    return f"{text} ({parts})" if parts else text


def set_up_line(now: SetUpNow, now_s: float, *, is_over: bool) -> str:
    """Return, for example, "setting up: reading weights 40% (10.4 GiB of 26.0 GiB), 1m02s so far".

    Args:
        is_over: its process has died, or is not heard of.
    """
    spent = units.format_duration(max((now.time_s if is_over else now_s) - now.since_s, 1.0))
    progress = clean(now.phase, 100)
    if now.part:
        done, total = units.format_bytes(now.done_bytes), units.format_bytes(now.total_bytes)
        share = 100 * now.done_bytes // now.total_bytes if now.total_bytes else 100
        progress = f"{clean(now.part, 60)} {share}% ({done} of {total})"
    if is_over:
        return f"set-up, last seen after {spent}: {progress}"
    return f"setting up: {progress}, {spent} so far"


def _with_message(text: str, message: str) -> str:
    return f"{text}: {message}" if message else text


_DESCRIBE: dict[type, Callable[[Any], tuple[str, str]]] = {
    schema.RunStarted: lambda event: (
        "good",
        f"{event.name} "
        + (f"resumes after step {event.start_step}" if event.start_step else "started")
        + f", pid {event.pid}",
    ),
    schema.SetUp: lambda event: ("info", set_up_words(event)),
    schema.RunEnded: lambda event: (
        {"done": "good", "stopped": "warning"}.get(event.status, "error"),
        _with_message(f"{event.status} at step {event.step}", event.message),
    ),
    schema.Checkpoint: lambda event: (
        "error" if event.state == "failed" else "good",
        f"{event.state} {event.path.rpartition('/')[2]}",
    ),
    schema.Alert: lambda event: (
        ("good", f"{event.code} is over: {event.message}")
        if event.state == "cleared"
        else (event.level, f"{event.code}: {event.message}")
    ),
    schema.Control: lambda event: (
        {"done": "good", "refused": "error"}.get(event.state, "info"),
        _with_message(f"{event.action} {event.state}", event.message),
    ),
    schema.Warning_: lambda event: ("warning", f"{event.code}: {event.message}"),
    schema.Eval: lambda event: ("info", f"validation loss {event.val_loss:.4f}"),
    schema.PlanCompared: lambda event: ("info", event.message),
    schema.Decided: lambda event: ("info", event.message),
    schema.Sample: lambda event: ("info", f"sample: {event.prompt}{event.text}"),
}
"""Kind of a record → (level, text) of its line."""
