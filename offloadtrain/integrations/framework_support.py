"""Shared code of jobs and of the integrations of the Trainer, Accelerate and Lightning.

It merges options of `offload` with a framework's arguments, and returns weights in the form in
which frameworks save them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from offloadtrain.config.offload import OffloadConfig, OptionGroup
from offloadtrain.engine import OffloadOptimizer, offload
from offloadtrain.optim import AnyRule

Options = Mapping[str, Any] | OffloadConfig
"""Options of `offload`, by name or as one object."""

Dtypes = Mapping[nn.Parameter, torch.dtype]


def merged(options: Options, settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the options combined with those that the framework determines.

    Args:
        settings: option → the value that the framework determines.
        source: name of the object that determines them, for messages.

    Raises:
        ValueError: an option contradicts a setting.
    """
    if isinstance(options, OffloadConfig):
        options = options.options(changed=True)
    groups: dict[str, Any] = {
        key: value for key, value in options.items() if isinstance(value, OptionGroup)
    }
    if groups:
        named = {key: value for key, value in options.items() if key not in groups}
        options = OffloadConfig(**groups).options(changed=True) | named
    if wrong := [key for key in settings if options.get(key, settings[key]) != settings[key]]:
        key = wrong[0]
        raise ValueError(
            f"{key} = {options[key]!r} in the options of offload, and {settings[key]!r} by "
            f"{source}, which determines it: leave it out of the options"
        )
    return {**options, **settings}


def liger_problem(device: torch.device) -> str:
    """Return why Liger's fused kernels cannot run on a device; "" if they can."""
    missing = [name for name in ("liger_kernel", "triton") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported: pip install 'offloadtrain[fused]'"
    if device.type != "cuda":
        return f"its kernels are Triton's and need a GPU, and the device is {device.type}"
    return ""


def precision_of(mixed: str, model: nn.Module) -> str:
    """Return the precision for a framework's mixed precision; "no" means that of the model.

    Raises:
        ValueError: it is not "no", "bf16" or "fp16".
    """
    if mixed in ("bf16", "fp16"):
        return mixed
    if mixed != "no":
        raise ValueError(f"mixed precision '{mixed}': offload has 'bf16', 'fp16' and 'no'")
    dtypes = {param.dtype for param in model.parameters()}
    if torch.bfloat16 in dtypes:
        return "bf16"
    return "fp16" if torch.float16 in dtypes else "fp32"


def offload_for(
    source: str,
    model: nn.Module,
    rule: AnyRule | None,
    options: Options,
    settings: Mapping[str, Any],
    **more: Any,
) -> tuple[OffloadOptimizer, Dtypes]:
    """Offload a model with the user's options and the framework's settings; see `merged`.

    Args:
        more: further arguments of `offloadtrain.offload`.

    Returns:
        (optimizer, dtypes of the parameters before offloading, for `state_dict_of`).

    Raises:
        ValueError: an option contradicts a setting.
        other errors: as in `offloadtrain.offload`.
    """
    chosen, dtypes = merged(options, settings, source), {p: p.dtype for p in model.parameters()}
    return offload(model, rule, **chosen, **more), dtypes


def state_dict_of(
    model: nn.Module, optimizer: OffloadOptimizer, original: Dtypes | None = None
) -> dict[str, Tensor]:
    """Return the model's state dict on the host. All ranks must call it, since it gathers shards.

    Args:
        original: the parameters' dtypes before offloading; for fp32 parameters, the masters
            are returned instead of 16-bit weights. They are views of "fp32" state on a single rank,
            otherwise copies of 4 bytes per parameter.
    """
    ranks = optimizer.ranks
    if optimizer.config.zero_stage_among(ranks.size) == 3:
        buffers = {
            f"{prefix}{'.' * bool(prefix)}{name}": buffer.to("cpu", copy=True)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        state = buffers | dict(optimizer.full_weights())
    else:
        state = model.state_dict()
    wide = [param for param, dtype in (original or {}).items() if dtype is torch.float32]
    masters = _masters(optimizer, set(wide)) if wide else {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in masters and name in state:
            state[name] = masters[param]
    return state


def _masters(optimizer: OffloadOptimizer, wide: set[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the fp32 masters of those parameters that are trained."""
    params = dict(optimizer.model.named_parameters())
    state = {param: optimizer.state.get(param, {}) for param in params.values()}
    masters = {
        param: entry["master"]
        for param, entry in state.items()
        # Except a parameter that was frozen and then overwritten.
        if "master" in entry
        and (param.requires_grad or torch.equal(entry["master"].to(param), param))
    }
    if optimizer.ranks.is_single and masters:
        return {param: master for param, master in masters.items() if param in wide}
    gathered = ((params[name], master) for name, master in optimizer.master_weights())
    return {param: master for param, master in gathered if param in wide and param.requires_grad}
