"""Random numbers of a forward that runs twice.

[Note: Random numbers of the second run]
torch's checkpoint restores torch's global generators. A layer may draw from further ones: Python's
`random`, NumPy's global generator, and generators among the attributes of its modules and its
arguments. If the second run drew new numbers, the gradient would be that of another dropout mask or
another depth than the loss. So the states are read before the first run, set for the second run,
and put back after it. The two global states are large. They are read after the first run as well:
if it has not drawn from a generator, the second run will not either.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn


class _Generator(NamedTuple):
    """How the state of a generator is read and set."""

    read: Callable[[], Any]
    set: Callable[[Any], None]


class RandomStates:
    """The states of all generators that a forward may draw from, but for torch's global ones."""

    def __init__(self, modules: Iterable[nn.Module], inputs: Collection[object]) -> None:
        numpy = sys.modules.get("numpy.random")  # which has not drawn before it is imported
        self._shared = [(generator, generator.read()) for generator in _shared(numpy)]
        attributes = _attributes(modules, inputs, numpy)
        self._attributes = [(generator, generator.read()) for generator in attributes]

    def forget_unused(self) -> None:
        """The first run is over: forget the shared generators that it has not drawn from."""
        self._shared = [
            (generator, state)
            for generator, state in self._shared
            if not _same(generator.read(), state)
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers inside; afterwards generators are as they were."""
        states = self._shared + self._attributes
        now = [(generator, generator.read()) for generator, _ in states]
        try:
            for generator, state in states:
                generator.set(state)
            yield
        finally:
            for generator, state in now:
                generator.set(state)


class _NumpyState:
    """Reads the state of NumPy's global generator; the same object if it has not changed.

    `get_state` takes 30 microseconds, the bytes behind it 0.3. They show every draw but the second
    of a pair of normal numbers, which was computed with the first.
    """

    def __init__(self) -> None:
        self._bytes: object = None
        self._state: dict[str, Any] = {"has_gauss": 1}

    def read(self, numpy: Any) -> dict[str, Any]:
        generator = numpy.get_bit_generator()
        known = None
        if type(generator) is numpy.MT19937:  # 624 words and a position, nothing elsewhere
            known = ctypes.string_at(generator.ctypes.state_address, 625 * 4)
        if known is None or known != self._bytes or self._state["has_gauss"]:
            self._bytes, self._state = known, numpy.get_state(legacy=False)
        return self._state


_NUMPY = _NumpyState()


def _shared(numpy: Any) -> list[_Generator]:
    python = _Generator(random.getstate, random.setstate)
    if numpy is None:
        return [python]
    return [python, _Generator(lambda: _NUMPY.read(numpy), numpy.set_state)]


def _same(some: Any, other: Any) -> bool:
    return some is other or (isinstance(some, tuple) and some == other)


def _attributes(
    modules: Iterable[nn.Module], inputs: Collection[object], numpy: Any
) -> Iterator[_Generator]:
    """Yield the generators among the attributes of `modules`, and among `inputs`."""
    kinds = _KINDS if numpy is None else {**_KINDS, **_kinds_of(numpy)}
    for values in (inputs, *(vars(module).values() for module in modules)):
        # Nearly always there is none; to see that takes no loop of Python's.
        if not kinds.keys().isdisjoint(map(type, values)):
            for value in values:
                if type(value) in kinds:
                    yield kinds[type(value)](value)


_KINDS: dict[type, Callable[[Any], _Generator]] = {
    torch.Generator: lambda source: _Generator(source.get_state, source.set_state),
    random.Random: lambda source: _Generator(source.getstate, source.setstate),
}
"""Type of a generator → how it is read and set."""


@cache
def _kinds_of(numpy: Any) -> dict[type, Callable[[Any], _Generator]]:
    return {
        numpy.RandomState: lambda source: _Generator(
            partial(source.get_state, legacy=False), source.set_state
        ),
        numpy.Generator: lambda source: _Generator(
            lambda: source.bit_generator.state, partial(setattr, source.bit_generator, "state")
        ),
    }
