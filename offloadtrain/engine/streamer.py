"""Parameter streaming: blocks whose weights live on the host take turns in a few device slots.

[Note: Streaming]
A streamed block's weights are on the host, and on the device only while a slot holds them. A use is
the block's forward, or the unpacking of one of its saved weights in backward; either makes sure
that the block has a slot and makes compute wait for its upload. The blocks that will be used next
are loaded ahead, in the order that the step before has shown; another order is served as it comes,
right and slower. Weights on the device are clean, so eviction moves nothing: the slot is free when
compute has done what it was given before. Two things pin a block: a forward of it that is running,
and its backward, from the first unpacking of something saved in its forward until something is
unpacked that was saved before: autograd runs nodes in the reverse of the order in which they were
made. While a block has no slot its parameters are NaN: whoever reads them past the engine sees it.

Among ranks each holds a shard of the weights, on its host or on its device. A load puts the shard
into its place in the slot and gathers the others around it; so every rank must use blocks in the
same order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from offloadtrain.engine.block import Block, Residence
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.collectives import Collectives
from offloadtrain.errors import OffloadTrainError
from offloadtrain.order import Cursor, prefetches, victim
from offloadtrain.transfer import Buffer, Event, Lane, Lanes, copy

_log = logging.getLogger(__name__)


class StreamError(OffloadTrainError):
    """More blocks are needed at once than there are slots."""


@dataclass(slots=True, eq=False)
class Slot:
    """Device memory of the largest streamed block, and who has it."""

    memory: Tensor
    block: Block | None = None
    free_after: Event | None = None


class Streamer:
    """Gives streamed blocks their slots."""

    def __init__(
        self,
        lanes: Lanes,
        collectives: Collectives,
        blocks: Sequence[Block],
        memories: Sequence[Tensor],
    ) -> None:
        """`memories`: one uint8 tensor per slot, as `block_bytes` of the largest block."""
        self._lanes = lanes
        self._collectives = collectives
        self.blocks = list(blocks)
        self._number = {block: number for number, block in enumerate(blocks)}
        self._slots = [Slot(memory) for memory in memories]
        self._cursor = Cursor()
        self._told = False
        self._open = False
        """Parameters show the host's copy."""
        self._running: dict[int, dict[Block, int]] = {}
        """Graph task → blocks whose backward it is in, and when the oldest of what it has unpacked
        of them was saved."""
        self._unpacking = 0
        self._latest: Block | None = None
        """Used last: in its slot, waited for, and what follows it is on its way."""
        for block in blocks:
            block.streamer = self
            self._lay_out(block, self._slots[0])

    @property
    def resident(self) -> list[Block]:
        """Blocks that have a slot."""
        return [slot.block for slot in self._slots if slot.block is not None]

    def owner(self, tensor: Tensor) -> tuple[Block, Bucket] | None:
        """Whose weights a tensor is a view of, if it lies in a slot."""
        address = tensor.untyped_storage().data_ptr()
        for slot in self._slots:
            if slot.block is not None and slot.memory.data_ptr() == address:
                return slot.block, _bucket_of(slot.block, tensor)
        return None

    def use(self, block: Block) -> None:
        """Compute is about to read the block: load it if need be, and what comes after it."""
        self._forget_ended()
        if block not in self.resident:
            self._load(block, self._slot_for(block))
        block.wait_uploaded(Lane.COMPUTE)
        self._cursor.used(self._number[block])
        self._load_ahead(block)
        self._latest = block

    def passed(self, clock: int) -> dict[Block, int]:
        """Backward is at a node that saved something then; what was saved later is done with.
        Returns what is pinned in it."""
        pinned = self._running.setdefault(torch._C._current_graph_task_id(), {})
        if not self._unpacking:
            for other in [other for other, saved in pinned.items() if saved > clock]:
                del pinned[other]
        return pinned

    @contextmanager
    def unpacking(self) -> Iterator[None]:
        """What is unpacked meanwhile are the inputs of a recompute: it lies before the node that
        backward is at, and does not tell where that is."""
        self._unpacking += 1
        try:
            yield
        finally:
            self._unpacking -= 1

    def unpacked(self, block: Block, clock: int) -> None:
        """A node of the graph is about to read something saved in a forward of the block, and may
        be about to run that forward again."""
        self.passed(clock).setdefault(block, clock)
        if block is not self._latest:
            self.use(block)

    def restart(self) -> None:
        """A micro-step is over, its weights may have changed: begin to load for the next one."""
        self._running.clear()
        self._latest = None
        if self._open:
            self._open = False
            for block in self.blocks:
                if block.residence is Residence.HOST:
                    block.left_device()
        self._tell_misses()
        self._cursor.restart()
        self._load_ahead(None)

    def evict(self, block: Block) -> None:
        """Take the block's slot away, if it has one."""
        if block is self._latest:
            self._latest = None
        for slot in self._slots:
            if slot.block is block:
                block.left_device()
                slot.block, slot.free_after = None, self._lanes.record(Lane.COMPUTE)

    def pinned(self, block: Block) -> bool:
        """Whether its slot must not be taken away."""
        return block.forwards > 0 or any(block in pinned for pinned in self._running.values())

    def lay_open(self) -> None:
        """The lanes are idle: parameters show the host's copy, until their next use. Where that is
        a shard, they stay as they are."""
        if not self._collectives.ranks.alone:
            return
        for block in self.blocks:
            if not block.forwards:  # somebody asks from inside of its forward
                self.evict(block)
                block.lay_open()
        self._open = True

    def leave(self) -> None:
        """Parameters keep their weights, in memory of their own on the host; not where the host has
        a shard of them: then they are gone."""
        if not self._collectives.ranks.alone:
            return
        self.lay_open()
        for block in self.blocks:
            for bucket in block.held:
                for slot in bucket.slots:
                    slot.param.data = slot.param.data.clone()

    def _tell_misses(self) -> None:
        if self._cursor.differs and not self._told:
            self._told = True
            _log.warning(
                "blocks were used in another order than in the step before: %d loads could not "
                "begin ahead of their use. The result is the same, the step is slower.",
                self._cursor.missed,
            )

    def _load_ahead(self, using: Block | None) -> None:
        pinned = [self._number[b] for b in self.resident if b is using or self.pinned(b)]
        resident = [self._number[block] for block in self.resident]
        moves = prefetches(resident, pinned, self._cursor.future, len(self._slots))
        for number, leaving in moves:
            if leaving is not None:
                self.evict(self.blocks[leaving])
            self._load(self.blocks[number], self._free_slot())

    def _slot_for(self, block: Block) -> Slot:
        free = [slot for slot in self._slots if slot.block is None]
        if free:
            return free[0]
        evictable = [self._number[b] for b in self.resident if not self.pinned(b)]
        leaving = victim(evictable, self._cursor.future)
        if leaving is None:
            names = ", ".join(f"'{b.name}'" for b in self.resident)
            raise StreamError(
                f"block '{block.name}' is needed while {names} are in use, and there are "
                f"{len(self._slots)} device slots for streamed blocks: set device_slots = "
                f"{len(self._slots) + 1}"
            )
        self.evict(self.blocks[leaving])
        return self._free_slot()

    def _free_slot(self) -> Slot:
        return next(slot for slot in self._slots if slot.block is None)

    def _forget_ended(self) -> None:
        """Backwards inside of this one are over: they have larger numbers."""
        now = torch._C._current_graph_task_id()
        for task in [task for task in self._running if task > now]:
            del self._running[task]

    def _load(self, block: Block, slot: Slot) -> None:
        if slot.free_after is not None:
            self._lanes.wait(Lane.LOAD, slot.free_after, "compute has done with the slot")
            slot.free_after = None
        slot.block = block
        self._lay_out(block, slot)
        for bucket in block.held:
            if bucket.weight_ready is not None:
                self._lanes.wait(Lane.LOAD, bucket.weight_ready, f"weights of {bucket.name}")
                bucket.weight_ready = None
            whole, source = bucket.working.whole, bucket.visible.whole
            self._lanes.alloc(whole, Lane.LOAD)
            self._lanes.launch(Lane.LOAD, f"load {bucket.name}", copy, [source], [bucket.shard])
            bucket.visible_free_after = self._lanes.record(Lane.LOAD)
            self._collectives.all_gather(bucket.name, whole, bucket.visible_free_after)
        block.entered_device(self._lanes.record(self._collectives.load_lane))

    @staticmethod
    def _lay_out(block: Block, slot: Slot) -> None:
        offset = 0
        for bucket in block.held:
            nbytes = bucket.numel * bucket.dtype.itemsize
            with torch.inference_mode(False):
                flat = slot.memory[offset : offset + nbytes].view(bucket.dtype)
            bucket.working = Buffer(f"working {bucket.name}", flat)
            offset += nbytes


def block_bytes(block: Block) -> int:
    """Device memory of a block's working weights; every bucket starts on 256 bytes."""
    return sum(bucket.numel * bucket.dtype.itemsize for bucket in block.held)


def _bucket_of(block: Block, tensor: Tensor) -> Bucket:
    at = tensor.storage_offset() * tensor.element_size()
    for bucket in block.held:
        flat = bucket.working.flat
        start = flat.storage_offset() * flat.element_size()
        if start <= at < start + flat.numel() * flat.element_size():
            return bucket
    raise StreamError(f"a tensor lies in the slot of '{block.name}' and in none of its buckets")
