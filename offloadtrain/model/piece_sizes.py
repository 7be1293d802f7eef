"""How the losses go through their pieces, and for which device they choose the size of a piece.

Fake tensors of a trace are the CPU's, and may stand for those of another device. A trace also need
not run every piece: all but the last of a loss do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

from torch import Tensor

Piece = TypeVar("Piece")

_stands_for_cpu: ContextVar[bool] = ContextVar("the CPU's tensors are the CPU's", default=True)


def pieces_of_cpu(tensor: Tensor) -> bool:
    """Return whether a loss of this tensor is computed in pieces of the size for a CPU."""
    return tensor.device.type == "cpu" and _stands_for_cpu.get()


@contextmanager
def cpu_stands_for(*, on_cpu: bool) -> Iterator[None]:
    """Let the CPU's tensors of this thread stand for another device's, unless `on_cpu`."""
    token = _stands_for_cpu.set(on_cpu)
    try:
        yield
    finally:
        _stands_for_cpu.reset(token)


class Few(Protocol):
    """Replaces a loop over pieces. All pieces except the last have the same size."""

    def each(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Yield some of the pieces; nothing that the others make would be alive after them."""

    def made(self, pieces: Sequence[Piece], make: Callable[[Piece], Tensor]) -> list[Tensor]:
        """Return a tensor for every piece."""


_few: ContextVar[Few | None] = ContextVar("every piece runs", default=None)


def each(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces of a loss, all but the last of one size."""
    few = _few.get()
    yield from pieces if few is None else few.each(list(pieces))


def made_of_each(pieces: Iterable[Piece], make: Callable[[Piece], Tensor]) -> list[Tensor]:
    """Apply `make` to the pieces of a loss. All pieces except the last have the same size."""
    few = _few.get()
    return [make(piece) for piece in pieces] if few is None else few.made(list(pieces), make)


@contextmanager
def few_stand_for_all(few: Few) -> Iterator[None]:
    """Let it choose the pieces that run in this thread."""
    token = _few.set(few)
    try:
        yield
    finally:
        _few.reset(token)
