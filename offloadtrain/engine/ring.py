"""A fixed set of staging buffers used in turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offloadtrain.transfer import Buffer, Event, Lane, Lanes, Range


class Lease(ABC):
    """Staging memory, from when it is taken until the event given to `release`.

    Attributes:
        filled: the event after which it holds what it was taken for, where that is waited for
            later.
    """

    __slots__ = ("filled", "range")

    def __init__(self, range_: Range) -> None:
        self.range = range_
        self.filled: Event | None = None

    @abstractmethod
    def release(self, event: Event) -> None:
        """The memory may be used again after `event`."""


class _SlotLease(Lease):
    __slots__ = ("_slot",)

    def __init__(self, slot: _Slot, range_: Range) -> None:
        super().__init__(range_)
        self._slot = slot

    def release(self, event: Event) -> None:
        self._slot.free_after = event


class _Slot:
    __slots__ = ("buffers", "free_after")

    def __init__(self, name: str, memory: Tensor) -> None:
        self.buffers = {
            dtype: Buffer(name, memory.view(dtype))
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        }
        self.free_after: Event | None = None


class Ring:
    """Slots taken round robin; taking one waits, on the lane that will fill it, for its last
    use."""

    def __init__(
        self, name: str, lanes: Lanes, slot_bytes: int, make: Callable[[int], Sequence[Tensor]]
    ) -> None:
        """`make`: maps one uint8 tensor of so many bytes per slot; called once."""
        self.slot_bytes = slot_bytes
        self._lanes = lanes
        self._name = name
        self._make = make
        self._slots: list[_Slot] = []
        self._next = 0

    def prepare(self) -> None:
        """Map the memory now; otherwise the first `take` does."""
        if not self._slots:
            pieces = enumerate(self._make(self.slot_bytes))
            self._slots = [_Slot(f"{self._name}[{i}]", piece) for i, piece in pieces]

    def take(self, numel: int, dtype: torch.dtype, lane: Lane) -> Lease:
        """A slot's first `numel` elements, undefined, to be written on `lane`."""
        self.prepare()
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.free_after is not None:
            self._lanes.wait(lane, slot.free_after, f"{self._name} slot is free")
        return _SlotLease(slot, self._lanes.alloc(slot.buffers[dtype].first(numel), lane))


class Reserved:
    """A slot of its own for every bucket, where memory is not to be shared."""

    def __init__(self, name: str, lanes: Lanes, make: Callable[[int], Tensor]) -> None:
        """`make`: maps one uint8 tensor of so many bytes."""
        self._rings: dict[str, Ring] = {}
        self._name = name
        self._lanes = lanes
        self._make = make

    def take(self, owner: str, numel: int, dtype: torch.dtype, lane: Lane) -> Lease:
        """The owner's slot, which has the size of its first use; see `Ring.take`."""
        if owner not in self._rings:
            nbytes = numel * dtype.itemsize
            name = f"{self._name} {owner}"
            self._rings[owner] = Ring(name, self._lanes, nbytes, lambda n: [self._make(n)])
        return self._rings[owner].take(numel, dtype, lane)
