"""Who reads which block's weights now, and what the parameters of a streamed block are views of."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.interpreter import Interpreter
from offloadtrain.engine.memory_map import MemoryMap
from offloadtrain.step.program import Program
from offloadtrain.step.streaming import StreamError

_log = logging.getLogger(__name__)


class Residency:
    """Tells the program of uses, and carries out where it puts blocks.

    What pins a block: see [Note: Streaming] in `step.streaming`.
    """

    interpreter: Interpreter

    def __init__(self, blocks: Sequence[Block], program: Program, memory: MemoryMap) -> None:
        self.streamed = [block for block in blocks if block.streamed]
        self._alone = program.spec.is_single
        self._program = program
        self.memory = memory
        self._blocks = {block.name: block for block in blocks}
        self._buckets = {bucket.name: bucket for block in blocks for bucket in block.held}
        self._exposed: set[Block] = set()
        """Their parameters are the host's copy."""
        self._running: dict[int, dict[Block, int]] = {}
        """Graph task → blocks whose backward it is in, and when the oldest of what it has unpacked
        of them was saved."""
        self._unpacking = 0
        self._latest: Block | None = None
        """Used last: in its slot, waited for, and what follows it is on its way."""
        self._told = False
        self._slot_at = {slot.data_ptr(): number for number, slot in enumerate(memory.slots)}
        for block in blocks:
            block.source = self
        for bucket in (bucket for block in self.streamed for bucket in block.held):
            bucket.working = memory.in_slot(bucket, 0)

    @property
    def resident(self) -> list[Block]:
        """Streamed blocks that have a slot."""
        return [self._blocks[name] for name in self._program.streaming.resident]

    def owner(self, tensor: Tensor) -> tuple[Block, Bucket] | None:
        """Whose weights a tensor is a view of, if it lies in a slot."""
        slot = self._slot_at.get(tensor.untyped_storage().data_ptr())
        name = None if slot is None else self._program.streaming.slots[slot]
        if name is None:
            return None
        return self._blocks[name], _bucket_of(self._blocks[name], tensor)

    # What the engine tells.

    def use(self, block: Block) -> None:
        """Compute is about to read the block."""
        if not block.streamed:
            self.interpreter.run(self._program.use(block.name))
            return
        self._forget_ended()
        self.interpreter.run(self._program.use(block.name, self._pinned()))
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
        if not block.streamed:
            return
        self.passed(clock).setdefault(block, clock)
        if block is not self._latest:
            self.use(block)

    def restart(self) -> None:
        """A micro-step is over, its weights may have changed: begin to load for the next one."""
        self._running.clear()
        self._latest = None
        for block in self._exposed:
            block.leave_device()
        self._exposed.clear()
        self._tell_misses()
        self.interpreter.run(self._program.pass_begins(self._pinned()))

    def reset(self) -> None:
        """The lanes are empty, and no streamed block has a slot any more."""
        self._running.clear()
        self._latest = None
        self._exposed.clear()
        for block in self.streamed:
            block.leave_device()

    def pinned(self, block: Block) -> bool:
        """Whether its slot must not be taken away."""
        return block.forwards > 0 or any(block in pinned for pinned in self._running.values())

    def expose_host_weights(self) -> None:
        """The lanes are idle: parameters show the host's copy, until their next use. Where that is
        a shard, they stay as they are."""
        if not self._alone:
            return
        for block in self.streamed:
            if not block.forwards:  # somebody asks from inside of its forward
                self.interpreter.run(self._program.drop_slot(block.name))
                block.expose_host_weights()
                self._exposed.add(block)

    def close(self) -> None:
        """Parameters keep their weights, in memory of their own on the host; not where the host has
        a shard of them: then they are gone."""
        if not self._alone:
            return
        self.expose_host_weights()
        for bucket in (bucket for block in self.streamed for bucket in block.held):
            for slot in bucket.slots:
                slot.param.data = slot.param.data.clone()

    # What the program says.

    def enter(self, block: str, slot: int) -> None:
        """A block takes a slot: its parameters are views of it."""
        entering = self._blocks[block]
        self._exposed.discard(entering)
        for bucket in entering.held:
            bucket.working = self.memory.in_slot(bucket, slot)
        entering.enter_device()

    def leave(self, block: str) -> None:
        """A block gives its slot away."""
        leaving = self._blocks[block]
        if leaving is self._latest:
            self._latest = None
        leaving.leave_device()

    def renew(self, block: str) -> None:
        """A block's weights change: graphs built before are stale."""
        self._blocks[block].generation += 1

    def swap(self, bucket: str) -> None:
        """The other copy of a bucket's state becomes the state."""
        self._buckets[bucket].swap_state()

    def _pinned(self) -> list[str]:
        return [block.name for block in self.resident if self.pinned(block)]

    def _forget_ended(self) -> None:
        """Backwards inside of this one are over: they have larger numbers."""
        now = torch._C._current_graph_task_id()
        for task in [task for task in self._running if task > now]:
            del self._running[task]

    def _tell_misses(self) -> None:
        access_order = self._program.streaming.access_order
        if access_order.differs and not self._told:
            self._told = True
            _log.warning(
                "blocks were used in another order than in the step before: %d loads could not "
                "begin ahead of their use. The result is the same, the step is slower.",
                access_order.missed,
            )


def _bucket_of(block: Block, tensor: Tensor) -> Bucket:
    at = tensor.storage_offset() * tensor.element_size()
    for bucket in block.held:
        flat = bucket.working.flat
        start = flat.storage_offset() * flat.element_size()
        if start <= at < start + flat.numel() * flat.element_size():
            return bucket
    raise StreamError(f"a tensor lies in the slot of '{block.name}' and in none of its buckets")
