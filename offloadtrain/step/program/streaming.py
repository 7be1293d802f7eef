"""Streaming: blocks whose weights are loaded for each use share a few device slots.

[Note: Streaming]
A streamed block's weights are on the host, on the disk, or as shards on all devices, and on this
device only while they have a slot. A use is the block's forward, or the unpacking of one of its
saved weights in backward. Each use assigns a slot to the block and makes compute wait for its load.
The next blocks are prefetched, in the access order of the previous step; another order gives
the same result and is slower. Layers share some slots; large blocks outside of layers, in
ZeRO stage 3, share another ([Note: Outside of layers] in `step.layout.placement`). Weights
on the device are clean, so eviction copies nothing: the slot is free once compute has completed its
earlier launches. Two things pin a block: a running forward of it, and its backward, from the first
unpacking of a tensor saved in its forward until a tensor is unpacked that was saved earlier
(autograd runs nodes in the reverse of the order in which they were made). While a block has no slot
its parameters are NaN, so that a read that bypasses the engine is noticed.

If there are two versions of the weights, a load copies the one that compute reads at that time.

With several ranks each has a shard of the weights, on its host or on its device. A load copies the
shard to its place in the slot and gathers the others around it, so every rank must use blocks in
the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import NamedTuple

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.step.layout.buffers import BufferTable, Memory
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import (
    Dependencies,
    Enter,
    Kind,
    Lane,
    Launch,
    Leave,
    Ref,
    Ring,
)
from offloadtrain.step.program.places import BucketRefs


class StreamError(OffloadTrainError):
    """More blocks are needed at once than there are slots."""


class Streaming:
    """Assigns slots to streamed blocks.

    Attributes:
        access_order: the uses of the previous step, and the position of the present step in them.
        slots: the block in each slot, None if it is free.
    """

    def __init__(
        self,
        spec: StepSpec,
        table: BufferTable,
        order: Dependencies,
        buckets_of: Mapping[str, Sequence[BucketRefs]],
    ) -> None:
        """`buckets_of`: block → all buckets that are loaded with it."""
        self.access_order = AccessOrder()
        self._order = order
        self._buckets_of = buckets_of
        streamed = spec.streamed_blocks
        self._blocks = [block.name for block in streamed]
        self._number = {block: number for number, block in enumerate(self._blocks)}
        self._outside = {block.name for block in streamed if not block.repeated}
        self._slots_of = {block.name: spec.slots_of(block) for block in streamed}
        self._pools = [
            Pool(
                {
                    self._number[name]
                    for name, block_slots in self._slots_of.items()
                    if block_slots == slots
                },
                slots,
            )
            for slots in dict.fromkeys(self._slots_of.values())
        ]
        self.slots: list[str | None] = [None] * table.slots(Memory.WORKING)
        self._before: list[list[Ref]] = [[] for _ in self.slots]
        """Slot → the memory of its last block."""
        self._ring = Ring(Memory.WEIGHT_SLOT, table.slots(Memory.WEIGHT_SLOT))

    def loads(self, block: str) -> bool:
        """Return True if the block is loaded for its use."""
        return block in self._number

    @property
    def unused(self) -> list[str]:
        """Streamed blocks outside of layers that this pass has not used yet."""
        used = {self._blocks[number] for number in self.access_order.uses}
        return [name for name in self._blocks if name in self._outside - used]

    @property
    def resident(self) -> list[str]:
        """Blocks that have a slot."""
        return [block for block in self.slots if block is not None]

    def use(self, block: str, pinned: Collection[str], *, expected: bool = True) -> None:
        """Compute is about to read the block: load it if it has no slot, then prefetch.

        Args:
            expected: the next step will also use the block at this point.

        Raises:
            StreamError: all slots are taken by `pinned` blocks.
        """
        if block not in self.slots:
            self._load(block, self._room(block, pinned))
        refs = [bucket.working for bucket in self._buckets_of[block]]
        # Compute waits only for this block's load, or all-gather. Prefetches are launched
        # after that wait and run during the block's forward or backward.
        self._order.needs(Lane.COMPUTE, refs, f"use of {block}")
        if expected:
            self.access_order.used(self._number[block])
            self._load_ahead({block, *pinned})

    def restart(self, pinned: Collection[str]) -> None:
        """A pass is over and its weights may have changed: prefetch for the next pass."""
        self.access_order.restart()
        # These loads run during the updates of later blocks; each waits for the weights it reads.
        self._load_ahead(pinned)

    def reset(self) -> None:
        """No block has a slot, and nothing uses one."""
        self.slots = [None] * len(self.slots)
        # The lanes are idle: the next loads need not wait.
        self._before = [[] for _ in self.slots]

    def drop(self, block: str) -> None:
        """Free the block's slot, if it has one: its contents are not needed."""
        if block not in self.slots:
            return
        slot = self.slots.index(block)
        self.slots[slot] = None
        self._before[slot] = [bucket.working for bucket in self._buckets_of[block]]
        self._order.operations.append(Leave(block))
        # The user's code is no launch: this event represents its reads of the slot. The slot's next
        # load waits for compute up to here, not for later launches on compute.
        event = self._order.record(Lane.COMPUTE, f"use of {block}")
        self._order.was_read(self._before[slot], event)

    def _room(self, block: str, pinned: Collection[str]) -> int:
        free = self._free(block)
        if free is not None:
            return free
        occupants = [occupant for slot in self._slots_of[block] if (occupant := self.slots[slot])]
        movable = {self._number[b] for b in occupants if b not in pinned}
        leaving = victim(movable, self.access_order.future)
        if leaving is None:
            used = f"'{block}' is needed while {' and '.join(map(repr, occupants))} are in use"
            if block in self._outside:
                raise StreamError(
                    f"{used}, and there is one device slot for large modules outside of layers "
                    f'(zero_stage = 3): set keep_whole = ["{block}"]'
                )
            raise StreamError(
                f"{used}, and there are {len(occupants)} device slots for streamed blocks: set "
                f"device_slots = {len(occupants) + 1}"
            )
        slot = self.slots.index(self._blocks[leaving])
        self.drop(self._blocks[leaving])
        return slot

    def _free(self, block: str) -> int | None:
        return next((slot for slot in self._slots_of[block] if self.slots[slot] is None), None)

    def _load_ahead(self, pinned: Collection[str]) -> None:
        resident = {block: self._number[block] for block in self.resident}
        fixed = [resident[block] for block in pinned if block in resident]
        future = self.access_order.future
        for number, leaving in prefetches(resident.values(), fixed, future, self._pools):
            if leaving is not None:
                self.drop(self._blocks[leaving])
            block = self._blocks[number]
            slot = self._free(block)
            assert slot is not None
            self._load(block, slot)

    def _load(self, block: str, slot: int) -> None:
        buckets = self._buckets_of[block]
        self.slots[slot] = block
        for bucket in buckets:
            bucket.slot = slot
        # The slot is reused: loads into it wait for all uses of the previous block, or they
        # would overwrite weights that compute still reads.
        self._order.reuse([bucket.working for bucket in buckets], self._before[slot])
        self._order.operations.append(Enter(block, slot))
        for bucket in buckets:
            source, writes = (bucket.load_source,), (bucket.shard,)
            if bucket.loads_from_file:
                slot_on_host = self._ring.take(bucket.spec.shard_numel, bucket.spec.dtype)
                # disk_load, concurrently with compute and the previous bucket's load: waits for the
                # write of its source, and for the previous load out of the slot; its own load waits
                # for it.
                self._order.launch(
                    Launch(Kind.READ_WEIGHTS, Lane.DISK_LOAD, bucket.name, source, (slot_on_host,)),
                    fresh=slot_on_host,
                )
                source = (slot_on_host,)
            # load, while compute runs the previous blocks: waits for the update that writes its
            # source. On h2d it would queue after uploads that forward does not need yet.
            self._order.launch(
                Launch(Kind.LOAD, Lane.LOAD, bucket.name, source, writes), fresh=bucket.working
            )
            if bucket.spec.ranks > 1:
                gathered = (bucket.working,)
                # comm, concurrently with the load of the next bucket: waits for its own load.
                self._order.launch(Launch(Kind.ALL_GATHER, Lane.COMM, bucket.name, writes=gathered))


