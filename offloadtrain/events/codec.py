"""Frozen dataclasses of plain fields to JSON and back, strict in types and lenient about keys.

Fields are str, int, float, bool, dict (plain JSON data), dataclasses, `tuple[T, ...]` of those, and
`T | None`. A non-finite float is written as the string "nan", "inf" or "-inf", because JSON has no
number for it, and a field annotated `float` is read back from that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints


def encode(values: dict[str, Any]) -> bytes:
    """Return compact JSON, ASCII only and on one line; objects that JSON lacks become strings.

    Raises:
        TypeError: a dict has a key that is no string.
        ValueError, RecursionError: a value holds itself, or is very deep.
    """
    try:
        return _dumps(values)
    except ValueError:
        return _dumps(_finite(values))


def decode(cls: type, values: Any) -> Any:
    """Return the dataclass from parsed JSON; keys it lacks are ignored, defaults fill the rest.

    Raises:
        TypeError: a value is of another type than annotated, or is missing without a default.
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
    """Return a copy in which non-finite floats are strings."""
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
    """Return the function that reads parsed JSON as the annotated type `kind`."""
    if kind is float:
        return _float
    if get_origin(kind) is UnionType:
        some = _decoder(get_args(kind)[0])
        return lambda value: None if value is None else some(value)
    if get_origin(kind) is tuple:
        item = _decoder(get_args(kind)[0])
        return lambda value: tuple(map(item, _exactly(list, value)))
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
