"""Lines of the run log: events in their envelopes, written and read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offloadtrain.boundary.safe_open import bounded_lines, open_regular
from offloadtrain.events import codec
from offloadtrain.events.schema import KINDS, SCHEMA, Event

LONGEST_LINE = 1 << 22
"""Bytes of a record; longer lines are no records."""


@dataclass(frozen=True, slots=True)
class Record:
    """An event and its envelope."""

    event: Event
    rank: int
    time_s: float
    monotonic_ns: int = 0
    version: int = SCHEMA


def to_line(event: Event, rank: int, time_s: float, monotonic_ns: int = 0) -> bytes:
    """Return the record as one line of ASCII, newline included.

    Raises:
        TypeError: a dict in the event has a key that is no string.
        ValueError, RecursionError: a dict in the event holds itself, or is very deep.
    """
    envelope = {"v": SCHEMA, "k": event.KIND, "t": time_s, "m": monotonic_ns, "r": rank}
    return codec.encode(envelope | codec.as_dict(event)) + b"\n"


def from_line(line: bytes | str) -> Record | None:
    """Return the record, or None for a torn or foreign line and for a kind of a later version."""
    try:
        return from_values(json.loads(line))
    except (ValueError, RecursionError):
        return None


def from_values(values: Any) -> Record | None:
    """Convert parsed JSON; see `from_line`."""
    try:
        event: Event = codec.decode(KINDS[values["k"]], values)
        envelope: _Envelope = codec.decode(_Envelope, values)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return Record(event, envelope.r, envelope.t, envelope.m, envelope.v)


@dataclass(frozen=True, slots=True)
class _Envelope:
    v: int
    t: float
    r: int
    m: int = 0


def read(path: str | Path) -> Iterator[Record]:
    """Yield the records of a log, in the order written; unreadable lines are skipped.

    Raises:
        UnsafeFileError, OSError: it is no regular file, or cannot be read.
    """
    with open_regular(path) as log:
        for line, length in bounded_lines(log, LONGEST_LINE):
            if length <= LONGEST_LINE and (record := from_line(line)):
                yield record
