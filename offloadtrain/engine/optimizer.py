"""The public face: `offload()` and the optimizer it returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.build import Settings, build
from offloadtrain.engine.checks import ModelError, ModelSeal, check_model
from offloadtrain.engine.engine import Engine, EngineError, Phase, StepReport
from offloadtrain.engine.faces import attach_faces
from offloadtrain.engine.groups import normalise_groups
from offloadtrain.memory import Arena, Ledger
from offloadtrain.optim import AdamW, UpdateRule
from offloadtrain.transfer import Lanes, lanes_for

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_Number = TypeVar("_Number", int, float)
_offloaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class OffloadOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose state lives in pinned host memory.

    Made by `offload()`. Learning-rate schedulers, `param_groups` and `state_dict` work as with any
    optimizer. `state[p]` holds `step`, `master` (fp32) and the moments: views of host memory shaped
    as the parameter, valid until `close()`, at rest after `synchronize()`.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: UpdateRule,
        groups: list[dict[str, Any]],
        settings: Settings,
        lanes: Lanes,
    ) -> None:
        super().__init__(groups, rule.defaults())
        self.device = settings.device
        self.working_dtype = settings.dtype
        self.ledger = Ledger()
        self._rule = rule
        self._arena = Arena(self.ledger, pin=settings.pin_memory and self.device.type == "cuda")
        self._engine, self._blocks = build(
            model,
            rule,
            self.param_groups,
            settings,
            lanes=lanes,
            arena=self._arena,
            ledger=self.ledger,
        )
        self._model = model
        self._engine.emit()
        self._seal = ModelSeal(model)
        self._step_tensor = torch.zeros((), dtype=torch.float32)
        self._fill_state()
        self._handles = self._hook_parameters() + attach_faces(model, self)
        # Dropped without close(): drain, then give the pinned memory back, in this order.
        self._finalizer = weakref.finalize(self, _release, lanes, self._arena)

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
        """Wait until every lane is idle: parameters hold the newest weights, state is at rest."""
        self._engine.synchronize()

    def sample_timeline(self) -> None:
        """Make the next step's `last_step.timeline` hold what each lane did when."""
        self._engine.sample_timeline()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus "scaler" (None without loss scaling). Values are views, not copies."""
        self.synchronize()
        scaler = self._engine.scaler
        return {**super().state_dict(), "scaler": scaler.state_dict() if scaler else None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over state and hyperparameters; the working weights follow the loaded masters.

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
        slots = {slot.param: slot for _, slot in self._slots()}
        keys = [key for group in saved for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        steps = {float(state[key]["step"]) for key in keys}
        if len(steps) != 1:
            raise EngineError(
                f"all parameters step together, but the state has steps {sorted(steps)}"
            )
        for key, param in zip(keys, params, strict=True):
            self.load_named_state(slots[param].name, state[key])
        for group, other in zip(self.param_groups, saved, strict=True):
            group.update({k: v for k, v in other.items() if k != "params"})
        self.finish_load(step=int(steps.pop()), scaler=state_dict.get("scaler"))

    def named_state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(parameter name, {"master", and each moment}): fp32 views of host memory, at rest."""
        self.synchronize()
        for _, slot in self._slots():
            entry = self.state[slot.param]
            yield slot.name, {name: entry[name] for name in self.state_names}

    @property
    def state_names(self) -> tuple[str, ...]:
        """The tensors of a parameter's state."""
        return ("master", *self._rule.state_names)

    def load_named_state(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy one parameter's state in; `finish_load` makes it effective.

        Raises:
            EngineError: for an unknown parameter, a missing tensor or another shape.
        """
        self.synchronize()
        own = {slot.name: self.state[slot.param] for _, slot in self._slots()}.get(name)
        if own is None:
            raise EngineError(f"the model has no trainable parameter '{name}'")
        for key in self.state_names:
            if key not in tensors or tensors[key].shape != own[key].shape:
                found = tuple(tensors[key].shape) if key in tensors else "nothing"
                raise EngineError(
                    f"'{name}' needs {key} of shape {tuple(own[key].shape)}, the state has {found}"
                )
            own[key].copy_(tensors[key])

    def finish_load(self, *, step: int, scaler: Mapping[str, float] | None = None) -> None:
        """After `load_named_state` of every parameter: set the step count, upload the weights."""
        if (scaler is None) != (self._engine.scaler is None):
            raise EngineError("the loss scaler's state is there in only one of state and optimizer")
        if self._engine.scaler is not None and scaler is not None:
            self._engine.scaler.load_state_dict(dict(scaler))
        self._engine.step_count = step
        self._step_tensor.fill_(step)
        self._engine.emit()

    def adopt_written_weights(self) -> None:
        """Masters from the working weights that others wrote (`model.load_state_dict`).

        The masters of these parameters hold 16-bit precision from here on; moments stay.
        """
        self.synchronize()
        written = set(self._seal.written())
        with torch.no_grad():
            for bucket, slot in self._slots():
                if slot.param in written:
                    slot.view(bucket.master.flat).copy_(slot.param.data)
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
        self._engine.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.state.clear()
        self._finalizer()
        _offloaded.discard(self._model)

    def _slots(self) -> Iterator[tuple[Bucket, Slot]]:
        pairs = [(b, s) for block in self._blocks for b in block.buckets for s in b.slots]
        return iter(sorted(pairs, key=lambda pair: pair[1].index))

    def _fill_state(self) -> None:
        for bucket, slot in self._slots():
            entry = {"step": self._step_tensor, "master": slot.view(bucket.master.flat)}
            for name, buffer in zip(self._rule.state_names, bucket.state, strict=True):
                entry[name] = slot.view(buffer.flat)
            self.state[slot.param] = entry

    def _hook_parameters(self) -> list[Any]:
        engine = weakref.ref(self._engine)
        return [
            slot.param.register_post_accumulate_grad_hook(partial(_deliver, engine, block, slot))
            for block in self._blocks
            for bucket in block.buckets
            for slot in bucket.slots
        ]


def _release(lanes: Lanes, arena: Arena) -> None:
    lanes.close()
    arena.close()


def _deliver(engine: weakref.ref[Engine], block: Block, slot: Slot, param: Tensor) -> None:
    alive = engine()
    if alive is not None:
        alive.deliver(block, slot)


def offload(
    model: nn.Module,
    rule: UpdateRule | None = None,
    *,
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    device: str | torch.device = "auto",
    precision: str = "bf16",
    state: str = "fp32",
    update: str = "exact",
    clip_norm: float | None = None,
    grad_accum_steps: int = 1,
    pin_memory: bool = True,
) -> OffloadOptimizer:
    """Put a model's optimizer state into host memory and return the optimizer that trains it.

    The model's parameters become views of flat buffers of the working dtype on the device; their
    values as given become the fp32 master weights. Tied parameters stay tied. Frozen parameters are
    moved and cast with the rest and have no state. Floating-point inputs of the model are cast to
    the working dtype. Norms with running statistics keep fp32 parameters; buffers keep their dtype.

    Gradients are taken from `.grad` during backward, so that `clip_grad_norm_` and other code that
    reads `.grad` after backward finds nothing: use `clip_norm`.

    Args:
        model: any module; not wrapped for data parallelism, parameters not on the meta device.
        rule: `AdamW(...)` or `Adam(...)`; default AdamW().
        params: parameters or groups as for a torch optimizer; each trainable parameter in exactly
            one. Default: all of them in one group.
        device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1", or a torch.device.
        precision: of working weights and gradients: "bf16", "fp16" (dynamic loss scaling),
            "fp32".
        state: format of the host state: "fp32".
        update: update mode: "exact".
        clip_norm: largest global gradient norm; None: no clipping.
        grad_accum_steps: microbatches per step, summed in fp32 on the host.
        pin_memory: pin host memory where the device is a GPU.

    Raises:
        ModelError: a model that cannot be trained rightly, naming the parameter.
        HostMemoryError: before anything is allocated.
        ValueError: an argument out of range.
    """
    rule = AdamW() if rule is None else rule
    _check_choice("state", state, ("fp32",))
    _check_choice("update", update, ("exact",))
    settings = Settings(
        device=_resolve_device(device),
        dtype=_DTYPES[_check_choice("precision", precision, tuple(_DTYPES))],
        clip_norm=_positive("clip_norm", clip_norm),
        grad_accum_steps=_positive("grad_accum_steps", grad_accum_steps) or 1,
        pin_memory=pin_memory,
    )
    _check_support(settings)
    if model in _offloaded:
        raise ModelError("the model is offloaded already: close() its optimizer first")
    check_model(model)
    groups = normalise_groups(model, params, rule)
    optimizer = OffloadOptimizer(model, rule, groups, settings, lanes_for(settings.device))
    _offloaded.add(model)
    return optimizer


def _resolve_device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device = '{device}': offload to the host works for 'cuda' and 'cpu'")
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device = '{device}', but this torch sees no CUDA GPU: use 'cpu'")
        index = torch.cuda.current_device() if resolved.index is None else resolved.index
        resolved = torch.device("cuda", index)
    return resolved


def _check_support(settings: Settings) -> None:
    if settings.device.type == "cuda" and settings.dtype is torch.bfloat16:
        with torch.cuda.device(settings.device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                name = torch.cuda.get_device_name(settings.device)
                raise ValueError(f"{name} has no bf16 arithmetic: use precision = 'fp16'")


def _check_choice(key: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{key} = {value!r} is not one of {', '.join(map(repr, allowed))}")
    return value


def _positive(key: str, value: _Number | None) -> _Number | None:
    if value is not None and not value > 0:
        raise ValueError(f"{key} = {value} is not positive")
    return value
