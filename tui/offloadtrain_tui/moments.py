"""The event list: what a record says, in a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offloadtrain.events import schema
from offloadtrain.events.schema import Record
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
    tell = _TOLD.get(type(record.event))
    if tell is None:
        return None
    level, text = tell(record.event)
    if not text:
        return None
    step = getattr(record.event, "step", None)
    kind = record.event.KIND
    return Moment(record.time_s, step, kind, level, clean(text), record.rank, line)


def _told_start(event: schema.RunStarted) -> tuple[str, str]:
    what = "started" if not event.start_step else f"resumes after step {event.start_step}"
    return "good", f"{event.name} {what}, pid {event.pid}"


def _told_end(event: schema.RunEnded) -> tuple[str, str]:
    level = {"done": "good", "stopped": "warning"}.get(event.status, "error")
    return level, f"{event.status} at step {event.step}" + (
        f": {event.message}" if event.message else ""
    )


def _told_checkpoint(event: schema.Checkpoint) -> tuple[str, str]:
    return "error" if event.state == "failed" else "good", f"{event.state} {event.path}"


def _told_alert(event: schema.Alert) -> tuple[str, str]:
    if event.state == "cleared":
        return "good", f"{event.code} is over: {event.message}"
    return event.level, f"{event.code}: {event.message}"


def _told_control(event: schema.Control) -> tuple[str, str]:
    level = {"done": "good", "refused": "error"}.get(event.state, "info")
    return level, f"{event.action} {event.state}" + (f": {event.message}" if event.message else "")


_TOLD: dict[type, Callable[[Any], tuple[str, str]]] = {
    schema.RunStarted: _told_start,
    schema.RunEnded: _told_end,
    schema.Checkpoint: _told_checkpoint,
    schema.Alert: _told_alert,
    schema.Control: _told_control,
    schema.Warning_: lambda event: ("warning", f"{event.code}: {event.message}"),
    schema.Eval: lambda event: ("info", f"validation loss {event.val_loss:.4f}"),
    schema.PlanCompared: lambda event: ("info", event.message),
    schema.Sample: lambda event: ("info", f"sample: {event.prompt}{event.text}"),
}
