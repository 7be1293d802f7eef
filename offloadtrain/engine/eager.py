"""Functions of torch, without its compiler."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Found = TypeVar("Found")


def eager(function: Callable[Args, Found]) -> Callable[Args, Found]:
    """Return the function without the wrapper that hides it from torch's compiler.

    The wrapper imports the compiler at its first call, which takes over a second. Where nobody has
    imported it, nothing is compiled, and there is nothing to hide from.
    """
    return function if "torch._dynamo" in sys.modules else inspect.unwrap(function)
