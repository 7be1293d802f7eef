"""A change between two steps: of parameters, groups, microbatches in a step, the tier of state.

[Note: Changes between steps]
Blocks, buckets and memory follow from the parameters that require gradients, their groups, the
number of microbatches and `state_on`. If one of them changes, the lanes are emptied, the engine
leaves the model, and another one is built as `offload()` does it, over the same lanes and for the
same optimizer. Gradients, staging and copies of weights are given back first. Then masters and
moments are copied parameter by parameter, and a bucket's memory is given back with its last
parameter: at most one bucket is there twice. The optimizer, its `param_groups`, the step count, the
loss scale and the seed stay.

What happens to a parameter is what `torch.optim` does. One that is frozen is left out of the step;
its state, master weights included, waits in `optimizer.state` (in memory of its own on the host)
until it is trained again. One that was never trained begins with its working weights as the master,
no moments and step 0. Parameters of one bucket are updated by one call, with one step: a bucket
holds parameters that have missed the same number of steps (`Bucket.missed_steps`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import HostMemoryError
from offloadtrain.config.units import format_bytes
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.buffers import MemoryMap
from offloadtrain.engine.state import load, master
from offloadtrain.optim import Rule
from offloadtrain.step.layout.buffer_table import arena_rows
from offloadtrain.step.layout.buffers import BufferKey, Memory, span_bytes
from offloadtrain.step.layout.step_spec import StepSpec

_log = logging.getLogger(__name__)

_MANY_CHANGES = 10
"""Changes of the trained parameters; so many in the first steps mean parts that take turns."""


class Earlier:
    """The layout before a change, whose state moves to the new one.

    Attributes:
        missed: parameter → steps of the run that it has not made.
        num_bytes: the host memory of the layout.
    """

    def __init__(
        self,
        memory: MemoryMap,
        blocks: Sequence[Block],
        states: Mapping[Tensor, Any],
        keep: Callable[[nn.Parameter, Mapping[str, Tensor]], None],
        *,
        missed: Mapping[nn.Parameter, int],
        num_bytes: int,
    ) -> None:
        """`states`: by parameter, trained or frozen. `keep`: moves that of a frozen parameter to
        memory of its own; with an empty one it gives the memory back."""
        self._memory, self._states, self._keep = memory, states, keep
        self.missed, self.num_bytes = missed, num_bytes
        buckets = [bucket for block in blocks for bucket in block.all_buckets]
        self._slot_of = {slot.param: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        self._waiting = {bucket: len(bucket.slots) for bucket in buckets}
        """Bucket → how many of its parameters have not moved."""

    def prepare(self) -> None:
        """Give back what holds neither state nor weights. No engine uses the memory any more."""
        self._release_but({key for bucket in self._waiting for key in self._contents(bucket)})

    def finish(self) -> None:
        """Everything has moved: give back what is left, that of parameters that left the model and
        keep their weights."""
        for param in self._slot_of:
            param.data = param.data.clone()
        self._release_but(())

    def __contains__(self, param: nn.Parameter) -> bool:
        """Tell whether a parameter's weights may be in the memory."""
        return param in self._slot_of

    def carry(self, bucket: Bucket, slot: Slot, rule: Rule) -> Tensor | None:
        """Set the state of a parameter in its new bucket. Returns the weights that its master is to
        be set from, of its shape; None if the master is there."""
        old, old_slot = self._slot_of.get(slot.param, (bucket, slot))
        if old is not bucket and old.is_trained:
            pieces = zip(bucket.state_of(slot), old.state_of(old_slot), strict=True)
            for target, source in pieces:
                target.copy_(source)
            return None
        weights = slot.local.data
        if not (state := self._states.get(slot.param)):
            return weights
        load(bucket, slot, rule, state, None)
        masters, weights = slot.shaped(master(bucket, slot)), weights.cpu()
        # What was written while it was frozen is true; the rest has the masters' precision.
        written = state.get("weight", masters.to(weights.dtype)) != weights
        self._keep(slot.param, {})
        return torch.where(written, weights.float(), masters) if bool(written.any()) else None

    def carry_frozen(self, bucket: Bucket, slot: Slot) -> None:
        """Copy this rank's shard of a frozen parameter, which has no other weights."""
        old, old_slot = self._slot_of[slot.param]
        bucket.weights_of(slot).copy_(old.weights_of(old_slot))

    def moved(self, params: Iterable[nn.Parameter]) -> None:
        """These parameters are views of the new layout: give back the buckets that nothing
        views."""
        for param in [param for param in params if param in self._slot_of]:
            bucket, _ = self._slot_of.pop(param)
            if bucket.is_trained and not param.requires_grad:
                self._keep(param, self._states[param])
            self._waiting[bucket] -= 1
            if not self._waiting[bucket]:
                contents = self._contents(bucket)
                self._release_but(self._memory.keys() - contents)

    def _release_but(self, keys: Collection[BufferKey]) -> None:
        self._memory.release([key for key in self._memory if key not in keys])

    def _contents(self, bucket: Bucket) -> set[BufferKey]:
        """Return the keys of a bucket's state and of what its parameters view."""
        table, state = self._memory.table, (Memory.STATE, Memory.STATE_FILE)
        keys = {
            key
            for key in table.of_bucket.get(bucket.name, ())
            if key.kind is Memory.WORKING or (key.kind in state and key.version == bucket.copy)
        }
        return keys.union(table.sources.get(bucket.name, ()))


def check_room(spec: StepSpec, available: int) -> None:
    """Raises HostMemoryError if a layout needs more than is available: moving ends half-way."""
    if (needed := span_bytes(arena_rows(spec))) > available:
        raise HostMemoryError(
            f"the change needs {format_bytes(needed)} of host memory in all, and "
            f"{format_bytes(available)} are there for it. Nothing has changed"
        )


def warn_of_turns(changes: int, steps: int) -> None:
    """Warn of parts that are trained in turn, once there were many changes in few steps."""
    if changes == _MANY_CHANGES and steps < 2 * _MANY_CHANGES:
        _log.warning(
            "what is trained has changed %d times in %d steps, and each change moves all state, "
            "which takes about as long as offload(): freeze a model as a whole, or give parts that "
            "take turns an optimizer each",
            *(changes, steps),
        )
