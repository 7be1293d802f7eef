"""Changes between two steps: of parameters, groups, microbatches per step, or the tier of state.

[Note: Changes between steps]
Blocks, buckets and memory follow from the parameters that require gradients, their groups, the
number of microbatches and `state_on`. If one of them changes, the lanes are drained, the engine
leaves the model, and another engine is built as in `offload()`, over the same lanes and for the
same optimizer. Gradients, staging and copies of weights are released first. Then masters and
moments are copied parameter by parameter, and a bucket's memory is released with its last
parameter: at most one bucket exists twice. The optimizer, its `param_groups`, the step count, the
loss scale and the seed stay.

Parameters are treated as in `torch.optim`. A frozen parameter is left out of the step;
its state, including master weights, waits in `optimizer.state` (in separate memory on the host)
until it is trained again. A parameter that was never trained starts with its working weights as the
master, no moments and step 0. Parameters of one bucket are updated by one call, with one step: a
bucket holds parameters that have missed the same number of steps (`Bucket.missed_steps`).
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
"""Number of changes of the trained parameters after which parts seem to be trained in turn."""


class Earlier:
    """The layout before a change, whose state moves to the new layout.

    Attributes:
        missed: parameter → steps of the run in which it was not updated.
        num_bytes: host memory of the layout, in bytes.
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
        """`states`: state per parameter, trained or frozen. `keep`: copies the state of a frozen
        parameter to separate memory; with an empty state it releases that memory."""
        self._memory, self._states, self._keep = memory, states, keep
        self.missed, self.num_bytes = missed, num_bytes
        buckets = [bucket for block in blocks for bucket in block.all_buckets]
        self._slot_of = {slot.param: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        self._waiting = {bucket: len(bucket.slots) for bucket in buckets}
        """Bucket → number of its parameters that have not moved."""

    def prepare(self) -> None:
        """Release buffers that hold neither state nor weights. No engine uses the memory any
        more."""
        self._release_but({key for bucket in self._waiting for key in self._contents(bucket)})

    def finish(self) -> None:
        """Everything has moved: release the remaining buffers, those of parameters that left the
        model and keep their weights."""
        for param in self._slot_of:
            param.data = param.data.clone()
        self._release_but(())

    def __contains__(self, param: nn.Parameter) -> bool:
        """Return True if a parameter's weights may be in this layout's memory."""
        return param in self._slot_of

    def carry(self, bucket: Bucket, slot: Slot, rule: Rule) -> Tensor | None:
        """Set the state of a parameter in its new bucket. Returns weights, in the parameter's
        shape, to set its master from; None if the master is set."""
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
        # Values written while it was frozen count; the other elements keep the masters' precision.
        written = state.get("weight", masters.to(weights.dtype)) != weights
        self._keep(slot.param, {})
        return torch.where(written, weights.float(), masters) if bool(written.any()) else None

    def carry_frozen(self, bucket: Bucket, slot: Slot) -> None:
        """Copy this rank's shard of a frozen parameter, which has no other weights."""
        old, old_slot = self._slot_of[slot.param]
        bucket.weights_of(slot).copy_(old.weights_of(old_slot))

    def moved(self, params: Iterable[nn.Parameter]) -> None:
        """These parameters are views of the new layout now: release the buckets that no parameter
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
        """Return the keys of a bucket's state and of the weights that its parameters view."""
        table, state = self._memory.table, (Memory.STATE, Memory.STATE_FILE)
        keys = {
            key
            for key in table.of_bucket.get(bucket.name, ())
            if key.kind is Memory.WORKING or (key.kind in state and key.version == bucket.copy)
        }
        return keys.union(table.sources.get(bucket.name, ()))


def check_room(spec: StepSpec, available: int) -> None:
    """Raises HostMemoryError if a layout does not fit: a move could not be completed."""
    if (needed := span_bytes(arena_rows(spec))) > available:
        raise HostMemoryError(
            f"the change needs {format_bytes(needed)} of host memory in all, and "
            f"{format_bytes(available)} are there for it. Nothing has changed"
        )


def warn_of_turns(changes: int, steps: int) -> None:
    """Warn of parts that are trained in turn, after many changes in few steps."""
    if changes == _MANY_CHANGES and steps < 2 * _MANY_CHANGES:
        _log.warning(
            "what is trained has changed %d times in %d steps, and each change moves all state, "
            "which takes about as long as offload(): freeze a model as a whole, or give parts that "
            "take turns an optimizer each",
            *(changes, steps),
        )
