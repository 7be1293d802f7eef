"""Conversion between TOML text and dataclasses: overrides, strict types, helpful errors.

It does not know the meaning of keys. A problem is a sentence that begins with the dotted key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from math import inf, isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from offloadtrain.boundary.safe_open import read_text
from offloadtrain.config.errors import ConfigError

Table: TypeAlias = dict[str, Any]

_INT_LIMIT = 2**63
_SHOWN_CHARS = 60
_MOST_BYTES = 1 << 20
_MOST_UNKNOWN = 10
_MOST_PARTS = 8
"""Largest number of parts of a dotted key in an override."""

_MOST_MARKS = {"=": 1000, "[": 1000, "{": 1000, ".": 2000}
"""Limits per job: ten times the size of a job with all keys and comments. Time and stack of a TOML
parser grow with the square of a dotted key's length, and every unknown key costs a search."""


@dataclass(slots=True)
class Job:
    """A parsed job: tables of raw values, and the problems found so far.

    Attributes:
        origin: origin of the text, for messages.
        keys: every valid dotted key, to propose the nearest key.
        overridden: dotted keys from `--set`.
    """

    origin: str
    tables: Table
    keys: Sequence[str]
    overridden: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def raise_problems(self) -> None:
        """Raise a ConfigError with every problem so far, if there is one."""
        if self.problems:
            raise ConfigError(*(f"{self._origin_of(text)}: {text}" for text in self.problems))

    def _origin_of(self, problem: str) -> str:
        key = f"{problem.split(' ', 1)[0]}."
        near = (o for o in self.overridden if key.startswith(f"{o}.") or f"{o}.".startswith(key))
        return "--set" if any(near) else self.origin


def read(path: str | Path) -> str:
    """Return the text of a job or machine file.

    Raises:
        ConfigError: if it is not a regular file, cannot be read, or is too large.
    """
    try:
        return read_text(path, max_bytes=_MOST_BYTES, follow_link=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def parse(text: str, origin: str, keys: Sequence[str], overrides: Sequence[str] = ()) -> Job:
    """Parse TOML and apply `section.key=value` overrides; the last override of a key wins.

    Raises:
        ConfigError: if the text is not TOML or is too large, or an override has no key or descends
            into a value.
    """
    _refuse_bombs(text, origin)
    try:
        tables = tomllib.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: this is not valid TOML: {error}") from None
    job = Job(origin, tables, keys)
    for override in overrides:
        _apply(override, job)
    return job


def _refuse_bombs(text: str, origin: str) -> None:
    """Raise ConfigError for a text that would take minutes to parse, or cause megabytes of
    errors."""
    for mark, most in _MOST_MARKS.items():
        if (count := text.count(mark)) > most:
            raise ConfigError(
                f'{origin}: "{mark}" occurs {count} times, and at most {most} are allowed: this is '
                "too large for a job"
            )


def _apply(override: str, job: Job) -> None:
    key, equals, text = override.partition("=")
    _refuse_bombs(text, f"--set {shown_key(key.strip())}")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) > _MOST_PARTS:
        raise ConfigError(
            f"--set {shown(override)}: give section.key=value, for example optim.lr=3e-4"
        )
    table = job.tables
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {shown(override)}: {shown_key(part)} is not a table")
    table[parts[-1]] = _override_value(text.strip())
    job.overridden.add(shown_key(*parts))


def _override_value(text: str) -> Any:
    """Read `text` as a TOML value, or else as a bare string (`cosine`, `/a/path`)."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def shown(value: object) -> str:
    """Return a printable and short form of a value, for messages."""
    try:
        text = str(value).lower() if isinstance(value, bool) else ascii(value)
    except ValueError:  # Python does not print integers with more than 4300 digits
        text = "(a very large number)"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def shown_key(*parts: str) -> str:
    """Return the dotted key as one printable word."""
    return ".".join(part if _is_bare(part) else shown(part).replace(" ", "_") for part in parts)


def _is_bare(part: str) -> bool:
    return part.isascii() and part.replace("_", "").replace("-", "").isalnum()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the nearest known name, or nothing."""
    close = nearest_name(name, known)
    return f"; did you mean {close}?" if close else ""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the nearest known name, or nothing."""
    from difflib import get_close_matches  # slow to import, and needed only for errors

    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else ""


def report_unknown(job: Job, table: Table, known: Sequence[str], name: str = "") -> None:
    """Add a problem for each key of `table`, which is section `name`, that is not in `known`."""
    unknown = [key for key in table if key not in known]
    place = f"in [{name}]" if name else "at the top"
    for key in unknown[:_MOST_UNKNOWN]:
        for dotted, hint in _hints(job, name, key, table[key], known):
            hint = hint and f"; did you mean {hint}?"
            job.problems.append(f"{dotted} is unknown{hint} (known {place}: {', '.join(known)})")
    if (more := len(unknown) - _MOST_UNKNOWN) > 0:
        job.problems.append(f"{name or 'the job'} has {more} more unknown keys")


def _hints(
    job: Job, name: str, key: str, value: Any, known: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield (unknown key, similar valid keys), and the keys of an unknown table that are valid in
    another table."""
    inner = value if isinstance(value, dict) and not name else {}
    moved = [k for k in inner if _elsewhere(job, key, k)][:_MOST_UNKNOWN]
    for moved_key in moved:
        yield shown_key(key, moved_key), " or ".join(_elsewhere(job, key, moved_key))
    if moved:
        return
    places = _elsewhere(job, name, key)
    if not places and (close := nearest_name(key, known)):
        places = [right for right in job.keys if right.endswith(f".{close}")]
        places = places if len(places) > 1 else [close]
    yield shown_key(*filter(None, (name, key))), " or ".join(places)


