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


def _describe_start(event: schema.RunStarted) -> tuple[str, str]:
    what = "started" if not event.start_step else f"resumes after step {event.start_step}"
    return "good", f"{event.name} {what}, pid {event.pid}"


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
    until_s = now.time_s if is_over else now_s
    spent = units.format_duration(max(until_s - now.since_s, 1.0))
    progress = _set_up_now(now)
    return (
        f"set-up, last seen after {spent}: {progress}"
        if is_over
        else (f"setting up: {progress}, {spent} so far")
    )


def _set_up_now(now: SetUpNow) -> str:
    """Return, for example, "page-locking host memory 25% (30.0 GiB of 118.0 GiB)"."""
    if not now.part:
        return clean(now.phase, 100)
    done, total = units.format_bytes(now.done_bytes), units.format_bytes(now.total_bytes)
    share = 100 * now.done_bytes // now.total_bytes if now.total_bytes else 100
    return f"{clean(now.part, 60)} {share}% ({done} of {total})"


def _describe_end(event: schema.RunEnded) -> tuple[str, str]:
    level = {"done": "good", "stopped": "warning"}.get(event.status, "error")
    return level, f"{event.status} at step {event.step}" + (
        f": {event.message}" if event.message else ""
    )


def _describe_checkpoint(event: schema.Checkpoint) -> tuple[str, str]:
    return "error" if event.state == "failed" else "good", f"{event.state} {event.path}"


def _describe_alert(event: schema.Alert) -> tuple[str, str]:
    if event.state == "cleared":
        return "good", f"{event.code} is over: {event.message}"
    return event.level, f"{event.code}: {event.message}"


def _describe_control(event: schema.Control) -> tuple[str, str]:
    level = {"done": "good", "refused": "error"}.get(event.state, "info")
    return level, f"{event.action} {event.state}" + (f": {event.message}" if event.message else "")


_DESCRIBE: dict[type, Callable[[Any], tuple[str, str]]] = {
    schema.RunStarted: _describe_start,
    schema.SetUp: lambda event: ("info", set_up_words(event)),
    schema.RunEnded: _describe_end,
    schema.Checkpoint: _describe_checkpoint,
    schema.Alert: _describe_alert,
    schema.Control: _describe_control,
    schema.Warning_: lambda event: ("warning", f"{event.code}: {event.message}"),
    schema.Eval: lambda event: ("info", f"validation loss {event.val_loss:.4f}"),
    schema.PlanCompared: lambda event: ("info", event.message),
    schema.Sample: lambda event: ("info", f"sample: {event.prompt}{event.text}"),
}
