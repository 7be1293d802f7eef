"""The flat buffer that a tensor's bytes belong to."""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Entry = TypeVar("Entry")


class AddressMap(Generic[Entry]):
    """Finds the entry of the buffer that a tensor views, by bisection. Buffers stay where they are
    as long as the map, and do not overlap."""

    def __init__(self) -> None:
        # The first range is empty: every address lies behind some start, and 0 stands for no bytes.
        self._starts, self._ends = [0], [0]
        self._entries: list[Entry | None] = [None]
        self._fake: dict[int, Entry] = {}

    def add(self, flat: Tensor, entry: Entry) -> None:
        """Add a buffer; `flat`: dense."""
        if isinstance(flat, FakeTensor):
            self._fake[flat.untyped_storage()._cdata] = entry
            return
        start = flat.data_ptr()
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, start + flat.nbytes)
        self._entries.insert(at, entry)

    def find(self, tensor: Tensor) -> Entry | None:
        """Return the entry of the buffer that holds the tensor's first byte, if any."""
        # A fake tensor's storage has no memory: the object itself stands for it.
        if isinstance(tensor, FakeTensor):
            return self._fake.get(tensor.untyped_storage()._cdata)
        try:
            address = tensor.data_ptr()
        # Sparse tensors, and tensor subclasses without storage, cannot lie in a flat buffer.
        except RuntimeError:
            return None
        at = bisect_right(self._starts, address) - 1
        return self._entries[at] if address < self._ends[at] else None
