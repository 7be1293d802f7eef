"""Options and keys of a job, each declared once as a field with its type, default and range.

`option` declares an option of `offload()` with its docs; `ranged` declares a key of another table.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from offloadtrain.config.errors import broken
from offloadtrain.config.toml import nearest, shown

Value = TypeVar("Value")

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Needs:
    """A dependency of an option, which has an effect only with certain values of another option.

    Attributes:
        option: name of the other option.
        values: values of the other option; a table of shares has the tiers with a share.
        why: the reason, as a clause.
    """

    option: str
    values: tuple[object, ...]
    why: str

    def rejects(self, value: object) -> bool:
        """Return True if the option has no effect with this value of the other option."""
        if isinstance(value, Mapping):
            return not any(share and tier in self.values for tier, share in value.items())
        return value not in self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A declared option.

    Attributes:
        name: keyword of `offload()` and key of the table `[offload]`.
        path: names of the attributes from an `OffloadConfig` to the option.
        kind: the type.
        doc: the effect, without name, type and default.
        positive, not_negative: the range of a number.
        size: a number of bytes, which a job may write as "10 GiB".
        choices: the allowed values, if the type does not list them.
        shares: tiers that may have a share in a table; such an option is "auto", a tier or a table.
        needs: the option and values that this option needs to have an effect.
    """

    name: str = ""
    path: tuple[str, ...] = ()
    kind: Any = None
    default: Any
    doc: str
    positive: bool = False
    not_negative: bool = False
    size: bool = False
    choices: Iterable[object] | None = None
    shares: tuple[str, ...] = ()
    needs: Needs | None = None

    def of(self, config: object) -> Any:
        """Return the option's value in an `OffloadConfig`."""
        return reduce(getattr, self.path, config)

    @property
    def none_is_zero(self) -> bool:
        """True if a job writes 0 for None, because TOML has no null and 0 is out of the range."""
        return self.default is None and self.positive

    def problems(self, value: Any) -> Iterator[str]:
        """Yield a sentence if the value is not one of the choices or out of range."""
        if self.shares:
            yield from self._wrong_shares(value)
            return
        words = self._words()
        choices = words if get_origin(self.kind) is Literal else self.choices
        if choices is not None:
            if value not in (allowed := tuple(choices)):
                hint = nearest(value, map(str, allowed)) if isinstance(value, str) else ""
                listed = ", ".join(map(repr, allowed))
                yield f"{self.name} = {shown(value)} is not one of {listed}{hint}"
        elif self.positive or self.not_negative:
            if value in words or (value is None and self.default is None):
                return
            if not isinstance(value, int | float) or isinstance(value, bool):
                yield f"{self.name} = {value!r} is not a number"
            elif self.positive and not value > 0:
                yield f"{self.name} = {value} is not positive"
            elif value < 0:
                yield f"{self.name} = {value} is negative"

    def _wrong_shares(self, value: Any) -> list[str]:
        """Return a sentence if a tier or a table of shares is wrong."""
        listed = ", ".join(map(repr, self.shares))
        if not isinstance(value, Mapping):
            allowed = ("auto", *self.shares)
            hint = nearest(value, allowed) if isinstance(value, str) else ""
            sentence = (
                f"{self.name} = {shown(value)} is not one of 'auto', {listed}, nor a table of "
                f"shares such as {{device = 0.3}}{hint}"
            )
            return broken((value not in allowed, sentence))
        unknown = [name for name in value if name not in self.shares]
        wrong = [share for share in value.values() if not _is_share(share)]
        return broken(
            (
                unknown,
                f"{self.name} has a share on {shown(next(iter(unknown), ''))}, which is not one of "
                f"{listed}",
            ),
            (wrong, f"{self.name} = {shown(dict(value))}: every share is from 0 to 1"),
            (
                not wrong and sum(value.values()) > 1,
                f"{self.name} = {shown(dict(value))}: the shares are more than 1 together",
            ),
        )[:1]

    def without_effect(self, value: Any, other: Any) -> Iterator[str]:
        """Yield a sentence if the value has no effect with the value of the option that it
        needs."""
        needs = self.needs
        if needs is None or value == self.default or not needs.rejects(other):
            return
        allowed = " or ".join(map(repr, needs.values))
        yield (
            f"{self.name} = {shown(value)} and {needs.option} = {shown(other)}: {needs.why}: "
            f"leave it out, or set {needs.option} = {allowed}"
        )

    def _words(self) -> tuple[object, ...]:
        """Return the words that the type lists."""
        kinds = [self.kind, *get_args(self.kind)]
        return tuple(
            word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)
        )


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def option(default: Value, doc: str, **declared: Any) -> Value:
    """Declare an option as a field of a dataclass; `declared` are attributes of `Option`.

    The name is the field's name, unless `declared` has another. `declared_in` adds path and type.
    """
    words = " ".join(doc.split())
    metadata = {"option": Option(default=default, doc=words, **declared)}
    as_field: Value = field(default=default, metadata=metadata)
    return as_field


Rule: TypeAlias = tuple[Callable[[Any], object], str]
"""A predicate on the value of a key, and a description of the allowed values."""

POSITIVE: Rule = (lambda value: value > 0), "above 0"
NOT_NEGATIVE: Rule = (lambda value: value >= 0), "0 or more"
SHARE: Rule = (lambda value: 0 <= value <= 1), "from 0 to 1"


def at_least(least: int) -> Rule:
    return (lambda value: value >= least), f"at least {least}"


def ranged(default: Value, rule: Rule) -> Value:
    """Declare a key of a job as a field of a dataclass; `out_of_range` checks its values."""
    as_field: Value = field(default=default, metadata={"rule": rule})
    return as_field


def out_of_range(settings: Any, section: str = "") -> Iterator[str]:
    """Yield a sentence for each value of a dataclass that is out of its declared range."""
    for declared in fields(settings):
        is_allowed, allowed = declared.metadata.get("rule", (bool, ""))
        value = getattr(settings, declared.name)
        if allowed and not is_allowed(value):
            yield f"{section}{declared.name} = {shown(value)} must be {allowed}"


def declared_in(kind: type, *path: str) -> Iterator[Option]:
    """Yield the options declared in a dataclass that is at `path` of an `OffloadConfig`."""
    hints = get_type_hints(kind)
    for declared in fields(kind):
        if (entry := declared.metadata.get("option")) is not None:
            yield replace(
                entry,
                name=entry.name or declared.name,
                path=(*path, declared.name),
                kind=hints[declared.name],
            )


def described(options: Iterable[Option], indent: str = "    ") -> str:
    """Return the options as lines of a Google-style "Args:" section."""
    wrap = textwrap.TextWrapper(
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(
        wrap.fill(f"{option.name}: {option.doc} Default: {option.default!r}.") for option in options
    )
