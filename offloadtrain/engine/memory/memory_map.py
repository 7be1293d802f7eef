"""The memory behind the program's refs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.runtime.lanes import Buffer, Lanes, Range
from offloadtrain.step.program.operations import Memory, Ref
from offloadtrain.step.spec.formats import ITEMSIZE
from offloadtrain.step.spec.memory import slot_offsets
from offloadtrain.step.spec.tiers import Tier

_ATTRIBUTES = {
    Memory.DEVICE_SHARD: "device_shard",
    Memory.GRADIENT: "gradient",
    Memory.GRADIENT_FILE: "gradient",
    Memory.SUM: "sum",
    Memory.PENDING: "pending",
    Memory.SNAPSHOT: "snapshot",
    Memory.SPILL: "spill",
    Memory.USED: "used",
}

_OTHERS = {
    Memory.DEVICE_SHARD: "other_device_shard",
    Memory.GRADIENT: "other_gradient",
}

_BY_SLOT = (Memory.WEIGHT_SLOT, Memory.NEW_WEIGHTS)
"""Host slots that a ref names by number; its bucket's dtype is its own."""

Norms = Mapping[tuple[Tier, int], Buffer]
"""Tier that measures, and 0, or 1 for its copy on the host → (number of parameters,) fp64: sums of
squares."""

Staging = Callable[[str | int, int], tuple[str, Tensor]]
"""(slot or owner, bytes that are needed) → the slot's name and its memory, (n,) uint8."""


