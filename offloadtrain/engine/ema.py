"""A moving average of the weights, on the host."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offloadtrain.config.errors import ModelError
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.norm import EngineError
from offloadtrain.engine.optimizer import OffloadOptimizer
from offloadtrain.engine.state import check_held_by, decoded
from offloadtrain.runtime.arena import Arena, with_own_storage
from offloadtrain.runtime.dtypes import name_of
from offloadtrain.runtime.kernels import cut, read_master
from offloadtrain.step.layout.buffers import BufferSpec
from offloadtrain.step.layout.formats import FP32, recognise

_CHUNK = 1 << 20
"""Number of elements per call; a multiple of the block sizes of all formats."""


class EMA:
    """An exponential moving average of an offloaded model's weights.

        ema = ot.EMA(optimizer, decay=0.999)
        for batch in batches:
            optimizer.backward(loss_of(model, batch))
            optimizer.step()
            ema.update()
        ema.copy_to(another_model)

    The fp32 master weights are averaged, so that changes below the precision of 16-bit weights
    count. The values are those of `torch.optim.swa_utils.AveragedModel(model,
    multi_avg_fn=get_ema_multi_avg_fn(decay))` over the masters of a resident run: the first update
    copies the weights. Parameters may be frozen and unfrozen meanwhile. Parameters that were never
    trained and buffers are not averaged: they are the model's.

    The averages take 4 bytes of host memory per trained parameter ("moving average" in the Ledger);
    several ranks have shards of them. `optimizer.state_dict()` contains them.

    Attributes:
        decay: weight of the old average in an update. May be changed between updates.
        num_updates: number of calls of `update` so far.
        optimizer: the optimizer whose masters are averaged.
    """

    def __init__(self, optimizer: OffloadOptimizer, decay: float = 0.999) -> None:
        """Start from the present weights, or from the averages of a state dict that was passed to
        `optimizer.load_state_dict` before.

        Raises:
            EngineError: between backward and `step()`.
            HostMemoryError: the host has too little memory.
        """
        self.decay, self.num_updates = decay, 0
        self.optimizer, self._arena = optimizer, Arena(optimizer.ledger, pin=False)
        self._averages: dict[nn.Parameter, _Average] = {}
        weakref.finalize(self, self._arena.close)
        self.follow()
        optimizer.averages[id(self)] = self
        if optimizer.saved_averages:
            self.load_state_dict(optimizer.saved_averages.pop(0))

    def follow(self) -> None:
        """Start averages for newly trained parameters from their masters. The averages of frozen
        parameters are still updated, as in torch."""
        new = [pair for pair in self.optimizer._slots() if pair[1].param not in self._averages]
        if new:
            self._allocate([(slot, *bucket.piece(slot)) for bucket, slot in new])
            self._launch({slot.param for _, slot in new}, decay=0.0)

    def _launch(self, params: Collection[nn.Parameter], decay: float) -> None:
        # The launched function must not keep `self` alive.
        averages = {param: self._averages[param] for param in params}
        buckets = {b.name: b for block in self.optimizer._blocks for b in block.buckets}

        def update(name: str, *state: Tensor) -> None:
            _average(averages, buckets[name], state, decay)

        self.optimizer.take_over_writes()
        self.optimizer._engine.average(update)

    def _allocate(self, shards: Sequence[tuple[Slot, int, int]]) -> None:
        rows = [BufferSpec("moving average", last - lo, "float32") for _, lo, last in shards]
        for (slot, lo, _), values in zip(shards, self._arena.map(rows), strict=True):
            self._averages[slot.param] = _Average(slot, lo, with_own_storage(values))

    def update(self) -> None:
        """Average the weights after the last step; call it after `step()`, on all ranks.

        It launches the work, bucket by bucket, and does not wait for it: the host runs it after
        its updates, during the next forward.

        Raises:
            ValueError: `decay` is not between 0 and 1.
            EngineError: between backward and `step()`, or after `close()` of the optimizer.
        """
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"decay = {self.decay} is not between 0 and 1")
        decay = self.decay if self.num_updates else 0.0
        self._launch({slot.param for _, slot in self.optimizer._slots()}, decay)
        for slot, _, average in self._frozen():
            average.lerp_(self._master_of_frozen(slot), 1.0 - decay)
        self.num_updates += 1

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, average), one at a time, in the form of
        `optimizer.master_weights()`: fp32, on the host, in the parameter's shape; frozen parameters
        without an average as they are.

        On a single rank they are views of the averages, which the next update changes, and may be
        read after `close()` of the optimizer. All ranks must exhaust the iterator, before
        `close()`; each receives full tensors.
        """
        self.optimizer._engine.finish_averages()
        frozen = {average.slot.name: average.shaped for average in self._frozen()}
        for name, values in self.optimizer._assembled(lambda _, s: self._averages[s.param].values):
            yield name, frozen.get(name, values)

    def copy_to(self, model: nn.Module) -> None:
        """Copy the averages, the frozen parameters and the buffers into a model with the same
        names. If it is the trained model, they become its masters. All ranks call it.

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
        """Return "decay", "num_updates" and "averages" by parameter name: views, which the next
        update changes; with several ranks, each returns its shard."""
        self.optimizer._engine.finish_averages()  # queued updates may still write them
        averages = {each.slot.name: each.shaped for each in self._averages.values()}
        for name, param in self.optimizer.model.named_parameters():
            if param.requires_grad and param not in self._averages:  # unfrozen since the last step
                averages[name] = param.detach().to("cpu", torch.float32)
        return {
            "decay": self.decay,
            "num_updates": self.num_updates,
            "held_by": self.optimizer._held_by,
            "averages": averages,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, of any placement and state format, saved by as many
        ranks, or by a single rank. A parameter without an average in it starts from its weights.

        Raises:
            EngineError: names, shapes or ranks do not fit; nothing has changed.
        """
        optimizer = self.optimizer
        optimizer._engine.finish_averages()
        check_held_by(state_dict, optimizer._held_by)
        saved, pairs, new = dict(state_dict["averages"]), [], set[nn.Parameter]()
        for slot, first, target in self._averages.values():
            if (value := saved.pop(slot.name, None)) is None:
                new.add(slot.param)  # it was frozen since before the first update
                continue
            if tuple(value.shape) == slot.shape:
                value = slot.flattened(value)[first : first + target.numel()]
            if value.shape != target.shape:
                raise EngineError(
                    f"the average of '{slot.name}' has shape {slot.shape}, the state has "
                    f"{tuple(value.shape)}"
                )
            pairs.append((target, value))
        frozen = [
            (Slot.of(name, param, 0, 0), saved[name])
            for name, param in optimizer.model.named_parameters()
            if name in saved and saved[name].shape == param.shape
        ]
        if len(frozen) < len(saved):
            raise EngineError(
                f"the state has an average of '{next(iter(saved))}', which is not trained: train "
                "the parameters that it has, and freeze them after it was loaded"
            )
        self.decay, self.num_updates = state_dict["decay"], state_dict["num_updates"]
        if new:
            self._launch(new, decay=0.0)
        for target, value in pairs:
            target.copy_(value)
        self._allocate([(slot, 0, slot.numel) for slot, _ in frozen])
        for slot, value in frozen:
            self._averages[slot.param].shaped.copy_(value)

    def _master_of_frozen(self, slot: Slot) -> Tensor:
        """Return the fp32 master of a frozen parameter, or its weights if it has none: (n,)."""
        optimizer = self.optimizer
        optimizer._take_over_frozen()
        state = {k: v for k, v in optimizer.state.get(slot.param, {}).items() if k != "step"}
        groups = zip(optimizer._rules, optimizer.param_groups, strict=True)
        rule = next(rule for rule, group in groups if any(p is slot.param for p in group["params"]))
        dtypes = {name: name_of(value.dtype) for name, value in state.items()}
        format = recognise(dtypes, rule.moments, FP32)
        if format is None:  # never trained
            return slot.flattened(slot.local.data).float()
        tensors = tuple(
            slot.flattened(state[field.name])
            if tuple(state[field.name].shape) == slot.shape
            else state[field.name]
            for field in format.fields(rule.moments)
        )
        values = torch.empty(slot.numel, dtype=torch.float32, device="cpu")
        read_master(format, rule.moments, tensors, values)
        return values

    def _frozen(self) -> list[_Average]:
        """Return the averages of parameters that are frozen now."""
        trained = {slot.param for _, slot in self.optimizer._slots()}
        return [each for param, each in self._averages.items() if param not in trained]


class _Average(NamedTuple):
    """This rank's shard of a parameter's average, starting at element `first`: (n,) fp32."""

    slot: Slot
    first: int
    values: Tensor

    @property
    def shaped(self) -> Tensor:
        return self.slot.shaped(self.values)


@torch.no_grad()
def _average(
    averages: Mapping[nn.Parameter, _Average],
    bucket: Bucket,
    state: tuple[Tensor, ...],
    decay: float,
) -> None:
    """Average a bucket's masters; `decay` 0: copy them."""
    fields = bucket.format.fields(bucket.spec.moments)
    in_place = bucket.format is FP32 and state[0].is_cpu
    for slot in (slot for slot in bucket.slots if slot.param in averages):
        first, last = bucket.piece(slot)
        start, average = slot.offset + first - bucket.lo, averages[slot.param].values
        for lo in range(0, last - first, _CHUNK):
            target = average[lo : lo + _CHUNK]
            piece = cut(fields, state, start + lo, start + lo + target.numel())
            master = piece[0] if in_place else decoded(bucket, piece, target.numel())
            # Bit-identical to torch's average; `lerp_` on uninitialised memory could give NaN.
            target.lerp_(master, 1.0 - decay) if decay else target.copy_(master)
