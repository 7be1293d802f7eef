"""A moving average of the weights, on the host."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.checks import ModelError
from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.optimizer import OffloadOptimizer
from offloadtrain.engine.state import check_held_by, decoded
from offloadtrain.runtime.arena import Arena, with_own_storage
from offloadtrain.runtime.kernels import cut
from offloadtrain.step.layout.buffers import BufferSpec
from offloadtrain.step.layout.formats import FP32

_CHUNK = 1 << 20
"""Elements that are averaged at a time; a multiple of the blocks of all formats."""


class EMA:
    """An exponential moving average of an offloaded model's weights.

        ema = ot.EMA(optimizer, decay=0.999)
        for batch in batches:
            optimizer.backward(loss_of(model, batch))
            optimizer.step()
            ema.update()
        ema.copy_to(another_model)

    It averages the fp32 master weights, so that changes below the precision of 16-bit weights
    count. The values are those of `torch.optim.swa_utils.AveragedModel(model,
    multi_avg_fn=get_ema_multi_avg_fn(decay))` over the masters of a resident run: the first update
    takes the weights over. Frozen parameters and buffers are not averaged: they are those of the
    model.

    The averages take 4 bytes per trained parameter of host memory ("moving average" in the Ledger),
    and those of several ranks are in shards.

    Attributes:
        decay: how much of the average an update keeps. May be changed between updates.
        num_updates: calls of `update` so far.
        optimizer: the one whose masters are averaged.
    """

    def __init__(self, optimizer: OffloadOptimizer, decay: float = 0.999) -> None:
        """Begin with the weights as they are.

        Raises:
            HostMemoryError: the host has too little memory.
        """
        self.decay, self.num_updates = decay, 0
        self.optimizer, arena = optimizer, Arena(optimizer.ledger, pin=False)
        buckets = {b.name: b for block in optimizer._blocks for b in block.buckets}
        rows = [BufferSpec("moving average", b.shard_numel, "float32") for b in buckets.values()]
        self._buckets, self._blocks = buckets, optimizer._blocks
        self._averages = dict(zip(buckets, arena.map(rows), strict=True))
        weakref.finalize(self, arena.close)
        self._launch(decay=0.0)

    def update(self) -> None:
        """Average the weights after the last step; call it after `step()`, on all ranks.

        It launches the work, a bucket at a time, and does not wait for it: the host does it after
        its updates, while the next forward runs.

        Raises:
            ValueError: `decay` is not between 0 and 1.
            EngineError: between backward and `step()`, after `close()` of the optimizer, or if what
                is trained has changed.
        """
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"decay = {self.decay} is not between 0 and 1")
        self._launch(self.decay if self.num_updates else 0.0)
        self.num_updates += 1

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, its average), one at a time, as `optimizer.master_weights()`
        yields the masters: fp32, on the host, in the parameter's shape, frozen parameters as they
        are.

        On a single rank they are views of the averages, which the next update changes, and may be
        read after `close()` of the optimizer. All ranks must exhaust it, before `close()`, and each
        receives whole tensors.
        """
        self._require_same_parameters()
        self.optimizer._engine.finish_averages()
        yield from self.optimizer._assembled(self._piece)

    def copy_to(self, model: nn.Module) -> None:
        """Copy the averages, the frozen parameters and the buffers into a model with the same
        names; into the trained model itself, whose masters they become. All ranks call it.

        Raises:
            ModelError: a parameter is missing.
        """
        state = dict(self.weights())
        if unknown := model.load_state_dict(state, strict=False).unexpected_keys:
            raise ModelError(
                f"the model has no '{unknown[0]}' ({len(unknown)} in all): give one with the names "
                "of the model that is trained"
            )
        buffers = dict(self.optimizer.model.named_buffers())
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

    def state_dict(self) -> dict[str, Any]:
        """Return "decay", "num_updates" and "averages", by parameter name: views, which the next
        update changes; of several ranks, each its shard of them."""
        self.optimizer._engine.finish_averages()  # updates on the lanes may still write them
        return {
            "decay": self.decay,
            "num_updates": self.num_updates,
            "held_by": self.optimizer._held_by,
            "averages": {s.name: s.shaped(self._piece(b, s)) for b, s in self._slots()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned, in any placement and state format, on as many
        ranks; the state of a single rank is taken by any number.

        Raises:
            EngineError: names, shapes or ranks do not fit; nothing has changed.
        """
        self.optimizer._engine.finish_averages()
        check_held_by(state_dict, self.optimizer._held_by)
        pairs = []
        for bucket, slot in self._slots():
            target = self._piece(bucket, slot)
            value = state_dict["averages"].get(slot.name)
            if value is not None and tuple(value.shape) == slot.shape:
                value = slot.flattened(value)[slice(*bucket.piece(slot))]
            if value is None or value.shape != target.shape:
                shape = None if value is None else tuple(value.shape)
                raise EngineError(
                    f"the average of '{slot.name}' has shape {slot.shape}, the state has {shape}"
                )
            pairs.append((target, value))
        self.decay, self.num_updates = state_dict["decay"], state_dict["num_updates"]
        for target, value in pairs:
            target.copy_(value)

    def _launch(self, decay: float) -> None:
        averages, buckets = self._averages, self._buckets  # lanes do not keep this object alive

        def update(name: str, *state: Tensor) -> None:
            _average(averages[name], buckets[name], state, decay)

        self._require_same_parameters()
        self.optimizer.take_over_writes()
        self.optimizer._engine.average(update)

    def _require_same_parameters(self) -> None:
        if self.optimizer._blocks is not self._blocks:
            raise EngineError(
                "what is trained has changed since this average was made (add_param_group, "
                "requires_grad_, grad_accum_steps): make a new one, ot.EMA(optimizer)"
            )

    def _slots(self) -> Iterator[tuple[Bucket, Slot]]:
        return ((bucket, slot) for bucket in self._buckets.values() for slot in bucket.slots)

    def _piece(self, bucket: Bucket, slot: Slot) -> Tensor:
        """View this rank's shard of a parameter's average: (n,)."""
        lo, hi = bucket.piece(slot)
        start = slot.offset + lo - bucket.lo if lo < hi else 0
        return with_own_storage(self._averages[bucket.name][start : start + hi - lo])


@torch.no_grad()
def _average(average: Tensor, bucket: Bucket, state: tuple[Tensor, ...], decay: float) -> None:
    """Average a bucket's masters; `decay` 0: take them over."""
    fields, numel = bucket.format.fields(bucket.spec.moments), average.numel()
    in_place = bucket.format is FP32 and state[0].is_cpu
    for lo in range(0, numel, _CHUNK):
        hi = min(lo + _CHUNK, numel)
        piece, target = cut(fields, state, lo, hi), average[lo:hi]
        master = piece[0] if in_place else decoded(bucket, piece, hi - lo)
        # As torch's own average, to the bit; `lerp_` from memory without values could be NaN.
        target.lerp_(master, 1.0 - decay) if decay else target.copy_(master)
