"""Accelerate: the accelerator decides when a step is due, but not how model and state change.

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
    optimizer = offload(accelerator, model, ot.AdamW(lr=3e-4), working="host")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The loop stays as in Accelerate's guide. [Note: Accelerate] in `engine.prepared` describes what its
optimizer wrapper does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.engine import OffloadOptimizer
from offloadtrain.integrations import checkpoint_files
from offloadtrain.integrations.framework_support import (
    Options,
    merged,
    offload_for,
    precision_of,
    state_dict_of,
)
from offloadtrain.optim import AnyRule

_ALONE_OR_DDP = ("NO", "MULTI_CPU", "MULTI_GPU")


def offload(
    accelerator: Any,
    model: nn.Module,
    rule: AnyRule | None = None,
    *,
    config: Options | None = None,
    **options: Any,
) -> OffloadOptimizer:
    """Offload a model for an accelerator; `prepare` model and optimizer afterwards.

    Args:
        accelerator: determines precision ("no": that of the model), device and
            `gradient_accumulation_steps`.
        rule, config, options: as for `offloadtrain.offload`.

    Raises:
        ValueError: an option contradicts the accelerator, or the accelerator is configured for
            something that an offloaded model does not support.
        other errors: as in `offloadtrain.offload`.
    """
    settings = {
        "device": accelerator.device,
        "precision": precision_of(accelerator.mixed_precision, model),
        "grad_accum_steps": accelerator.gradient_accumulation_steps,
    }
    named = merged(config or {}, {}, "") | options
    check(accelerator)
    optimizer, _ = offload_for("the accelerator", model, rule, named, settings)
    drive(accelerator, model, optimizer)
    return optimizer


def check(accelerator: Any) -> None:
    """Raise ValueError if the accelerator is configured for what offloaded models do not
    support."""
    kind, compiler = accelerator.distributed_type.name, accelerator.state.dynamo_plugin.backend.name
    if kind not in _ALONE_OR_DDP:
        raise ValueError(
            f"distributed_type {kind}: the engine shards state, gradients and weights itself "
            "(zero_stage): launch with torchrun, or accelerate launch --multi_gpu"
        )
    if compiler != "NO":
        raise ValueError(
            f"torch_compile (dynamo backend {compiler}) compiles the model as a whole, whose "
            "weights move between calls: offload(compile_blocks=True) compiles its layers"
        )


def drive(accelerator: Any, model: nn.Module, optimizer: OffloadOptimizer) -> None:
    """Make `prepare` return an offloaded model unchanged, and redirect the accelerator's methods
    for gradients and checkpoints to the optimizer."""
    # Prevents DDP, which would average gradients again, autocast, moves and compilation.
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    optimizer._is_accelerate_prepared = True
    # Weak references: the replaced methods must not keep the accelerator, and with it the
    # optimizer's memory, alive.
    alive, before = weakref.proxy(accelerator), partial(_method, accelerator)
    accelerator.clip_grad_norm_ = partial(_clip, before("clip_grad_norm_"), optimizer)
    accelerator.get_state_dict = partial(_weights, before("get_state_dict"), model, optimizer)
    accelerator.save_state = partial(_save, before("save_state"), alive, optimizer)
    accelerator.load_state = partial(_load, before("load_state"), alive, optimizer)
    if optimizer.working_dtype is torch.float16:
        accelerator.scaler = None
        accelerator.backward = partial(_backward, alive, optimizer)


def _method(accelerator: Any, name: str) -> Callable[..., Any]:
    """Return a method of the accelerator that does not keep it alive; or the replacement that
    `drive` of another model has set."""
    if name in vars(accelerator):
        method: Callable[..., Any] = vars(accelerator)[name]
        return method
    return partial(getattr(type(accelerator), name), weakref.proxy(accelerator))


def _backward(accelerator: Any, optimizer: OffloadOptimizer, loss: Tensor) -> None:
    """`Accelerator.backward` with the engine's loss scale instead of a GradScaler."""
    optimizer.backward(loss / accelerator.gradient_accumulation_steps, divide=False)


def _clip(
    otherwise: Callable[..., Tensor],
    optimizer: OffloadOptimizer,
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2,
) -> Tensor:
    """`Accelerator.clip_grad_norm_`; clips by the engine if all its parameters are named, since
    with several ranks gradients are in shards."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    groups = optimizer.param_groups
    trained = {p for group in groups for p in group["params"] if p.requires_grad}
    if norm_type == 2 and trained <= set(params):
        return optimizer.clip_grad_norm_(max_norm)
    return otherwise(params, max_norm, norm_type)


def _weights(
    otherwise: Callable[..., Any],
    model: nn.Module,
    optimizer: OffloadOptimizer,
    requested: Any,
    unwrap: bool = True,
) -> Any:
    """`Accelerator.get_state_dict`; all ranks must call it."""
    return state_dict_of(model, optimizer) if requested is model else otherwise(requested, unwrap)


def _save(
    save: Callable[..., Any],
    accelerator: Any,
    optimizer: OffloadOptimizer,
    *args: Any,
    **named: Any,
) -> Any:
    """`Accelerator.save_state`, which assumes that every rank has the same optimizer state."""
    with _left_out(accelerator, optimizer):
        folder = save(*args, **named)
    checkpoint_files.save_state(optimizer, folder)
    return folder


def _load(
    load: Callable[..., None],
    accelerator: Any,
    optimizer: OffloadOptimizer,
    *args: Any,
    **named: Any,
) -> None:
    """`Accelerator.load_state`; between two microbatches it drops their gradients."""
    accelerator.gradient_state._set_sync_gradients(True)
    optimizer.zero_grad()
    folders: list[str] = []
    handle = accelerator.register_load_state_pre_hook(lambda _, folder: folders.append(folder))
    try:
        with _left_out(accelerator, optimizer):
            # On the device there might be no room for the file's weights.
            load(*args, **{"map_location": "cpu", **named})
    finally:
        handle.remove()
    # After the model, whose file has rounded weights.
    checkpoint_files.load_state(optimizer, Path(folders[0]))


@contextmanager
def _left_out(accelerator: Any, optimizer: OffloadOptimizer) -> Iterator[None]:
    optimizers = accelerator._optimizers
    accelerator._optimizers = [each for each in optimizers if each is not optimizer]
    try:
        yield
    finally:
        accelerator._optimizers = optimizers
