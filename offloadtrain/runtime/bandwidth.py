"""Measurement of the peak bandwidth between host and device, in a tenth of a second."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

COPY_BYTES, ROUNDS = 64 << 20, 5


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """10^9 bytes per second of one large copy, alone on the bus."""

    h2d_gbps: float
    d2h_gbps: float


def bandwidth(device: torch.device, nbytes: int = COPY_BYTES) -> Bandwidth:
    """Measure the best of a few copies each way, with page-locked memory if there is a GPU."""
    on_gpu = device.type == "cuda"
    host = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    up = min(_copy_s(host, there) for _ in range(ROUNDS))
    down = min(_copy_s(there, host) for _ in range(ROUNDS))
    return Bandwidth(nbytes / up / 1e9, nbytes / down / 1e9)


def _copy_s(source: Tensor, target: Tensor) -> float:
    device = source.device if source.is_cuda else target.device
    if device.type != "cuda":
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The stream passes both: the copy alone lies between them, without the time of its launch.
    start.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
