"""Forwards whose backward is to come: see [Note: Before a gather] in `engine.gradients`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from offloadtrain.engine.autograd.hooks import is_reached
from offloadtrain.engine.block import Block


class InFlight:
    """Tells when blocks were read in the forward whose backward runs.

    As a rule that is any forward since the last micro-step, as one backward may be of several. In a
    pipeline microbatches are forward before the backward of earlier ones, in order: each has clocks
    of its own, since a block's first forward of all says nothing of the others.
    """

    def __init__(self, blocks: Sequence[Block], *, in_order: bool) -> None:
        """`in_order`: each backward is that of the oldest forward without one."""
        self._blocks, self._in_order = blocks, in_order
        self._earlier: deque[dict[Block, tuple[int, int]]] = deque()
        """Of every forward but the last one: block → its first and its last clock."""
        self._foreign_task = -1
        for block in blocks:
            block.in_order = in_order

    def forward_begins(self) -> None:
        """A forward of the model begins that is not part of a backward."""
        if not self._in_order or not torch.is_grad_enabled():
            return
        # If there is one: the first of all follows none, and another may have had its backward.
        if any(block.first_clock for block in self._blocks):
            self._earlier.append(
                {block: (block.first_clock, block.clock) for block in self._blocks}
            )
        self._forget()

    def clocks(self, block: Block) -> tuple[int, int]:
        """Return when the block was first and last read; (0, …): not at all."""
        return self._earlier[0][block] if self._earlier else (block.first_clock, block.clock)

    def backward_ends(self) -> None:
        if self._earlier:
            self._earlier.popleft()
        else:
            self._forget()

    def drop(self) -> None:
        """No backward is to come."""
        self._earlier.clear()
        self._forget()

    def will_deliver(self, trained: Sequence[Block]) -> bool:
        """Tell whether the backward in progress is a plain one of this model: it reaches parameters
        that a forward has read. One of another model through this one's frozen weights does not."""
        task = torch._C._current_graph_task_id()
        if task == self._foreign_task:
            return False
        read = (block for block in reversed(trained) if block.first_clock)
        params = (slot.param for block in read for bucket in block.buckets for slot in bucket.slots)
        if any(map(is_reached, params)):
            return True
        self._foreign_task = task
        return False

    def _forget(self) -> None:
        for block in self._blocks:
            block.first_clock = 0
