"""Which device computes, and in which precision."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.offload import Precision

LEAST_SPEEDUP = 1.2
"""From here on a CPU takes bf16. Nearer to 1, noise would decide, and little would be gained."""

_SIDE, _ROUNDS = 256, 6


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

    Raises:
        ConfigError: bf16 is asked for on a GPU that has none.
    """
    if device.type == "cuda":
        return _on_gpu(asked, device)
    if asked != "auto":
        return asked, ""
    why = f"a product in bf16 is {cpu_bf16_speedup():.2g} times as fast as in fp32 on this CPU"
    return "bf16" if cpu_has_bf16() else "fp32", why


def _on_gpu(asked: Precision, device: torch.device) -> tuple[Precision, str]:
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    name = torch.cuda.get_device_name(device)
    if asked == "bf16" and not has_bf16:
        raise ConfigError(f'offload.precision = "bf16", but {name} has no bf16; set "fp16"')
    if asked != "auto":
        return asked, ""
    return ("bf16", f"{name} computes in bf16") if has_bf16 else ("fp16", f"{name} has no bf16")


def cpu_has_bf16() -> bool:
    """Whether bf16 pays on this CPU."""
    return cpu_bf16_speedup() >= LEAST_SPEEDUP


@cache
def cpu_bf16_speedup() -> float:
    """How many times as fast as in fp32 a product is in bf16 on this CPU; milliseconds, once.

    It is measured, for nothing tells it: oneDNN calls bf16 supported wherever there is AVX-512, and
    emulates it where the instructions are missing; a limit such as ONEDNN_MAX_CPU_ISA hides them.
    One thread's own CPU time is taken, so that other programs do not count. No random number is
    drawn: a job is seeded already.
    """
    ones = torch.ones(_SIDE, _SIDE, device="cpu")
    operands = {dtype: ones.to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def seconds(dtype: torch.dtype) -> float:
        began = time.thread_time()
        torch.nn.functional.linear(operands[dtype], operands[dtype])
        return time.thread_time() - began

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return speedup(seconds)
    finally:
        torch.set_num_threads(threads)


def speedup(seconds: Callable[[torch.dtype], float]) -> float:
    """fp32's least time over bf16's, measured in turn; each one's first makes its kernels ready."""
    rounds = [(seconds(torch.float32), seconds(torch.bfloat16)) for _ in range(_ROUNDS)][1:]
    return min(fp32 for fp32, _ in rounds) / min(bf16 for _, bf16 in rounds)
