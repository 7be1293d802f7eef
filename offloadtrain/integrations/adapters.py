"""PEFT models under offload: adapters attached, saved, and merged into their base.

`write_model` saves any model of transformers, with adapters or without. All work on adapters is
done by PEFT; this module gives it master weights, one layer at a time, where PEFT would read the
model's weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.engine import ModelError
from offloadtrain.integrations.export import Named, write_configuration, write_weights

_SHORT = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
"""Short name → the name of `LoraConfig`."""

PREFIX = "base_model.model."
"""Prefix of parameter names of the base model in a PEFT model."""


def is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_model(model: Any) -> Any:
    """Return the model that PEFT wraps, or the model itself."""
    return model.get_base_model() if is_peft(model) else model


def lora_config(keys: Mapping[str, Any]) -> Any:
    """Return PEFT's `LoraConfig` for these keys.

    Raises:
        TypeError: `LoraConfig` does not have a key.
    """
    from peft import LoraConfig

    return LoraConfig(**{_SHORT.get(key, key): value for key, value in keys.items()})


def reads_base(config: Any) -> bool:
    """Return True if new adapters are computed from the values of the base model's weights."""
    return bool(
        config.init_lora_weights not in (True, False, "gaussian")
        or config.use_dora
        or config.modules_to_save
        or config.trainable_token_indices
        or config.target_parameters
        or config.layer_replication
    )


def attach(model: nn.Module, config: Any) -> Any:
    """Wrap a model in adapters; their weights have values even if the model is on the meta
    device."""
    from peft import get_peft_model

    with _standing_in(model):
        return get_peft_model(model, config)


@contextmanager
def _standing_in(model: nn.Module) -> Iterator[None]:
    """Context in which meta parameters have one element of host memory, since PEFT creates adapters
    on the device of the base model's weights."""
    swapped = [param for param in model.parameters() if param.is_meta]
    for param in swapped:
        element = torch.zeros((), dtype=param.dtype, device="cpu")
        torch.utils.swap_tensors(
            param, nn.Parameter(element.expand(param.shape), param.requires_grad)
        )
    yield
    for param in swapped:
        meta = torch.empty(param.shape, dtype=param.dtype, device="meta")
        torch.utils.swap_tensors(param, nn.Parameter(meta, param.requires_grad))


def write_model(
    model: Any,
    folder: Path,
    weights: Named,
    buffers: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    merge: bool,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a model of transformers. Of a PEFT model only the adapters are written, as
    `PeftModel.from_pretrained` loads them, unless `merge` is set.

    Args:
        model: may be on the meta device: only its names, shapes and configuration are used.
        weights: (name, weights) of all parameters; trained ones in fp32.
        buffers: buffers of the base model, by its names.
        merge: write the base of a PEFT model with its active adapters merged in.

    Raises:
        ModelError: adapters that cannot be merged.
    """
    if is_peft(model) and not merge:
        _write_adapters(model, folder, weights, dtype)
        return
    base = model
    if is_peft(model):
        base, weights = _bare(model), _merged_weights(model, weights)
    write_weights(base, folder, weights, buffers, dtype, max_shard_size)
    write_configuration(base_model(model), folder, dtype)


def _write_adapters(model: Any, folder: Path, weights: Named, dtype: torch.dtype) -> None:
    """Write every adapter of the model."""
    from peft import get_peft_model_state_dict

    # Map PEFT's entries to parameter names of the model.
    tensors = (*model.named_parameters(), *model.named_buffers())
    shapes = {name: torch.empty_like(x, device="meta") for name, x in tensors}
    name_of = {id(x): name for name, x in shapes.items()}
    saved = [
        get_peft_model_state_dict(model, state_dict=dict(shapes), adapter_name=adapter)
        for adapter in model.peft_config
    ]
    wanted = {name_of[id(x)] for entries in saved for x in entries.values() if id(x) in name_of}
    state = {
        name: x.to(dtype) if x.is_floating_point() else x for name, x in weights if name in wanted
    }
    state |= {name: x for name, x in model.named_buffers() if name in wanted}
    model.save_pretrained(str(folder), state_dict=state)


def _bare(model: Any) -> Any:
    """Return the base model as before PEFT wrapped it, on the meta device."""
    base = model.get_base_model()
    with torch.device("meta"):
        empty = type(base)(copy.deepcopy(base.config))
    if hasattr(base, "_weight_conversions"):
        empty._weight_conversions = base._weight_conversions
    return empty


def _merged_weights(model: Any, weights: Named) -> Named:
    """Yield the base model's weights with its active adapters merged in, in fp32, with the names
    of `_bare(model)`. Only one layer is in memory at a time.

    Raises:
        ModelError: PEFT cannot merge these adapters, or the base is quantized.
    """
    wrapped = dict(_wrapped(model))
    owner = {
        f"{path}.{name}": path
        for path, module in wrapped.items()
        for name, _ in module.named_parameters()
    }
    waiting: dict[str, dict[str, Tensor]] = {path: {} for path in wrapped}
    for name, value in weights:
        if (path := owner.get(name)) is None:
            yield name.removeprefix(PREFIX), value
            continue
        members = waiting[path]
        members[name.removeprefix(f"{path}.")] = value
        if len(members) == sum(1 for _ in wrapped[path].named_parameters()):
            for key, merged in _merged(wrapped[path], waiting.pop(path)).items():
                yield f"{path.removeprefix(PREFIX)}.{key}", merged


def _wrapped(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each layer that PEFT has replaced."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    if not hasattr(model.base_model, "merge_and_unload"):
        raise ModelError(f"adapters of kind {model.active_peft_config.peft_type} cannot be merged")
    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        kinds = [type(inner).__name__ for inner in list(module.modules())[1:]]
        if any(isinstance(inner, BaseTunerLayer) for inner in list(module.modules())[1:]):
            raise ModelError(f"'{path}' has adapters inside adapters ({kinds[0]}): merge with PEFT")
        if not all(p.is_floating_point() for p in module.parameters()):
            raise ModelError(f"'{path}' is quantized: merge its adapters with PEFT, dequantized")
        yield path, module


@torch.no_grad()
def _merged(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge a copy of one layer with these weights; return its parameters by name."""
    params = module.named_parameters()
    memo = {id(param): nn.Parameter(values[name], False) for name, param in params}
    copied: Any = copy.deepcopy(module, memo)
    if hasattr(copied, "unload_and_optionally_merge_module"):
        merged = copied.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    else:
        copied.merge()
        merged = copied.get_base_layer()
    return {name: param.data for name, param in merged.named_parameters()}
