"""Memory: the Ledger of every allocation by owner, and the pinned host arena.

[Note: The arena]
All host memory of a run (master weights, moments, gradients, staging) is laid out first and mapped
once, at its exact size, in a few slabs. torch's pinned allocator rounds each request to a power
of two, which costs up to twice the memory. Slabs stay below 8 GiB because
drivers reject very large registrations, and no request crosses a slab, so no copy crosses two
registrations. Requests are staggered (`step.layout.buffers.STAGGER_BYTES`). Weights of a bucket
have a separate slab: after `close` it belongs to the model's parameters, which would otherwise need
a copy, and the other slabs are unmapped. Nothing protects this memory from an early release: the
arena lives until `close`, which its owner calls after draining the lanes.

If the layout of a run changes between steps, all buffers move, one bucket after the other:
`release` returns their pages to the kernel, and unmaps a slab with its last buffer.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from offloadtrain.config.errors import HostMemoryError
from offloadtrain.config.units import format_bytes
from offloadtrain.hardware.host_memory import (
    HOST_MEMORY_VARIABLE,
    Room,
    is_out_of_memory,
    least_room,
)
from offloadtrain.runtime import cuda_driver, kernels
from offloadtrain.runtime.dtypes import DTYPES
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.step.layout.buffers import BufferSpec, largest_owners, span_bytes
from offloadtrain.step.layout.tiers import Tier

_log = logging.getLogger(__name__)

SLAB_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Bytes of an owner on a tier, current and peak."""

    owner: str
    tier: str
    bytes: int
    peak_bytes: int


