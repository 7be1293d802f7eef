"""The options of `offload` that a framework's own arguments determine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offloadtrain.config.offload import OffloadConfig, OptionGroup

if TYPE_CHECKING:
    from torch import nn

Options = Mapping[str, Any] | OffloadConfig
"""Of `offload`, by name, or in one object."""


def merged(options: Options, taken: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """Return the options together with those that the framework determines.

    Args:
        taken: option → its value.
        whose: name of the object that the values were taken from.

    Raises:
        ValueError: an option has another value than the framework gives it.
    """
    if isinstance(options, OffloadConfig):
        options = options.options(changed=True)
    groups: dict[str, Any] = {
        key: value for key, value in options.items() if isinstance(value, OptionGroup)
    }
    if groups:
        named = {key: value for key, value in options.items() if key not in groups}
        options = OffloadConfig(**groups).options(changed=True) | named
    if wrong := [key for key in taken if options.get(key, taken[key]) != taken[key]]:
        key = wrong[0]
        raise ValueError(
            f"{key} = {options[key]!r} in the options of offload, and {taken[key]!r} by {whose}, "
            "which determines it: leave it out of the options"
        )
    return {**options, **taken}


def precision_of(mixed: str, model: nn.Module) -> str:
    """Return the precision for a framework's mixed precision: "no" keeps that of the model.

    Raises:
        ValueError: for another one than "no", "bf16" and "fp16".
    """
    import torch

    if mixed in ("bf16", "fp16"):
        return mixed
    if mixed != "no":
        raise ValueError(f"mixed precision '{mixed}': offload has 'bf16', 'fp16' and 'no'")
    dtypes = {param.dtype for param in model.parameters()}
    if torch.bfloat16 in dtypes:
        return "bf16"
    return "fp16" if torch.float16 in dtypes else "fp32"
