"""The hooks through which autograd tells the engine that a parameter has its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Slot
from offloadtrain.engine.engine import Engine


def hook_parameters(engine: Engine, blocks: Sequence[Block]) -> list[Any]:
    """Report the gradient of every trained parameter to the engine, which they do not keep alive;
    returns the handles of the hooks."""
    alive = weakref.ref(engine)
    return [
        slot.param.register_post_accumulate_grad_hook(partial(_deliver, alive, block, slot))
        for block in blocks
        for bucket in block.buckets
        for slot in bucket.slots
    ]


def _deliver(engine: weakref.ref[Engine], block: Block, slot: Slot, param: Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.deliver(block, slot)
