"""The optimizer that `offload()` returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.distributed import UNTRAINED, Extent
from offloadtrain.engine.adopt import ParamInit, set_master
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.build import build
from offloadtrain.engine.casting import attach_casts
from offloadtrain.engine.checks import ModelError, ModelSeal
from offloadtrain.engine.cut import cut
from offloadtrain.engine.engine import Engine, EngineError
from offloadtrain.engine.faces import attach_faces
from offloadtrain.engine.report import Phase, StepReport
from offloadtrain.engine.settings import Settings
from offloadtrain.kernels import BLOCK
from offloadtrain.memory import Arena, DeviceArena, Ledger
from offloadtrain.optim import UpdateRule, recognise
from offloadtrain.optim.formats import Field
from offloadtrain.transfer import Lanes

offloaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models whose parameters an optimizer holds."""


class OffloadOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose state lives in pinned host memory.

    Made by `offload()`. Learning-rate schedulers, `param_groups` and `state_dict` work as with any
    optimizer. `state[p]` holds `step` and the tensors of the state format (`fp32`: `master` and the
    moments): views of host memory shaped as the parameter (scales: one value per block), at rest
    after `synchronize()`, valid until `close()` (update mode "speculative": until the next step).
    Among ranks each has its shard of it: views of the elements that it owns, 1-D where these are
    not the whole parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: UpdateRule,
        groups: list[dict[str, Any]],
        settings: Settings,
        lanes: Lanes,
        param_init_fn: ParamInit | None = None,
    ) -> None:
        super().__init__(groups, rule.defaults())
        self.device = settings.device
        self.working_dtype = settings.dtype
        self.ranks = settings.ranks
        self.ledger = Ledger()
        self._rule = rule
        host = Arena(self.ledger, pin=settings.pin_memory and self.device.type == "cuda")
        offloads = settings.state_on == "host"
        self._arena = host if offloads else DeviceArena(self.ledger, self.device)
        self._inputs = host
        lanes.counts_bus = offloads
        # Dropped without close(): drain, then give the pinned memory back, in this order.
        self._finalizer = weakref.finalize(self, _release, lanes, self._arena, host)
        try:
            self._engine, self._blocks = build(
                model,
                rule,
                self.param_groups,
                settings,
                param_init_fn=param_init_fn,
                lanes=lanes,
                arena=self._arena,
                inputs=host,
                ledger=self.ledger,
            )
        except BaseException:
            self._finalizer()
            raise
        self._model = model
        self._engine.emit()
        streamed = [bucket for block in self._blocks for bucket in block.held if bucket.streamed]
        moving = [slot.param for bucket in streamed for slot in bucket.slots]
        self._seal = ModelSeal(model, moving)
        self._flips = settings.update == "speculative"
        self._step_tensor = torch.zeros((), dtype=torch.float32, device="cpu")
        self._fill_state()
        layers = [part.module for part in cut(model) if part.repeated]
        self._handles = self._hook_parameters() + attach_faces(model, self)
        self._handles += attach_casts(
            model, layers, settings.dtype, cast_inputs=settings.cast_inputs
        )

    @property
    def pinned(self) -> bool:
        """Whether all host memory is page-locked: only then do transfers run beside compute."""
        return self._arena.pinned and self._inputs.pinned

    @property
    def grad_norm(self) -> float | None:
        """Of the last step: unscaled, before clipping; not finite if it was skipped."""
        return self.last_step.grad_norm if self.last_step else None

    @property
    def last_step(self) -> StepReport | None:
        """What the last `step()` did, None before the first."""
        return self._engine.last_step

    @property
    def loss_scale(self) -> float:
        """What the next `backward` multiplies the loss by; 1.0 unless precision is fp16."""
        return self._engine.loss_scale

    @property
    def phase(self) -> Phase:
        """What the step is doing now."""
        return self._engine.phase

    def backward(self, loss: Tensor) -> None:
        """Backward of one microbatch: divides by `grad_accum_steps`, applies the loss scale.

        Args:
            loss: scalar, the mean over the microbatch.

        Raises:
            EngineError, GradientError: out of turn, or a gradient that cannot be used. After any
                exception the gradients of the step are dropped.
        """
        self._engine.backward(loss)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update from what backward has delivered; waits only for the gradient norm.

        A non-finite gradient norm skips the step: no state, no weight and no step count changes
        (`last_step.skipped`). Fewer microbatches than `grad_accum_steps` are applied as they are.

        Args:
            closure: recomputes the loss and calls backward; its result is returned.

        Raises:
            EngineError: without a backward since the last step.
            ModelError: if a parameter was changed by others since `offload()`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._seal.check()
        for group in self.param_groups:
            self._rule.check(group)
        report = self._engine.step()
        self._step_tensor.fill_(report.step)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has used, wherever they are; after `step()` there are none.

        `set_to_none` makes no difference: a parameter that a step did not use counts as having a
        zero gradient, so that its decay and moments go on.
        """
        if self.phase is not Phase.CLOSED:
            self._engine.drop_gradients()

    def synchronize(self) -> None:
        """Wait until every lane is idle and state is at rest.

        Between steps parameters hold the newest weights afterwards: in update mode "delayed" the
        update that waits is uploaded, and the next step sees it without delay.
        """
        self._engine.synchronize()
        if self._flips:
            self._fill_state()

    def sample_timeline(self) -> None:
        """Make the next step's `last_step.timeline` hold what each lane did when."""
        self._engine.sample_timeline()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus "scaler" (None without loss scaling) and "seed" of the rounding.
        Values are views, not copies."""
        self.synchronize()
        scaler = self._engine.scaler
        kept = {"scaler": scaler.state_dict() if scaler else None, "seed": self._engine.seed}
        return super().state_dict() | kept

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over state and hyperparameters; the working weights follow the loaded masters.

        Among ranks each takes its own `state_dict` back, of the same number of ranks; whole
        tensors fit any.

        Raises:
            EngineError: if groups, shapes or step counts do not fit this optimizer.
        """
        saved, state = state_dict["param_groups"], state_dict["state"]
        sizes, own = (
            [len(g["params"]) for g in saved],
            [len(g["params"]) for g in self.param_groups],
        )
        if sizes != own:
            raise EngineError(f"parameter groups of sizes {sizes} do not fit the model's {own}")
        held = {slot.param: (bucket, slot) for bucket, slot in self._slots()}
        keys = [key for group in saved for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        steps = {float(state[key]["step"]) for key in keys}
        if len(steps) != 1:
            raise EngineError(
                f"all parameters step together, but the state has steps {sorted(steps)}"
            )
        self.synchronize()
        for key, param in zip(keys, params, strict=True):
            bucket, slot = held[param]
            whole = any(tuple(x.shape) == slot.shape for x in _tensors(state[key]).values())
            first, last = bucket.piece(slot)
            if whole or last - first == slot.numel:
                self._load_slot(bucket, slot, state[key], None)
            elif first < last:
                self._load_slot(bucket, slot, state[key], first)
        for group, other in zip(self.param_groups, saved, strict=True):
            group.update({k: v for k, v in other.items() if k != "params"})
        self._engine.seed = state_dict.get("seed", self._engine.seed)
        self.finish_load(step=int(steps.pop()), scaler=state_dict.get("scaler"))

    def named_state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(parameter name, the tensors of its state): views of host memory, at rest. Of frozen
        parameters in shards: their weights."""
        self.synchronize()
        for _, slot in self._slots():
            entry = self.state[slot.param]
            yield slot.name, {name: x for name, x in entry.items() if name != "step"}
        for bucket, slot in self._frozen_shards():
            yield slot.name, {UNTRAINED: slot.shaped(bucket.weights_of(slot))}

    def extents(self) -> dict[str, Extent]:
        """What this rank holds of every trained parameter, and of frozen ones in shards."""
        held = [*self._slots(), *self._frozen_shards()]
        return {slot.name: Extent(slot.shape, *bucket.piece(slot)) for bucket, slot in held}

    def load_named_state(
        self, name: str, tensors: Mapping[str, Tensor], *, lo: int | None = None
    ) -> None:
        """Copy state of one parameter in, as far as this rank holds it; `finish_load` makes it
        effective.

        State of another format is converted, rounded to nearest where this one is narrower.

        Args:
            tensors: of the parameter's shape; or 1-D, of its elements from `lo` on, a multiple of
                128, in the order of its memory. Scales: one value per 128 elements.

        Raises:
            EngineError: for an unknown parameter, a missing tensor or another shape.
        """
        self.synchronize()
        frozen = next(((b, s) for b, s in self._frozen_shards() if s.name == name), None)
        if frozen is not None:
            _load_weights(*frozen, tensors[UNTRAINED], lo)
            return
        found = next(((b, s) for b, s in self._slots() if s.name == name), None)
        if found is None:
            raise EngineError(f"the model has no trainable parameter '{name}'")
        self._load_slot(*found, tensors, lo)

    def _load_slot(
        self, bucket: Bucket, slot: Slot, tensors: Mapping[str, Tensor], lo: int | None
    ) -> None:
        given = _tensors(tensors)
        moments = self._rule.moments
        source = recognise(given, moments)
        if source is None:
            wanted = ", ".join(field.name for field in bucket.format.fields(moments))
            raise EngineError(
                f"'{slot.name}' needs {wanted}, the state has {', '.join(given) or 'nothing'}"
            )
        fields = source.fields(moments)
        count = slot.numel if lo is None else given[fields[0].name].numel()
        taken = tuple(_taken(slot, field, given[field.name], lo, count) for field in fields)
        (first, last), lo = bucket.piece(slot), lo or 0
        begin, end = max(first, lo), min(last, lo + count)
        if begin >= end:
            return
        flat = _cut(fields, taken, begin - lo, end - lo)
        own = _cut(bucket.format.fields(moments), bucket.state_of(slot), begin - first, end - first)
        if [x.dtype for x in own] == [x.dtype for x in flat]:
            for mine, value in zip(own, flat, strict=True):
                mine.copy_(value)
        else:
            self._rule.convert(source, flat, bucket.format, own)

    def finish_load(self, *, step: int, scaler: Mapping[str, float] | None = None) -> None:
        """After `load_named_state` of every parameter: set the step count, upload the weights."""
        if (scaler is None) != (self._engine.scaler is None):
            raise EngineError("the loss scaler's state is there in only one of state and optimizer")
        if self._engine.scaler is not None and scaler is not None:
            self._engine.scaler.load_state_dict(dict(scaler))
        self._engine.step_count = step
        self._step_tensor.fill_(step)
        self._engine.emit()
        self._seal.renew()  # frozen parameters may have been loaded too

    def require_whole_weights(self) -> None:
        """Raises ModelError where parameters are shards most of the time (ZeRO stage 3)."""
        if not self.ranks.alone and any(b.streamed for k in self._blocks for b in k.held):
            raise ModelError(
                f"the weights are in shards on {self.ranks.size} ranks (zero_stage = 3): a rank "
                "has no state dict of its own. On every rank, take "
                "dict(optimizer.full_weights()), or save a checkpoint"
            )

    @torch.no_grad()
    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, working weights on the host), one block at a time.

        Among ranks every one of them has to go through all of it.
        """
        self.synchronize()
        done: set[nn.Parameter] = set()
        for block in self._blocks:
            block.use()
            for slot in (slot for bucket in block.held for slot in bucket.slots):
                done.add(slot.param)
                yield slot.name, slot.param.detach().to("cpu", copy=True)
        for name, param in self._model.named_parameters():
            if param not in done:
                yield name, param.detach().to("cpu", copy=True)

    def adopt_written_weights(self) -> None:
        """Masters from the working weights that others wrote (`model.load_state_dict`).

        The masters of these parameters hold 16-bit precision from here on; moments stay.
        """
        self.synchronize()
        written = set(self._seal.written())
        with torch.no_grad():
            for bucket, slot in self._slots():
                if slot.param in written:
                    set_master(bucket, slot, self._rule, slot.param.data)
        self._seal.renew()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused after `offload()`, which fixes the layout of host memory."""
        if hasattr(self, "_engine"):
            raise ModelError("groups cannot be added after offload(): close() and offload again")
        super().add_param_group(param_group)

    def close(self) -> None:
        """Drain, take the hooks off the model and give the host memory back. Idempotent.

        The model keeps its working weights; views from `state` must not be used any more.
        """
        try:
            self._engine.close()
        finally:  # a GPU that has failed ends this, too; its memory on the host is given back
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self.state.clear()
            self._finalizer()
            offloaded.discard(self._model)

    def _slots(self) -> Iterator[tuple[Bucket, Slot]]:
        pairs = [(b, s) for block in self._blocks for b in block.buckets for s in b.slots]
        return iter(sorted(pairs, key=lambda pair: pair[1].index))

    def _frozen_shards(self) -> list[tuple[Bucket, Slot]]:
        """Frozen parameters that are nowhere as a whole, but in a device slot at times."""
        if self.ranks.alone:
            return []
        return [(b, s) for block in self._blocks for b in block.frozen for s in b.slots]

    def _fill_state(self) -> None:
        for bucket, slot in self._slots():
            fields = bucket.format.fields(self._rule.moments)
            pieces = zip(fields, bucket.state_of(slot), strict=True)
            views = {field.name: slot.shaped(piece) for field, piece in pieces}
            self.state[slot.param] = {"step": self._step_tensor, **views}

    def _hook_parameters(self) -> list[Any]:
        engine = weakref.ref(self._engine)
        return [
            slot.param.register_post_accumulate_grad_hook(partial(_deliver, engine, block, slot))
            for block in self._blocks
            for bucket in block.buckets
            for slot in bucket.slots
        ]


def _tensors(entry: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the state of a parameter holds beside its step."""
    return {key: value for key, value in entry.items() if key != "step"}


def _load_weights(bucket: Bucket, slot: Slot, tensor: Tensor, lo: int | None) -> None:
    """What this rank holds of frozen weights, from all of them or a piece of them."""
    flat = slot.flattened(tensor) if lo is None else tensor
    (first, last), lo = bucket.piece(slot), lo or 0
    begin, end = max(first, lo), min(last, lo + flat.numel())
    if begin < end:
        bucket.weights_of(slot)[begin - first : end - first].copy_(flat[begin - lo : end - lo])


def _taken(slot: Slot, field: Field, tensor: Tensor, lo: int | None, count: int) -> Tensor:
    """A tensor of saved state as (n,), in the order of the parameter's memory."""
    wanted: tuple[int, ...]
    if field.per_block:
        fits, wanted = tensor.numel() == field.numel(count), (field.numel(count),)
    elif lo is None:
        fits, wanted = tuple(tensor.shape) == slot.shape, slot.shape
    else:
        fits, wanted = tuple(tensor.shape) == (count,) and lo + count <= slot.numel, (count,)
    if not fits:
        raise EngineError(
            f"'{slot.name}' needs {field.name} of shape {wanted}, the state has "
            f"{tuple(tensor.shape)}"
        )
    whole = lo is None and not field.per_block
    return slot.flattened(tensor) if whole else tensor.reshape(-1)


def _cut(
    fields: Sequence[Field], tensors: Sequence[Tensor], lo: int, hi: int
) -> tuple[Tensor, ...]:
    """Elements [lo, hi) of each, or the scales of the blocks that they are in."""
    return tuple(
        tensor[lo // BLOCK : -(-hi // BLOCK)] if field.per_block else tensor[lo:hi]
        for field, tensor in zip(fields, tensors, strict=True)
    )


def _release(lanes: Lanes, *arenas: Arena) -> None:
    lanes.close()
    for arena in arenas:
        arena.close()


def _deliver(engine: weakref.ref[Engine], block: Block, slot: Slot, param: Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.deliver(block, slot)
