"""The optimizer's state for those who save and load it: by buffer, and by parameter."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.checks.parameter_guard import ParameterGuard
from offloadtrain.engine.engine import Engine
from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.state import parameter_state as state
from offloadtrain.engine.state.saved_state import (
    WHOLE,
    WORKING,
    FlatState,
    OwnState,
    Parts,
    StateWriter,
    flat_states,
    own_state,
    own_weights,
    whole,
)
from offloadtrain.optim import AnyRule
from offloadtrain.runtime.process_group import ALONE, UNTRAINED, Extent, Ranks
from offloadtrain.runtime.tensor_parts import PartError, Share, shares_of

_log = logging.getLogger(__name__)


class StateIO:
    """The part of `OffloadOptimizer` that checkpoints use."""

    model: nn.Module
    ranks: Ranks
    _part_ranks: Ranks = ALONE
    _stage_ranks: Ranks = ALONE
    _blocks: Sequence[Block]
    _engine: Engine
    _rules: Sequence[AnyRule]
    _seal: ParameterGuard
    _step_tensor: Tensor

    def synchronize(self) -> None:
        raise NotImplementedError

    def _own_entries(self) -> Iterator[tuple[Slot, dict[str, Tensor]]]:
        """Yield the entries of `state` without their steps."""
        raise NotImplementedError

    @property
    def _held_by(self) -> dict[str, tuple[int, int]]:
        """Number and count of the ranks that share the state, and of those that hold parts and
        stages."""
        each = {"rank": self.ranks, "part": self._part_ranks, "stage": self._stage_ranks}
        return {name: (some.rank, some.size) for name, some in each.items()}

    @cached_property
    def parts(self) -> Parts:
        """Where what this rank holds of DTensors is in the whole.

        Raises:
            PartError: of one it cannot be said.
        """
        if self._part_ranks.is_single and self.ranks.of_experts is self.ranks:
            return WHOLE
        return Parts(self._part_ranks, shares_of(self.model))

    def named_state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (parameter name, the tensors of its state): views of host memory, at rest. Frozen
        parameters in shards yield their weights."""
        # The caller reads views that Adam on the host lane may still write.
        self.synchronize()
        for slot, entry in self._own_entries():
            yield slot.name, entry
        for bucket, slot in [] if self.ranks.is_single else self._frozen_slots():
            yield slot.name, {UNTRAINED: slot.shaped(bucket.weights_of(slot))}

    def extents(self) -> dict[str, Extent]:
        """Return this rank's shard of what it holds of every trained parameter, and of frozen ones
        of streamed blocks; shapes are those of whole parameters."""
        slots = [*self._slots(), *self._frozen_slots()]
        return {s.name: Extent(self.parts.share(s).shape, *b.piece(s)) for b, s in slots}

    @property
    def saves_untrained(self) -> bool:
        """This rank saves what is not trained: others hold the same."""
        return self.ranks.rank == self._part_ranks.rank == self.ranks.copies.rank == 0

    def flat_states(self) -> list[FlatState]:
        """Describe every buffer that `write_state` writes, in its order. Of hybrid sharding each
        group saves some of the buckets: those of the others have no pieces here.

        Raises:
            PartError: a part of a matrix is in a format that only this mesh could read.
        """
        # After a failure of the device the weights on it are lost: the checkpoint ends the delay.
        in_use = self._is_delayed and not self._engine.salvaged
        rank = self.ranks.rank
        states = list(flat_states(self._blocks, rank, in_use=in_use, parts=self.parts))
        copies, buckets = (
            self.ranks.copies,
            list(dict.fromkeys(flat_state.bucket for flat_state in states)),
        )
        own_buckets = {*buckets[copies.rank :: copies.size]}
        return [
            flat_state if flat_state.bucket in own_buckets else replace(flat_state, pieces=())
            for flat_state in states
        ]

    def warn_of_no_checkpoints(self) -> None:
        """Warn at once of what the first save would refuse, hours later."""
        try:
            if self.parts is not WHOLE:
                self.flat_states()
        except PartError as error:
            _log.warning("these weights train, and no checkpoint of them can be saved: %s", error)

    def write_state(self, writer: StateWriter) -> None:
        """Begin to write the state as it is after the last step; the next steps go on meanwhile.

        The writer is called on the lane of writes, in any order of buckets. One at a time.
        """
        if not self._engine.salvaged:
            self._engine.write_state(writer)
            return
        # The lanes have stopped for good, and nothing changes the state any more.
        for block in self._blocks:
            for bucket in block.buckets:
                writer.write(bucket.name, whole(buffer.flat for buffer in bucket.state))
            for bucket in block.frozen:
                writer.write(bucket.name, whole([bucket.load_source.flat]))
        writer.finish()

    def finish_writing(self) -> None:
        """Wait until `write_state` has written everything."""
        if not self._engine.salvaged:
            self._engine.finish_writing()

    def scaler_state(self) -> dict[str, float] | None:
        """Return the state of the loss scaler after the last step; None without loss scaling."""
        scaler = self._engine.counter.scaler
        return None if scaler is None else scaler.state_dict()

    @property
    def expert_steps(self) -> dict[str, list[int]]:
        """Parameter → steps of each of its entries, of those that are skipped where they are
        unused; -1 for entries of other ranks."""
        return {
            slot.name: bucket.usage.steps_by_entry(slot, self.parts.share(slot))
            for bucket, slot in self._slots()
            if bucket.usage is not None
        }

    def own_states(self) -> dict[str, list[OwnState]]:
        """Return what this rank holds of every parameter of `extents`, to be read or overwritten;
        `finish_load` makes what was written effective."""
        # The caller reads or writes memory that Adam and uploads in flight still use.
        self.synchronize()
        slots = [*self._slots(), *self._frozen_slots()]
        return {slot.name: own_state(b, slot, self.parts) for b, slot in slots}

    def own_weights(self) -> dict[str, list[OwnState]]:
        """Return this rank's part of the weights that forward uses, where they may be older than
        the state's (update mode "delayed"); otherwise nothing. To be overwritten like
        `own_states`: `finish_load` makes it effective."""
        # As in `own_states`; no newer weights wait afterwards.
        self.synchronize()
        if not self._is_delayed:
            return {}
        self._engine.part()
        return {slot.name: own_weights(b, slot, self.parts) for b, slot in self._slots()}

    def load_named_state(
        self, name: str, tensors: Mapping[str, Tensor], *, lo: int | None = None
    ) -> None:
        """Copy state of one parameter in, as far as this rank holds it; `finish_load` makes it
        effective.

        State of another format is converted, rounded to nearest where this one is narrower.

        Args:
            tensors: its state, or `WORKING` alone; of the parameter's shape; or 1-D, of its
                elements from `lo` on, a multiple of 128, in the order of its memory. Scales: one
                value per 128 elements. Of a DTensor: those of the whole one.

        Raises:
            EngineError: for an unknown parameter, a missing tensor or another shape.
        """
        # This thread writes the state, which Adam and uploads in flight still use.
        self.synchronize()
        frozen = next(((b, s) for b, s in self._frozen_slots() if s.name == name), None)
        if frozen is not None:
            state.load_weights(*frozen, tensors[UNTRAINED], lo)
            return
        entry = next(((b, s) for b, s in self._slots() if s.name == name), None)
        if entry is None:
            raise EngineError(f"the model has no trainable parameter '{name}'")
        share = self.parts.share(entry[1])
        if not share.is_part:
            self._load(entry, tensors, lo)
            return
        flat = _flattened(share, tensors, lo)
        count = min(tensor.numel() for tensor in flat.values())
        for part in share.ranges:
            first, last = max(part.at, lo or 0), min(part.at + part.length, (lo or 0) + count)
            if first < last:
                cut = {kind: x[first - (lo or 0) : last - (lo or 0)] for kind, x in flat.items()}
                self._load(entry, cut, part.lo + first - part.at)

    def _load(
        self, entry: tuple[Bucket, Slot], tensors: Mapping[str, Tensor], lo: int | None
    ) -> None:
        if WORKING in tensors:
            state.load_weights(*entry, tensors[WORKING], lo)
        else:
            state.load(*entry, self._rules[entry[0].group], tensors, lo)

    def finish_load(
        self,
        *,
        step: int,
        scaler: Mapping[str, float] | None = None,
        delayed: bool = False,
        expert_steps: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Set the step count and upload the weights, after `load_named_state` of every parameter.

        Args:
            delayed: the weights that forward uses were loaded, too, into `own_weights`: those of
                the state wait as they did when they were saved.
            expert_steps: see `expert_steps`; `step` for parameters that are not in it.

        Raises:
            EngineError: only one of state and optimizer has a loss scaler.
        """
        counter = self._engine.counter
        if (scaler is None) != (counter.scaler is None):
            raise EngineError("the loss scaler's state is there in only one of state and optimizer")
        if counter.scaler is not None and scaler is not None:
            counter.scaler.load_state_dict(dict(scaler))
            if not self._is_delayed:  # saved by a run whose scale follows late
                counter.scaler.catch_up()
        counter.steps = step
        self._step_tensor.fill_(step)
        for bucket, slot in self._slots():
            if bucket.usage is not None:
                steps = (expert_steps or {}).get(slot.name, step)
                bucket.usage.load_steps(slot, self.parts.share(slot), steps)
        # Waits: parameters hold the loaded weights when this returns.
        self._engine.emit(delayed=delayed)
        # Frozen parameters may have been loaded too.
        self._seal.renew()

    @property
    def _is_delayed(self) -> bool:
        return self._engine.program.spec.is_delayed

    def _slots(self) -> Iterator[tuple[Bucket, Slot]]:
        pairs = [(b, s) for block in self._blocks for b in block.buckets for s in b.slots]
        return iter(sorted(pairs, key=lambda pair: pair[1].index))

    def _frozen_slots(self) -> list[tuple[Bucket, Slot]]:
        """List frozen parameters of streamed blocks: on the device only while in a slot."""
        return [(b, s) for block in self._blocks for b in block.frozen for s in b.slots]


def _flattened(share: Share, tensors: Mapping[str, Tensor], lo: int | None) -> dict[str, Tensor]:
    """Return state of a whole parameter, or of elements from `lo` on, as 1-D tensors in the order
    of its memory.

    Raises:
        EngineError: they are of different sizes, as where a value stands for several elements.
    """
    flat = {}
    for kind, tensor in tensors.items():
        flat[kind] = tensor.reshape(-1)
        if lo is None and tuple(tensor.shape) == share.shape:
            flat[kind] = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
            flat[kind].as_strided(share.shape, share.stride).copy_(tensor)
    if len(sizes := {values.numel() for values in flat.values()}) > 1:
        raise EngineError(
            f"a part of a tensor of shape {share.shape} cannot be taken out of state with "
            f"{sorted(sizes)} values, where one stands for several elements: give it in fp32"
        )
    return flat