class BlockInputs:
    """The device memory of block inputs, by the numbers that the program's refs name.

    Attributes:
        leaving: number → input that is copied to the host, and its version when it was saved. It
            owns the tensor until compute has waited for the copy.
        freed: inputs, with versions, whose copy compute has waited for.
        likes: number → shape and dtype of the fetched input, on the meta device.
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
        self._back[int(ref.owner)] = lanes.allocate(ref.hi, dtype_of(ref), self.device)

    def buffer(self, ref: Ref) -> Buffer:
        """Return its flat memory."""
        number = int(ref.owner)
        flat = self.leaving[number][0] if ref.copy == 0 else self._back[number]
        return Buffer("block input", flat)

    def take(self, number: int) -> Tensor:
        """Hand an input to autograd, which owns it from here on: compute has waited. One that is
        still leaving did not go; its copy may read it until it is freed."""
        leaving = self.leaving.get(number)
        flat = self._back.pop(number) if leaving is None else leaving[0]
        return flat.view(self.likes[number].shape)

    def free(self, ref: Ref) -> None:
        """Give up an input: compute is behind its copy, so the allocator may reuse the memory."""
        # Still held in `freed`, without a copy in flight, until its version is checked.
        if ref.copy == 0:
            self.freed.append(self.leaving.pop(int(ref.owner)))
        else:
            self._back.pop(int(ref.owner))

    def clear(self) -> None:
        """The lanes are empty: forget every input."""
        self.leaving.clear()
        self.freed.clear()
        self.likes.clear()
        self._back.clear()


class MemoryMap(dict[Ref, Range]):
    """Ref → its range of memory. Filled on first use, as every launch looks its refs up."""

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        norms: Norms,
        slots: Sequence[Tensor],
        disk_slots: Mapping[Memory, Sequence[Tensor]],
        staging: Mapping[Memory, Staging],
        inputs: BlockInputs,
    ) -> None:
        """`slots`: device memory that streamed blocks share, each (n,) uint8. `disk_slots`: host
        memory that buckets share whose state, gradient or weights are on the disk, each (n,)
        uint8."""
        super().__init__()
        self._norms = norms
        self.slots = slots
        self._disk_slots = disk_slots
        self._staging = staging
        self._inputs = inputs
        self._buckets = {bucket.name: bucket for block in blocks for bucket in block.held}
        self._copies = {b.name: (b.state, b.other) for b in self._buckets.values()}
        self._versions = {b.name: b.versions for b in self._buckets.values() if not b.streamed}
        self._offsets = dict(_offsets(blocks))
        self._made: dict[Ref, Buffer] = {}
        self._in_slots: dict[tuple[Bucket, int], Buffer] = {}

    def __missing__(self, ref: Ref) -> Range:
        # Not kept: the tensor is another one each time.
        if ref.memory is Memory.ACTIVATION:
            return Range(self._inputs.buffer(ref), ref.lo, ref.hi)
        key = ref._replace(lo=0, hi=0)
        if key not in self._made:
            self._made[key] = self._make(ref)
        found = self[ref] = Range(self._made[key], ref.lo, ref.hi)
        return found

    def allocate(self, ref: Ref, lanes: Lanes) -> None:
        """Allocate the device memory of a block's input."""
        self._inputs.allocate(ref, lanes)

    def free(self, ref: Ref) -> None:
        """Free a block's input on the device."""
        self._inputs.free(ref)

    def in_slot(self, bucket: Bucket, slot: int) -> Buffer:
        """Return the working weights of a bucket while its block has this slot, or version."""
        found = self._in_slots.get((bucket, slot))
        if found is None:
            ref = Ref(Memory.WORKING, bucket.name, slot, 0, 0, bucket.spec.dtype)
            found = self._in_slots[bucket, slot] = self[ref].buffer
        return found

    def _make(self, ref: Ref) -> Buffer:
        if ref.memory is Memory.NORMS:
            return self._norms[Tier(str(ref.owner)), ref.copy]
        if ref.memory in self._staging:
            name, memory = self._staging[ref.memory](ref.owner, ref.nbytes)
            return Buffer(name, memory.view(dtype_of(ref)))
        if ref.memory in _BY_SLOT:
            return Buffer(f"{ref.memory} {ref.owner}", self._in_disk_slot(ref, int(ref.owner)))
        bucket = self._buckets[str(ref.owner)]
        if ref.memory is Memory.STATE and bucket.spec.is_on_disk:
            return self._in_state_slot(bucket, ref)
        if ref.memory is Memory.GRADIENT and bucket.spec.gradient_on_disk:
            assert bucket.gradient is not None
            whole = self._disk_slots[ref.memory][ref.copy][: bucket.gradient.flat.nbytes]
            return Buffer(f"slot {ref.copy}: {bucket.gradient.name}", whole.view(dtype_of(ref)))
        if ref.memory is Memory.WEIGHT_FILE:
            return bucket.weight_files[ref.copy]
        if ref.memory is Memory.STATE or ref.memory is Memory.STATE_FILE:
            return self._copies[bucket.name][ref.copy][ref.field]
        if ref.memory is Memory.WORKING:
            if bucket.streamed:
                return self._slice(bucket, ref.copy)
            return self._versions[bucket.name][ref.copy]
        found = getattr(bucket, (_OTHERS if ref.copy else _ATTRIBUTES)[ref.memory])
        assert isinstance(found, Buffer)
        # Matrices that are updated lie where their gradient was, in a dtype of their own; copied
        # fields of the state lie one behind the other in bytes.
        own = found.flat.dtype == dtype_of(ref)
        return found if own else Buffer(found.name, found.flat.view(dtype_of(ref)))

    def _in_disk_slot(self, ref: Ref, slot: int) -> Tensor:
        memory, size = self._disk_slots[ref.memory][slot], ITEMSIZE[ref.dtype]
        return memory[: memory.numel() // size * size].view(dtype_of(ref))

    def _in_state_slot(self, bucket: Bucket, ref: Ref) -> Buffer:
        file, lo = bucket.state[ref.field], slot_offsets(bucket.spec)[ref.field]
        memory = self._disk_slots[Memory.STATE][ref.copy][lo : lo + file.flat.nbytes]
        return Buffer(f"slot {ref.copy}: {file.name}", memory.view(file.flat.dtype))

    def _slice(self, bucket: Bucket, slot: int) -> Buffer:
        lo = self._offsets[bucket.name]
        with torch.inference_mode(False):
            memory = self.slots[slot][lo : lo + bucket.numel * bucket.dtype.itemsize]
            return Buffer(f"working {bucket.name}", memory.view(bucket.dtype))


def dtype_of(ref: Ref) -> torch.dtype:
    """Return the dtype that a ref names."""
    found = getattr(torch, ref.dtype)
    assert isinstance(found, torch.dtype)
    return found


def _offsets(blocks: Sequence[Block]) -> list[tuple[str, int]]:
    """List each bucket's offset in its block's slot, in bytes; every one starts on 256."""
    found = []
    for block in blocks:
        offset = 0
        for bucket in block.held:
            found.append((bucket.name, offset))
            offset += bucket.numel * bucket.dtype.itemsize
    return found
