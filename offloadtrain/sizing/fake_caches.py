"""Caches of functions, which may keep tensors of a trace for the calls that follow.

Models cache tables that depend on sizes only (`functools.lru_cache`): anchors, relative positions.
A trace fills such a cache with a fake tensor, and training in the same process would get it.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_LINK = "_lru_list_elem"
"""Type name of the entries of a bounded cache."""


def empty_caches_of(mode: FakeTensorMode) -> None:
    """Empty every cache of a function that holds a fake tensor of this mode."""
    # A copy: reading attributes of a module may import other modules.
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            # `type(value)` and not `__class__`, which may run code of a foreign object.
            methods = list(vars(value).values()) if issubclass(type(value), type) else []
            for cache in (
                cache for candidate in (value, *methods) for cache in _caches_of(candidate)
            ):
                if any(
                    type(item) is FakeTensor and item.fake_mode is mode
                    for item in _contents_of(cache)
                ):
                    cache.cache_clear()


def _caches_of(value: Any) -> Iterator[Any]:
    """Yield the caches that a function is or calls: those that it closes over."""
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    if type(value) is functools._lru_cache_wrapper:
        yield value
    elif type(value) is FunctionType:
        for cell in value.__closure__ or ():
            try:
                closed = cell.cell_contents
            except ValueError:  # not set yet
                continue
            if type(closed) is functools._lru_cache_wrapper:
                yield closed


def _contents_of(cache: Any) -> Iterator[Any]:
    """Yield the objects in a cache; containers are unpacked."""
    todo, visited = [cache], {id(cache)}
    # The list grows while it is walked.
    for container in todo:
        for inner in gc.get_referents(container):
            if id(inner) in visited:
                continue
            visited.add(id(inner))
            if isinstance(inner, dict | list | tuple | set) or type(inner).__name__ == _LINK:
                todo.append(inner)
            else:
                yield inner
