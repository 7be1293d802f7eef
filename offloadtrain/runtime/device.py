"""The choice of device and precision."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.offload import Precision

LEAST_SPEEDUP = 1.2
"""Minimum speedup for which a CPU uses bf16. Closer to 1, noise would decide, for little gain."""

_SIDE, _ROUNDS = 256, 6


def resolve_device(kind: str) -> torch.device:
    """Return the compute device.

    Raises:
        ConfigError: a GPU was requested and there is none.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            'device.kind = "cuda", but this torch sees no CUDA GPU; set device.kind = "cpu", or '
            '"auto" to use the available device'
        )
    if kind == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_precision(asked: Precision, device: torch.device) -> tuple[Precision, str]:
    """Return the precision of the working weights and, for "auto", the reason for the choice.

    Raises:
        ConfigError: bf16 was requested on a GPU without it.
    """
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        name = torch.cuda.get_device_name(device)
        if asked == "bf16" and not has_bf16:
            raise ConfigError(f'offload.precision = "bf16", but {name} has no bf16; set "fp16"')
        if asked != "auto":
            return asked, ""
        return ("bf16", f"{name} computes in bf16") if has_bf16 else ("fp16", f"{name} has no bf16")
    if asked != "auto":
        return asked, ""
    why = f"a product in bf16 is {cpu_bf16_speedup():.2g} times as fast as in fp32 on this CPU"
    return "bf16" if cpu_has_bf16() else "fp32", why


def cpu_has_bf16() -> bool:
    """Return whether bf16 is worthwhile on this CPU."""
    return cpu_bf16_speedup() >= LEAST_SPEEDUP


@cache
def cpu_bf16_speedup() -> float:
    """Measure the speedup of a bf16 product over fp32 on this CPU, once, in milliseconds.

    No query reports it: oneDNN calls bf16 supported on any AVX-512 and emulates missing
    instructions, and a limit such as ONEDNN_MAX_CPU_ISA hides them. The CPU time of a single thread
    is measured, so that other programs do not count. No random number is drawn, since the job
    is seeded already.
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
    """Return fp32's least time over bf16's, measured alternately; the first pair is a warm-up."""
    rounds = [(seconds(torch.float32), seconds(torch.bfloat16)) for _ in range(_ROUNDS)][1:]
    return min(fp32 for fp32, _ in rounds) / min(bf16 for _, bf16 in rounds)
