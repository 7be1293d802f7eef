"""Converts events and their envelopes to lines of the run log, and back.

Events are frozen dataclasses, strict in types and lenient about keys. Fields are str, int, float,
bool, dict (plain JSON data), dataclasses, `tuple[T, ...]` of those, and `T | None`. A non-finite
float is written as the string "nan", "inf" or "-inf", because JSON has no number for it; a
field annotated `float` accepts these strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from offloadtrain.boundary.safe_open import bounded_lines, open_regular
from offloadtrain.events.schema import KINDS, SCHEMA, Event

LONGEST_LINE = 1 << 22
"""Maximum bytes of a record; longer lines are not records."""


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
        TypeError: a dict in the event has a key that is not a string.
        ValueError, RecursionError: a dict in the event contains itself, or is nested too deeply.
    """
    envelope = {"v": SCHEMA, "k": event.KIND, "t": time_s, "m": monotonic_ns, "r": rank}
    return encode(envelope | as_dict(event)) + b"\n"


def from_line(line: bytes | str) -> Record | None:
    """Return the record; None for a torn or foreign line, and for a kind of a later version."""
    try:
        return from_values(json.loads(line))
    except (ValueError, RecursionError):
        return None


def from_values(values: Any) -> Record | None:
    """Convert parsed JSON; see `from_line`."""
    try:
        return Record(
            decode(KINDS[values["k"]], values),
            rank=_exactly(int, values["r"]),
            time_s=_float(values["t"]),
            monotonic_ns=_exactly(int, values.get("m", 0)),
            version=_exactly(int, values["v"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def read(path: str | Path) -> Iterator[Record]:
    """Yield the records of a log, in the order written; unreadable lines are skipped.

    Raises:
        UnsafeFileError, OSError: it is not a regular file, or cannot be read.
    """
    with open_regular(path) as log:
        for line, length in bounded_lines(log, LONGEST_LINE):
            if length <= LONGEST_LINE and (record := from_line(line)):
                yield record


# ---- dataclasses to JSON and back


def encode(values: dict[str, Any]) -> bytes:
    """Return compact JSON in ASCII on one line; objects without a JSON type become strings.

    Raises:
        TypeError: a dict has a key that is not a string.
        ValueError, RecursionError: a value contains itself, or is nested too deeply.
    """
    try:
        return _dumps(values)
    except ValueError:
        return _dumps(_finite(values))


def decode(cls: type, values: Any) -> Any:
    """Return the dataclass from parsed JSON; unknown keys are ignored, missing ones have defaults.

    Raises:
        TypeError: a value does not have the annotated type, or is missing without a default.
    """
    _exactly(dict, values)
    decoders = _field_decoders(cls)
    return cls(**{name: decode(values[name]) for name, decode in decoders if name in values})


def as_dict(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, one level deep and not copied."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _dumps(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), default=_plain, allow_nan=False).encode()


def _plain(value: Any) -> Any:
    return as_dict(value) if is_dataclass(value) else str(value)


def _finite(value: Any) -> Any:
    """Return a copy with non-finite floats as strings."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return _finite(as_dict(value)) if is_dataclass(value) else value


@cache
def _field_decoders(cls: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    kinds = get_type_hints(cls)
    return tuple((f.name, _decoder(kinds[f.name])) for f in fields(cls))


def _decoder(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts parsed JSON to the annotated type `kind`."""
    if kind is float:
        return _float
    if get_origin(kind) is UnionType:
        some = _decoder(get_args(kind)[0])
        return lambda value: None if value is None else some(value)
    if get_origin(kind) is tuple:
        item = _decoder(get_args(kind)[0])
        return lambda value: tuple(map(item, _exactly(list, value)))
    if get_origin(kind) is dict and get_args(kind)[1] is not Any:
        item = _decoder(get_args(kind)[1])
        return lambda value: {key: item(x) for key, x in _exactly(dict, value).items()}
    plain: Any = get_origin(kind) or kind
    if is_dataclass(plain):
        return lambda value: decode(cast(type, plain), value)
    return lambda value: _exactly(plain, value)


def _float(value: Any) -> float:
    if type(value) is float or type(value) is int or value in ("nan", "inf", "-inf"):
        return float(value)
    raise TypeError(f"{value!r} is not a number")


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is kind:
        return value
    raise TypeError(f"{value!r} is not of type {kind.__name__}")
