"""The memory of a step: its buffer table with tensors, and the lookup of a tensor's buffer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from offloadtrain.config.errors import HostMemoryError
from offloadtrain.config.units import format_bytes
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.disk_arena import DiskArena
from offloadtrain.runtime.dtypes import DTYPES
from offloadtrain.runtime.lanes import Buffer, Lanes, Range
from offloadtrain.step.layout.buffers import (
    BufferKey,
    BufferTable,
    Memory,
    Rows,
    not_late,
)
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.operations import Ref

_STARTS_AS_ZEROS = (Memory.STATE, Memory.GRADIENT, Memory.NORMS, Memory.SUM, Memory.USED)
"""Kinds whose device memory is zeroed, as all host and disk memory is. Other kinds are written
before they are read."""


class BlockInputs:
    """The device memory of block inputs, by their numbers in the program's refs.

    Attributes:
        leaving: number → input that is copied to the host, and its version when it was saved. It
            owns the tensor until compute has waited for the copy.
        freed: inputs, with versions, whose copy compute has waited for.
        likes: number → shape and dtype of the input, on the meta device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.leaving: dict[int, tuple[Tensor, int]] = {}
        self.freed: list[tuple[Tensor, int]] = []
        self.likes: dict[int, Tensor] = {}
        self._back: dict[int, Tensor] = {}

    def allocate(self, ref: Ref, lanes: Lanes) -> None:
        """Allocate the memory of an input that is about to be fetched."""
        # No record_stream: the program orders every reuse.
        self._back[int(ref.owner)] = lanes.allocate(ref.hi, DTYPES[ref.dtype], self.device)

    def buffer(self, ref: Ref) -> Buffer:
        """Return the flat memory of an input."""
        number = int(ref.owner)
        flat = self.leaving[number][0] if ref.copy == 0 else self._back[number]
        return Buffer("block input", flat)

    def take(self, number: int) -> Tensor:
        """Hand an input to autograd, which owns it from here on: compute has waited. An input that
        is still leaving is returned without a load; its copy may read it until it is freed."""
        leaving = self.leaving.get(number)
        flat = self._back.pop(number) if leaving is None else leaving[0]
        return flat.view(self.likes[number].shape)

    def free(self, ref: Ref) -> None:
        """Release an input: compute is after its copy, so the allocator may reuse the memory."""
        # `freed` keeps it, without a copy in flight, until its version is checked.
        if ref.copy == 0:
            self.freed.append(self.leaving.pop(int(ref.owner)))
        else:
            self._back.pop(int(ref.owner))

    def clear(self) -> None:
        """The lanes are idle: drop every input."""
        self.leaving.clear()
        self.freed.clear()
        self.likes.clear()
        self._back.clear()


class MemoryMap(dict[BufferKey, Buffer]):
    """Every buffer of a step. Late rows and pools are allocated on first use.

    Attributes:
        table: the rows of the buffers.
    """

    def __init__(
        self,
        table: BufferTable,
        device: torch.device,
        *,
        arena: Arena,
        disk: DiskArena,
        ledger: Ledger,
        is_late: bool = False,
    ) -> None:
        """`is_late`: only the disk's buffers are allocated here; the others of a bucket are
        allocated on first use of any of them, the rest by `allocate`."""
        super().__init__()
        self.table = table
        self._arena, self._ledger = arena, ledger
        self._allocators: dict[Tier, Callable[[Rows], list[Tensor]]] = {
            Tier.DISK: disk.map,
            Tier.HOST: lambda rows: arena.map(list(rows.values())),
            Tier.DEVICE: partial(_on_device, ledger, device),
        }
        # The disk's space is checked before a hundred GiB are page-locked.
        self._allocate(table.allocated(Tier.DISK), Tier.DISK)
        if not is_late:
            self.allocate()

    def __missing__(self, key: BufferKey) -> Buffer:
        key = BufferKey(*key)
        row = self.table.rows[key]
        if row.within is None:
            alike = self.table.of_bucket[key.bucket].items()
            missing = {k: r for k, r in alike if r.tier is row.tier and not_late(r)}
            self._allocate({**missing, key: row}, row.tier)
        else:
            parent, offset = row.within
            # Parameters become views of it, including parameters that are trained later.
            with torch.inference_mode(False):
                part = self[parent].flat[offset : offset + row.nbytes].view(DTYPES[row.dtype])
            self[key] = Buffer(row.name, part)
        return self[key]

    def allocate(self) -> None:
        """Allocate all buffers that are neither allocated nor late."""
        for tier in (Tier.HOST, Tier.DEVICE):
            self._allocate(self.table.allocated(tier), tier)

    def release(self, keys: Iterable[BufferKey]) -> None:
        """Release buffers of the host and the device that no lane uses any more."""
        host = []
        for key in keys:
            flat = self.pop(key).flat
            row = self.table.rows.get(key) or self.table.pools[key.kind].buffer(flat.nbytes)
            if row.within is not None:
                continue
            if row.tier is Tier.HOST:
                host.append(flat)
            elif row.tier is Tier.DEVICE:
                self._ledger.add(row.owner, Tier.DEVICE, -row.nbytes)
        self._arena.release(host)

    @property
    def slots(self) -> list[Tensor]:
        """The device memory that streamed blocks share, each (n,) uint8."""
        rows = self.table.rows
        return [
            self[key].flat
            for key in rows
            if key.kind is Memory.WORKING and isinstance(key.bucket, int)
        ]

    def of_pool(self, key: BufferKey, nbytes: int) -> Buffer:
        """Return a buffer of a pool, allocated on first use.

        Raises:
            HostMemoryError: the allocation would exceed the pool's limit.
        """
        if key not in self:
            pool = self.table.pools[key.kind]
            row, used = pool.buffer(nbytes), self._ledger.total(pool.tier)
            if pool.limit is not None and used + row.span_bytes > pool.limit:
                raise HostMemoryError(
                    f"{row.owner} need {format_bytes(row.nbytes)} more of host memory, and "
                    f"host_memory_limit is {format_bytes(pool.limit)}, of which "
                    f"{format_bytes(used)} are taken. Largest: {self._ledger.summary()}. Raise it, "
                    "set activation = 'recompute', or take a smaller microbatch"
                )
            self._allocate({key: row}, row.tier)
        return self[key]

    def _allocate(self, rows: Rows, tier: Tier) -> None:
        rows = {key: row for key, row in rows.items() if key not in self}
        for (key, row), tensor in zip(rows.items(), self._allocators[tier](rows), strict=True):
            self[key] = Buffer(row.name, tensor)


