"""Residence of streamed blocks: the pins that hold them, and the memory their parameters view."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offloadtrain.engine.block import CLOSED, Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.buffers import MemoryMap
from offloadtrain.engine.interpreter import Interpreter
from offloadtrain.runtime.arena import with_own_storage
from offloadtrain.runtime.process_group import ALONE, lost
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.streaming import StreamError

_log = logging.getLogger(__name__)


class Resident:
    """The source of blocks that stay on the device: compute waits for an upload, never a load."""

    def __init__(self, residency: Residency, program: Program) -> None:
        self._residency, self._program = residency, program

    def use(self, block: Block, *, expected: bool = True) -> None:
        # Compute waits for the block's own upload; later blocks' uploads run during its forward.
        self._residency.interpreter.run(self._program.use, block.name)
        block.views.set_ready(ready=True)

    def unpacked(self, block: Block, clock: int) -> None:
        """The weights are where the graph left them."""

    def is_at(self, block: Block, clock: int) -> bool:
        return True

    def pinned(self, block: Block) -> bool:
        return block.forwards > 0


class Residency:
    """Reports uses to the program, and carries out its slot changes. The source of streamed blocks.

    Pins: see [Note: Streaming] in `step.program.streaming`.

    Attributes:
        blocks: by name.
        stationary, streamed: those with and without a place of their own on the device.
        is_single: one rank has all weights.
    """

    interpreter: Interpreter

    def __init__(self, blocks: Sequence[Block], program: Program, memory: MemoryMap) -> None:
        self.stationary: list[Block] = []
        self.streamed: list[Block] = []
        resident = Resident(self, program)
        for block in blocks:
            (self.streamed if block.streamed else self.stationary).append(block)
            block.source = self if block.streamed else resident
        self.is_single = program.spec.is_single
        self._program = program
        self.memory = memory
        self.blocks = {block.name: block for block in blocks}
        self._buckets = {bucket.name: bucket for block in blocks for bucket in block.all_buckets}
        self._exposed: set[Block] = set()
        """Blocks whose parameters are views of the host's copy."""
        self._running: dict[int, dict[Block, int]] = {}
        """Graph task → block whose backward it is in → the clock of the oldest saved tensor of it
        that was unpacked."""
        self._unpacking = 0
        self._latest: Block | None = None
        """The block used last: in its slot, waited for, and the blocks after it are on their
        way."""
        self._at: tuple[int, int] | None = None
        """Graph task and clock of the last read of `_latest` in a backward, whose pins are set."""
        self._has_warned = False
        self.on_backward: Callable[[int, Block | None], None] | None = None
        """Called in front of a use in backward, with the clock that it has come to, and the block
        whose forward runs again there."""
        for block in blocks:
            for bucket in block.all_buckets:
                bucket.memory = memory
        for bucket in (bucket for block in self.streamed for bucket in block.all_buckets):
            bucket.place = program.spec.first_slot(bucket.spec)

    @property
    def resident(self) -> list[Block]:
        """Streamed blocks that have a slot."""
        return [self.blocks[name] for name in self._program.streaming.resident]

    def owner(self, slot: int, tensor: Tensor) -> tuple[Block, Bucket] | None:
        """Return the block and bucket whose weights a tensor in this slot views, if it has one."""
        name = self._program.streaming.slots[slot]
        if name is None:
            return None
        at = tensor.storage_offset() * tensor.element_size()
        for bucket in self.blocks[name].all_buckets:
            flat = bucket.working.flat
            start = flat.storage_offset() * flat.element_size()
            if start <= at < start + flat.numel() * flat.element_size():
                return self.blocks[name], bucket
        raise StreamError(f"a tensor lies in the slot of '{name}' and in none of its buckets")

    # Calls of the engine.

    def describe_lost_rank(self, exchange: str) -> str:
        """Return the message for a collective that has failed. The usual cause, which Gloo may
        report by ending the other process, is a module that only some ranks use."""
        message = lost(f"rank {ALONE.world_rank}, in '{exchange}',")
        if not (unused := self._program.streaming.unused):
            return message
        weights = (
            slot.name for name in unused for b in self.blocks[name].all_buckets for slot in b.slots
        )
        return (
            f"{message}. This pass of this rank has not used {', '.join(map(repr, weights))} so "
            "far. In ZeRO stage 3 all ranks use the same modules in the same order; for modules "
            f"outside of layers that only some use set keep_whole = {json.dumps(unused)}"
        )

    @property
    def gathers(self) -> bool:
        """Weights of some blocks are in shards, which forwards gather (ZeRO stage 3)."""
        return bool(self.streamed) and not self.is_single

    def use(self, block: Block, *, expected: bool = True) -> None:
        """Compute is about to read the block; `expected`: see `Streaming.use`."""
        # Backwards that are over release their pins: those inside the current one have larger
        # numbers, and outside of any backward all are over.
        now, self._at = torch._C._current_graph_task_id(), None
        for task in [task for task in self._running if task > now]:
            del self._running[task]
        # Before the loads: the other ranks run their all-gathers after the same reduce-scatters.
        if self.on_backward is not None and now >= 0:
            self.on_backward(block.clock.last, block)
        # Compute waits for the block's load; the next blocks' loads go to slots without a pin.
        self.interpreter.run(self._program.use, block.name, self._pinned(), expected=expected)
        self._latest = block

    def passed(self, clock: int) -> dict[Block, int]:
        """Backward has reached a node that saved a tensor at `clock`: release the pins of blocks
        saved later. Returns the blocks still pinned by this backward."""
        task = torch._C._current_graph_task_id()
        if self._at == (task, clock):
            return self._running[task]
        self._at, pinned = None, self._running.setdefault(task, {})
        # A pin ends here, not with the block's last handle: a retained graph keeps handles alive,
        # and would keep its blocks in the slots.
        if not self._unpacking:
            for other in [other for other, saved in pinned.items() if saved > clock]:
                del pinned[other]
        return pinned

    @contextmanager
    def unpacking(self) -> Iterator[None]:
        """Keep all pins while the inputs of a recompute are unpacked: they were saved earlier than
        the node that backward is at."""
        self._unpacking += 1
        try:
            yield
        finally:
            self._unpacking -= 1

    def is_at(self, block: Block, clock: int) -> bool:
        """Tell whether the read before this one in the same backward was of the same forward of the
        block: it is pinned, and compute has waited for it."""
        return block is self._latest and self._at == (torch._C._current_graph_task_id(), clock)

    def unpacked(self, block: Block, clock: int) -> None:
        """A node of the graph is about to read a tensor saved in a forward of the streamed block,
        and may be about to run that forward again."""
        # The pin comes before the use, whose loads ahead must not take the block's slot.
        pinned = self.passed(clock)
        known = block in pinned and not self.is_single
        pinned.setdefault(block, clock)
        # Where a layer reads two blocks in turn, ranks may do so more or less often: the loads
        # ahead follow the first reads, which all ranks make. The pin has kept the slot.
        if known and block.name in self._program.streaming.slots:
            return
        if block is not self._latest:
            if self.on_backward is not None and not self._unpacking:
                self.on_backward(clock, None)
            self.use(block)
        # While the inputs of a recompute are unpacked, later pins are kept that end afterwards.
        self._at = None if self._unpacking else (torch._C._current_graph_task_id(), clock)

    def end_backward(self) -> None:
        """No backward runs: the next one needs the slots, also where no forward comes first."""
        self._running.clear()
        self._at = None

    def restart(self) -> None:
        """A micro-step is over and its weights may have changed: load ahead for the next one."""
        self._running.clear()
        self._latest = self._at = None
        # The host's copy may be written by the next update: parameters must not show it then.
        for block in self._exposed:
            block.leave_device()
        self._exposed.clear()
        access_order = self._program.streaming.access_order
        if access_order.differs and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "blocks were used in another order than in the step before: %d loads could not "
                "begin ahead of their use. The result is the same, the step is slower.",
                access_order.missed,
            )
        # Launches loads into slots without a pin, while compute and the host still run.
        self.interpreter.run(self._program.begin_pass, self._pinned())

    def reset(self) -> None:
        """The lanes are empty, and no streamed block has a slot any more."""
        self._running.clear()
        self._latest = self._at = None
        self._exposed.clear()
        for block in self.streamed:
            block.leave_device()

    def pinned(self, block: Block) -> bool:
        """Tell whether a forward or a backward in progress needs the streamed block's slot."""
        return block.forwards > 0 or any(block in pinned for pinned in self._running.values())

    def shows_host(self, block: Block) -> bool:
        """Tell whether a block's parameters are views of the host's copy."""
        return block in self._exposed

    def show_host_weights(self) -> None:
        """The lanes are idle: make parameters views of the host's copy until their next use. Where
        that is a shard, they stay as they are."""
        for block in self.stationary:
            block.views.set_ready(ready=True)
        for block in self.streamed if self.is_single else ():
            # A block whose forward is running keeps its slot: the call comes from inside it.
            if not block.forwards:
                self.interpreter.run(self._program.drop_slot, block.name)
                block.views.show_host()
                self._exposed.add(block)

    def close(self, *, has_successor: bool = False) -> None:
        """Leave the host memory of streamed weights to their parameters: the host may have no room
        for a copy. Where the host has a shard of them, parameters become empty: an error tells
        whoever reads them. With a successor they become NaN of their shape."""
        self.show_host_weights()
        # Not tensors of a user's inference mode, which could not be trained again.
        with torch.inference_mode(False):
            for bucket in (bucket for block in self.streamed for bucket in block.all_buckets):
                # A mapped file lives as long as its views.
                on_disk = self._program.buckets[bucket.name].loads_from_file
                for slot in bucket.slots:
                    if not self.is_single:
                        no_weights = slot.local.data.new_empty(0)
                        if has_successor:
                            no_weights = slot.local.data.new_full((), math.nan).expand(slot.shape)
                        slot.local.data = no_weights
                    elif not on_disk:
                        weights = bucket.weights_of(slot)
                        on_host = weights.device.type == "cpu"
                        weights = with_own_storage(weights) if on_host else weights.clone()
                        slot.local.data = slot.shaped(weights)
        # Ends the engine's reference cycles: the host memory that it refers to is free at once, and
        # not with a later collection of garbage.
        for block in self.blocks.values():
            block.source = CLOSED
        self.interpreter.close()
        del self.interpreter

    # Operations of the program.

    def enter(self, block: str, slot: int) -> None:
        """A block takes a slot, or another version: its parameters are views of it."""
        entering = self.blocks[block]
        self._exposed.discard(entering)
        for bucket in entering.all_buckets:
            bucket.place = slot
        entering.views.show_slot()

    def leave(self, block: str) -> None:
        """A block gives up its slot."""
        leaving = self.blocks[block]
        # Its next use must ask the program for a slot and a load again.
        if leaving is self._latest:
            self._latest = None
        leaving.leave_device()

    def renew(self, block: str, by: int) -> None:
        """A block's weights change: graphs built before are stale. `by`: -1 for the version before,
        whose graphs are not."""
        self.blocks[block].graphs.generation += by
        # The next read, by a module's forward or by a function of torch, waits for the upload.
        self.blocks[block].views.set_ready(ready=False)

    def swap(self, bucket: str) -> None:
        """The other copy of a bucket's state becomes the state."""
        # Views of `state` that a user holds show the old copy from here on.
        self._buckets[bucket].copy ^= 1

    def flip(self, bucket: str) -> None:
        """The other version of a bucket's weights is the one that loads read."""
        self._buckets[bucket].version ^= 1

    def _pinned(self) -> list[str]:
        slots, blocks = self._program.streaming.slots, self.blocks
        return [name for name in slots if name is not None and self.pinned(blocks[name])]
