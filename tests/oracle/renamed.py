"""New names for what was recorded under others.

A refactoring that only renames operations and buffers leaves the recorded programs as they are. It
says here which name each new one had when the programs were recorded. An entry stands for its name
and for every name that continues after it with a space, a bracket or a colon: `"grad": "gradient"`
compares "grad layers.0" with "gradient layers.0". If several entries fit, the longest one counts.
Two names must not become one.

To record the new names, check that `python -m tests.oracle.record` prints no difference, empty both
tables, and record again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from offloadtrain.step.proof.recording import Bytes, Entry, Launched, Opened, Undefined

OPERATIONS: dict[str, str] = {}
"""Name now → name in the recorded programs."""
BUFFERS: dict[str, str] = {}
"""The same of memory."""


class RenameError(Exception):
    """Two names became one: the recorded programs would not tell them apart."""


def as_recorded(
    program: Iterable[Entry],
    operations: Mapping[str, str] | None = None,
    buffers: Mapping[str, str] | None = None,
) -> list[Entry]:
    """Return the program with the names that were recorded.

    Args:
        operations, buffers: None: the tables of this module.

    Raises:
        RenameError: two names became one.
    """
    operation = Names(OPERATIONS if operations is None else operations)
    buffer = Names(BUFFERS if buffers is None else buffers)

    def bytes_of(each: Bytes) -> Bytes:
        return replace(each, name=buffer.before(each.name))

    def entry_of(entry: Entry) -> Entry:
        match entry:
            case Launched() | Opened():
                reads, writes = (tuple(map(bytes_of, b)) for b in (entry.reads, entry.writes))
                name = operation.before(entry.name)
                return replace(entry, name=name, reads=reads, writes=writes)
            case Undefined(bytes_):
                return Undefined(bytes_of(bytes_))
            case _:
                return entry

    return [entry_of(entry) for entry in program]


class Names:
    def __init__(self, table: Mapping[str, str]) -> None:
        self._table = dict(sorted(table.items(), key=lambda item: -len(item[0])))
        self._before: dict[str, str] = {}
        self._now: dict[str, str] = {}

    def before(self, name: str) -> str:
        """Return the name that was recorded."""
        if name not in self._before:
            before = self._before[name] = self._look_up(name)
            if (other := self._now.setdefault(before, name)) != name:
                raise RenameError(f"'{name}' and '{other}' were both recorded as '{before}'")
        return self._before[name]

    def _look_up(self, name: str) -> str:
        for now, before in self._table.items():
            rest = name.removeprefix(now)
            if name.startswith(now) and (not rest or rest[0] in " [:"):
                return before + rest
        return name
