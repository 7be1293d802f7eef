"""Random numbers of a forward that runs twice.

[Note: Random numbers of the second run]
torch's checkpoint restores torch's global generators. A layer may draw from others: Python's
`random`, NumPy's global generator, and generators that its modules or its arguments hold. Drawn
anew, another dropout mask or another depth would be differentiated than the one that made the loss.
So their states are read before the first run, set for the second one, and put back behind it. The
two global ones, which are large, are read after the first run too: if it has not drawn from them,
the second one will not.
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
        held = _held(modules, inputs, numpy)
        self._held = [(generator, generator.read()) for generator in held]

    def forget_unused(self) -> None:
        """The first run is over: forget the shared generators that it has not drawn from."""
        self._shared = [one for one in self._shared if not _same(one[0].read(), one[1])]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers inside; afterwards generators are as they were."""
        states = self._shared + self._held
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


def _held(
    modules: Iterable[nn.Module], inputs: Collection[object], numpy: Any
) -> Iterator[_Generator]:
    """Yield the generators among the attributes of `modules`, and among `inputs`."""
    kinds = _KINDS if numpy is None else {**_KINDS, **_kinds_of(numpy)}
    for values in (inputs, *(vars(module).values() for module in modules)):
        # Nearly always there is none; to see that takes no loop of Python's.
        if not kinds.keys().isdisjoint(map(type, values)):
            for held in values:
                if type(held) in kinds:
                    yield kinds[type(held)](held)


_KINDS: dict[type, Callable[[Any], _Generator]] = {
    torch.Generator: lambda held: _Generator(held.get_state, held.set_state),
    random.Random: lambda held: _Generator(held.getstate, held.setstate),
}
"""Type of a generator → how it is read and set."""


@cache
def _kinds_of(numpy: Any) -> dict[type, Callable[[Any], _Generator]]:
    return {
        numpy.RandomState: lambda held: _Generator(
            partial(held.get_state, legacy=False), held.set_state
        ),
        numpy.Generator: lambda held: _Generator(
            lambda: held.bit_generator.state, partial(setattr, held.bit_generator, "state")
        ),
    }
