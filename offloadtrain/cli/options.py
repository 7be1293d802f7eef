"""Argument types that several commands share. Imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from cyclopts import Parameter
from cyclopts.validators import Number

Flag: TypeAlias = Annotated[bool, Parameter(negative=(), show_default=False)]
Json: TypeAlias = Annotated[bool, Parameter(name="--json", negative=())]
Overrides: TypeAlias = Annotated[
    tuple[str, ...],
    Parameter(name="--set", consume_multiple=1, negative=(), show_default=False),
]
Count: TypeAlias = Annotated[int, Parameter(validator=Number(gte=1))]
CountOrNone: TypeAlias = Annotated[int, Parameter(validator=Number(gte=0))]