def _on_device(ledger: Ledger, device: torch.device, rows: Rows) -> list[Tensor]:
    """Allocate device rows."""
    tensors = []
    for key, row in rows.items():
        tensor = ledger.device_tensor(row.owner, row.numel, DTYPES[row.dtype], device)
        tensors.append(tensor.zero_() if key.kind in _STARTS_AS_ZEROS else tensor)
    return tensors


class Ranges(dict[Ref, Range]):
    """Ref → its range of memory. Cached, as every launch looks up its refs.

    Attributes:
        inputs: the block inputs that are on the device.
    """

    def __init__(self, memory: MemoryMap, inputs: BlockInputs) -> None:
        super().__init__()
        self.inputs = inputs
        self._memory = memory
        self._buffers: dict[Ref, Buffer] = {}
        """Ref to all elements → its buffer, in the ref's dtype."""

    def __missing__(self, ref: Ref) -> Range:
        # Not cached: the tensor differs each time.
        if ref.memory is Memory.ACTIVATION:
            return Range(self.inputs.buffer(ref), ref.lo, ref.hi)
        full_ref = ref._replace(lo=0, hi=0)
        if full_ref not in self._buffers:
            self._buffers[full_ref] = self._buffer(ref)
        self[ref] = Range(self._buffers[full_ref], ref.lo, ref.hi)
        return self[ref]

    def _buffer(self, ref: Ref) -> Buffer:
        if ref.memory in self._memory.table.pools:
            buffer = self._memory.of_pool(ref.key, ref.nbytes)
        else:
            buffer = self._memory[ref.key]
        # Updated matrices are in the memory of their gradient, in another dtype. Slots, staging and
        # spill buffers of a save are bytes.
        dtype, flat = DTYPES[ref.dtype], buffer.flat
        if flat.dtype == dtype:
            return buffer
        count = flat.nbytes // dtype.itemsize * dtype.itemsize // flat.itemsize
        return Buffer(buffer.name, flat[:count].view(dtype))


Entry = TypeVar("Entry")


class AddressMap(Generic[Entry]):
    """Returns the entry of the buffer that a tensor views, by bisection. Buffers neither move
    nor overlap while the map exists."""

    def __init__(self) -> None:
        # The first range is empty: every address is after some start, and 0 stands for no bytes.
        self._starts, self._ends = [0], [0]
        self._entries: list[Entry | None] = [None]
        self._fake: dict[int, Entry] = {}

    def add(self, flat: Tensor, entry: Entry) -> None:
        """Add a buffer; `flat`: dense."""
        if flat.is_meta or isinstance(flat, FakeTensor):
            self._fake[flat.untyped_storage()._cdata] = entry
            return
        start = flat.data_ptr()
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, start + flat.nbytes)
        self._entries.insert(at, entry)

    def find(self, tensor: Tensor) -> Entry | None:
        """Return the entry of the buffer that contains the tensor's first byte, or None."""
        # A storage without memory has no address: the storage object is the key.
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            return self._fake.get(tensor.untyped_storage()._cdata)
        try:
            address = tensor.data_ptr()
        # Sparse tensors, and tensor subclasses without storage, cannot be in a flat buffer.
        except RuntimeError:
            return None
        at = bisect_right(self._starts, address) - 1
        return self._entries[at] if address < self._ends[at] else None