# Decisions about the access order of the previous step: prefetches and evictions. Pure functions of
# block numbers.


class AccessOrder:
    """The access order of the previous step, and the position of this step in it.

    Attributes:
        uses: the uses of this pass so far.
        missed: number of uses that the order did not contain.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        self.uses: list[int] = []
        self._next = 0
        self.missed = 0

    @property
    def differs(self) -> bool:
        """True if this pass left the known order; a pass that continues after its end (training
        after an evaluation) has not."""
        return bool(self.missed) and self.uses[: len(self._order)] != self._order

    @property
    def future(self) -> Sequence[int]:
        """The uses that are still to come; empty if unknown."""
        return self._order[self._next :]

    def used(self, block: int) -> None:
        """A block is used. This pass skips the order's uses before the block's next use."""
        if not self.uses or self.uses[-1] != block:
            self.uses.append(block)
        if self._next and self._order[self._next - 1] == block:
            return
        try:
            self._next = self._order.index(block, self._next) + 1
        except ValueError:
            self.missed += 1

    def restart(self) -> None:
        """A pass has ended: its uses become the order, unless it was only the order's beginning."""
        if len(self.uses) >= len(self._order) or self.missed:
            self._order = self.uses
        self.uses, self._next, self.missed = [], 0, 0


def next_use(block: int, future: Sequence[int]) -> int:
    """Return the position of the next use of `block`; the end if there is none."""
    return future.index(block) if block in future else len(future)


def victim(evictable: Collection[int], future: Sequence[int]) -> int | None:
    """Return the block to evict: the one needed last (Belady 1966); None if none is evictable."""
    return max(evictable, key=lambda block: (next_use(block, future), block), default=None)


class Pool(NamedTuple):
    """Blocks that share some slots."""

    members: Container[int]
    slots: Sequence[int]

    def of(self, blocks: Collection[int]) -> set[int]:
        return {block for block in blocks if block in self.members}


def prefetches(
    resident: Collection[int],
    pinned: Collection[int],
    future: Sequence[int],
    pools: Sequence[Pool],
) -> list[tuple[int, int | None]]:
    """Return (block to load, block to evict for it or None for a free slot), soonest needed first.

    No block is evicted that is needed before the block that replaces it, and no block is loaded
    before another that is needed sooner, whose load it would delay.
    """
    loaded, moves = set(resident), list[tuple[int, int | None]]()
    for block in future:
        if block in loaded:
            continue
        leaving = None
        pool = next(pool for pool in pools if block in pool.members)
        if len(in_pool := pool.of(loaded)) >= len(pool.slots):
            leaving = victim(in_pool - set(pinned), future)
            if leaving is None or next_use(leaving, future) <= next_use(block, future):
                break
            loaded.discard(leaving)
        loaded.add(block)
        moves.append((block, leaving))
    return moves