def _elsewhere(job: Job, section: str, key: str) -> list[str]:
    """Return valid keys with this name, also with the section's name as prefix."""
    return [o for o in job.keys if o.rpartition(".")[2] in (key, f"{section}_{key}")]


def section(job: Job, name: str) -> Table | None:
    """Return a copy of a table of the job, empty if it is missing; None if it is not a table."""
    value = job.tables.get(name, {})
    if isinstance(value, dict):
        return dict(value)
    job.problems.append(f"{name} = {shown(value)} must be a table: [{name}]")
    return None


def read_fields(job: Job, kinds: Mapping[str, Any], table: Table, name: str = "") -> Table:
    """Return the values in `table` of the fields in `kinds`, each of its annotated type."""
    values: Table = {}
    for key, kind in kinds.items():
        if key not in table:
            continue
        try:
            values[key] = converted(kind, table[key])
        except ValueError as error:
            dotted = f"{name}.{key}" if name else key
            job.problems.append(f"{dotted} = {shown(table[key])} must be {error}")
    return values


def read_table(
    job: Job, kinds: Mapping[str, Any], table: Table, name: str = "", others: Sequence[str] = ()
) -> Table:
    """Return the values of a table with the keys `kinds`. The keys `others` are read elsewhere; see
    `read_fields`."""
    report_unknown(job, table, [*kinds, *others], name)
    return read_fields(job, kinds, table, name)


def field_kinds(cls: type) -> dict[str, Any]:
    """Return the annotated type of each field of a dataclass, in order."""
    return get_type_hints(cls)


def missing_fields(cls: type, present: Container[str]) -> list[str]:
    """Return the fields of dataclass `cls` that have no default and are not in `present`."""
    return [f.name for f in fields(cls) if f.default is MISSING and f.name not in present]


def converted(kind: Any, value: Any) -> Any:
    """Return `value` converted to the annotated type. Conversion is strict: an int does not accept
    a bool; a float accepts an int.

    Raises:
        ValueError: if the value has another type; the message describes the accepted type.
    """
    if get_origin(kind) in (UnionType, Union):  # TOML has no null: None is omitted
        # A table selects a Mapping and a string a Literal, if the union has such a type; otherwise
        # the first type is used.
        special: dict[type, Any] = {dict: Mapping, str: Literal}
        of_value = special.get(type(value))
        fits = [option for option in get_args(kind) if get_origin(option) is of_value is not None]
        kind = (fits or get_args(kind))[0]
    if get_origin(kind) is Literal:
        return _one_of(get_args(kind), value)
    if get_origin(kind) is tuple:
        return _tuple_of(get_args(kind), value)
    if get_origin(kind) is Mapping:
        return {key: converted(get_args(kind)[1], item) for key, item in value.items()}
    if kind is float:
        return _float(value)
    if kind is int:
        return _int(value)
    if type(value) is not kind:
        raise ValueError({str: "a string, in quotes", bool: "true or false"}[kind])
    if kind is str and any(0xD800 <= ord(char) < 0xE000 for char in value):
        raise ValueError("valid UTF-8")  # an argument of the command line may have any bytes
    return value


def _one_of(choices: tuple[str, ...], value: Any) -> Any:
    if not isinstance(value, str) or value not in choices:
        hint = nearest(value, choices) if isinstance(value, str) else ""
        raise ValueError(f"one of {', '.join(choices)}{hint}")
    return value


def _tuple_of(kinds: tuple[Any, ...], value: Any) -> Any:
    if kinds[1:] == (...,):
        of = int if kinds[0] is int else str  # or a choice of strings
        if not isinstance(value, list) or not all(type(item) is of for item in value):
            raise ValueError("a list of " + ("whole numbers" if of is int else "strings"))
        kinds = kinds[:1] * len(value)
    if not isinstance(value, list) or len(value) != len(kinds):
        raise ValueError(f"a list of {len(kinds)} numbers")
    return tuple(converted(kind, item) for kind, item in zip(kinds, value, strict=True))


def _float(value: Any) -> float:
    try:
        number = float(value) if type(value) in (int, float) else inf
    except OverflowError:
        number = inf
    if not isfinite(number):
        raise ValueError("a finite number")
    return number


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("a whole number")
    if not -_INT_LIMIT <= value < _INT_LIMIT:
        raise ValueError("a whole number of at most 64 bits")
    return value


def emit(tables: Mapping[str, Any]) -> str:
    """Return TOML that parses back to `tables`: plain values first, then one section per table.

    Values are bool, int, finite float, str, and lists, tuples or tables of them; keys are bare.
    """
    plain = [f"{key} = {text_of(v)}" for key, v in tables.items() if not isinstance(v, Mapping)]
    lines = ["\n".join(plain)] if plain else []
    for name, table in tables.items():
        if isinstance(table, Mapping):
            lines.append(
                "\n".join([f"[{name}]", *(f"{k} = {text_of(v)}" for k, v in table.items())])
            )
    return "\n\n".join(lines) + "\n"


def text_of(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text_of, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {text_of(item)}' for key, item in value.items())}}}"
    return repr(value)


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