class Ledger:
    """Bytes of all memory of the engine, by named owner."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, Tier], tuple[int, int]] = {}

    def add(self, owner: str, tier: Tier, nbytes: int) -> None:
        """Add `nbytes` (negative: release) to `owner`."""
        current, peak = self._bytes.get((owner, tier), (0, 0))
        current += nbytes
        assert current >= 0, f"{owner} gave back {-current} bytes more than it held on {tier}"
        self._bytes[owner, tier] = (current, max(peak, current))

    def rows(self) -> list[LedgerRow]:
        """Return all owners, largest first."""
        items = list(self._bytes.items())  # a copy: other threads may add owners
        rows = [LedgerRow(owner, tier.value, *sizes) for (owner, tier), sizes in items]
        return sorted(rows, key=lambda row: -row.bytes)

    def total(self, tier: Tier) -> int:
        """Return the current bytes of a tier."""
        # A copy: other threads may add owners.
        items = list(self._bytes.items())
        return sum(now for (_, owner_tier), (now, _) in items if owner_tier is tier)

    def device_tensor(
        self, owner: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate an uninitialised 1-D tensor on the device for `owner`.

        Raises:
            torch.OutOfMemoryError: with the largest owners in its message.
        """
        try:
            tensor = torch.empty(numel, dtype=dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            requested = format_bytes(numel * dtype.itemsize)
            message = f"{owner}: {requested} could not be allocated on the {device.type}. "
            message += f"Held by the engine: {self.summary()}"
            if isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(f"{message}. {error}") from error
            if is_out_of_memory(error):
                raise HostMemoryError(f"{message}. {least_room()}") from error
            raise
        self.add(owner, Tier.DEVICE, numel * dtype.itemsize)
        return tensor

    def summary(self, limit: int = 5) -> str:
        """Return the largest owners in one line."""
        rows = [row for row in self.rows() if row.bytes][:limit]
        named = [f"{row.owner} {format_bytes(row.bytes)} ({row.tier})" for row in rows]
        return ", ".join(named) or "nothing yet"


class Arena:
    """Host memory in slabs, pinned for one CUDA device or pageable for the CPU."""

    def __init__(self, ledger: Ledger, *, pin: bool) -> None:
        self._ledger = ledger
        self._slabs: list[_Slab] = []
        self._booked: list[BufferSpec] = []
        self.pin = pin

    @property
    def pinned(self) -> bool:
        """True if every slab is registered with CUDA."""
        return self.pin and all(slab.pinned for slab in self._slabs)

    def map(self, requests: Sequence[BufferSpec]) -> list[Tensor]:
        """Map all requests at once; return zeroed 1-D tensors in the order of the requests.

        Raises:
            HostMemoryError: before anything is mapped, if the host has too little memory.
        """
        room = least_room()
        if span_bytes(requests) > room.num_bytes:
            raise _too_little(requests, room)
        slabs: list[_Slab] = []
        try:
            for group in _pack(requests):
                self._tell(slabs, requests)
                slabs.append(_Slab(group, pin=self.pin))
            self._tell(slabs, requests)
        except OSError as error:
            for slab in slabs:
                slab.close()
            if not is_out_of_memory(error):
                raise
            raise _too_little(requests, least_room()) from error
        self._slabs += slabs
        tensors = [tensor for slab in slabs for tensor in slab.tensors]
        self._book(requests, 1)
        self._booked += requests
        if self.pin and not self.pinned:
            _log.warning(
                "host memory could not be pinned (cudaHostRegister was refused): transfers will be "
                "slow and will not overlap. Check `ulimit -l` and the memory limit of the "
                "container."
            )
        return tensors

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Release the memory of tensors that no lane uses. Other buffers in their slabs are not
        pinned any more."""
        for address, slab in product((x.data_ptr() for x in tensors), self._slabs):
            if request := slab.release(address):
                self._book([request], -1)
                self._booked.remove(request)
        self._slabs = [slab for slab in self._slabs if slab.requests]

    def close(self) -> None:
        """Unregister. The memory is unmapped when its last view is freed."""
        for slab in self._slabs:
            slab.close()
        self._book(self._booked, -1)
        self._slabs, self._booked = [], []

    def _tell(self, slabs: Sequence[_Slab], requests: Sequence[BufferSpec]) -> None:
        """Report progress: page-locking a hundred GiB takes tens of seconds."""
        what = "page-locking host memory" if self.pin else "taking host memory"
        HEARTBEAT.advance(what, sum(slab.num_bytes for slab in slabs), span_bytes(requests))

    def _book(self, requests: Sequence[BufferSpec], sign: int) -> None:
        for request in requests:
            self._ledger.add(request.owner, Tier.HOST, sign * request.nbytes)
            padding = request.span_bytes - request.nbytes
            self._ledger.add("padding", Tier.HOST, sign * padding)


class MetaArena(Arena):
    """Records requests without mapping them: tensors are on the meta device."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger, pin=False)

    def map(self, requests: Sequence[BufferSpec]) -> list[Tensor]:
        self._book(requests, 1)
        return [
            torch.empty(request.numel, dtype=DTYPES[request.dtype], device="meta")
            for request in requests
        ]


class _Slab:
    """An anonymous mapping: huge pages advised, touched by the threads that use it, registered."""

    def __init__(self, requests: Sequence[BufferSpec], *, pin: bool) -> None:
        self.num_bytes = nbytes = span_bytes(requests)
        self._mapping = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages: they only improve speed
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        if pin:
            # A fork would copy pinned pages at once: exclude them from children.
            self._mapping.madvise(mmap.MADV_DONTFORK)
        # The memoryview keeps the mapping alive: torch.frombuffer on the mmap itself would not.
        self._bytes = torch.frombuffer(memoryview(self._mapping), dtype=torch.uint8)
        self.requests: dict[int, BufferSpec] = {}
        """Address → request that is mapped there."""
        tensors, offset = [], 0
        for request in requests:
            piece = self._bytes[offset : offset + request.nbytes]
            tensors.append(piece.view(DTYPES[request.dtype]))
            self.requests[self._bytes.data_ptr() + offset] = request
            offset += request.span_bytes
        self.tensors = tensors
        for tensor in self.tensors:
            kernels.first_touch(tensor)
        self.pinned = pin and cuda_driver.register(self._bytes)

    def release(self, address: int) -> BufferSpec | None:
        """Return the pages of the request at this address to the kernel, and return the request."""
        request = self.requests.pop(address, None)
        if request is not None:
            self.close()  # the kernel does not free locked pages
            offset = address - self._bytes.data_ptr()
            lo = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
            hi = (offset + request.span_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if lo < hi:
                self._mapping.madvise(mmap.MADV_DONTNEED, lo, hi - lo)
        return request

    def close(self) -> None:
        if self.pinned:
            cuda_driver.unregister(self._bytes)
            self.pinned = False


def with_own_storage(piece: Tensor) -> Tensor:
    """View the same host memory, (n,), with a storage of exactly its extent, which keeps the memory
    mapped: `torch.save` writes complete storages, and the arena's storage contains other
    buffers."""
    if piece.device.type != "cpu" or not piece.numel():
        return piece
    return torch.from_numpy(piece.view(torch.uint8).numpy()).view(piece.dtype)


def _too_little(requests: Sequence[BufferSpec], room: Room) -> HostMemoryError:
    return HostMemoryError(
        f"offloading needs {format_bytes(span_bytes(requests))} of host memory, but {room}. "
        f"Largest: {largest_owners(requests)}. "
        "Free host memory, use a narrower state ('split16', 'int8') or a smaller model, "
        "or set grad_accum_steps = 1 (2 bytes per parameter less). If this machine's "
        f"memory grows on demand, set its maximum: {HOST_MEMORY_VARIABLE}=128GiB."
    )


def _pack(requests: Sequence[BufferSpec]) -> list[list[BufferSpec]]:
    """Group consecutive requests into slabs of at most SLAB_BYTES. A larger request gets a separate
    slab, as do weights."""
    groups: list[list[BufferSpec]] = []
    room = 0
    for request in requests:
        if request.is_weights or request.span_bytes > room:
            groups.append([])
            room = SLAB_BYTES
        groups[-1].append(request)
        room -= room if request.is_weights else request.span_bytes
    return groups
