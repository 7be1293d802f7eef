"""Prints a log with a record of every kind, each field of which has a value of its own.

    PYTHON record_kinds.py

where PYTHON is that of the checkout whose schema is recorded.
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from itertools import count
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from offloadtrain.events import log_lines, schema

_NUMBERS = count(1)


def value_of(kind: Any) -> Any:
    """Return a value of this type that no other call returns."""
    number = next(_NUMBERS)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return value_of(next(of for of in arguments if of is not NoneType))
    if origin is tuple:
        return (value_of(arguments[0]), value_of(arguments[0]))
    if origin is dict:
        return {f"key {number}": 1 if arguments[1] is Any else value_of(arguments[1])}
    if is_dataclass(kind):
        return filled(kind)
    values = {bool: True, int: number, float: number + 0.5, str: f"text {number}"}
    return values[kind]


def filled(kind: Any) -> Any:
    """Return an instance of a dataclass."""
    kinds = get_type_hints(kind)
    return kind(**{field.name: value_of(kinds[field.name]) for field in fields(kind)})


if __name__ == "__main__":
    for number, kind in enumerate(schema.KINDS.values(), start=1):
        line = log_lines.to_line(filled(kind), number, 1_795_000_000.5 + number, number)
        sys.stdout.write(line.decode())
