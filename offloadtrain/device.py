"""Which device computes, and in which precision."""

from __future__ import annotations

import torch

from offloadtrain.config import Precision
from offloadtrain.errors import ConfigError


def resolve_device(kind: str) -> torch.device:
    """Return the compute device.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            'device.kind = "cuda", but this torch sees no CUDA GPU; set device.kind = "cpu", or '
            '"auto" to take what is there'
        )
    if kind == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_precision(asked: Precision, device: torch.device) -> tuple[Precision, str]:
    """Return the precision of the working weights and, for "auto", why it is this one.

    On a CPU without bf16 matrix instructions a bf16 model is ten times slower than an fp32 one.

    Raises:
        ConfigError: bf16 is asked for on a GPU that has none.
    """
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(device)
    else:
        has_bf16, name = cpu_has_bf16(), "this CPU"
    if asked == "bf16" and device.type == "cuda" and not has_bf16:
        raise ConfigError(f'device.precision = "bf16", but {name} has no bf16; set "fp16"')
    if asked != "auto":
        return asked, ""
    if has_bf16:
        return "bf16", f"{name} computes in bf16"
    if device.type == "cuda":
        return "fp16", f"{name} has no bf16"
    return "fp32", f"{name} has no bf16 matrix instructions, and would be ten times slower in bf16"


def cpu_has_bf16() -> bool:
    """Ask oneDNN, which falls back to scalar loops where AVX-512 or its like is missing."""
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(torch.backends.mkldnn.is_available() and ask is not None and ask())
