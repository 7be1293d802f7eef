"""Memory of one GPU: the counters of torch's allocator, and the bandwidth between host and device.

Reading a counter does not wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offloadtrain.hardware.memory_sampler import DeviceMemory


class AllocatorCounters:
    """Bytes of the allocator now, at the peak of the step, and at the peak of the run.

    The allocator has a single peak. `end_step` resets it, so it is the step's; the run's peak is
    stored here. No other code in the process may reset it.
    """

    def __init__(self, device: torch.device, free: Callable[[], int | None] = lambda: None) -> None:
        """`free`: returns the bytes that the driver reports as free on the device."""
        self._device, self._free = device, free
        self._run_peak = 0

    def read(self) -> DeviceMemory:
        """Read all counters, on any thread."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated = stats["allocated_bytes"]["all"]
        return DeviceMemory(
            allocated=allocated["current"],
            reserved=stats["reserved_bytes"]["all"]["current"],
            inactive=stats["inactive_split_bytes"]["all"]["current"],
            peak=allocated["peak"],
            free=self._free(),
        )

    def end_step(self) -> int:
        """Return the peak of the step, and reset the allocator's peak; on the training thread."""
        peak = torch.cuda.max_memory_allocated(self._device)
        self._run_peak = max(self._run_peak, peak)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    @property
    def run_peak(self) -> int:
        """The largest peak since the process started."""
        return max(self._run_peak, torch.cuda.max_memory_allocated(self._device))


class MemoryUse(NamedTuple):
    """The memory of a GPU, in bytes.

    Attributes:
        total: memory of the GPU that this process may use: torch's allocator has a limit if
            `torch.cuda.set_per_process_memory_fraction` was called.
        others: used outside of torch's allocator, by this process (CUDA's context) and others.
        peak: the most that torch's allocator has reserved since its statistics were reset.
    """

    total: int
    others: int
    peak: int


def memory_use(device: torch.device) -> MemoryUse:
    """Read the memory use of a GPU from driver and allocator."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]
    others = total - free - reserved["current"]
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return MemoryUse(min(total, others + allowed), others, reserved["peak"])


def failed_allocations(device: torch.device) -> int:
    """Count the allocations that have raised `torch.OutOfMemoryError` in this process."""
    if device.type != "cuda":
        return 0
    failures: int = torch.cuda.memory_stats_as_nested_dict(device)["num_ooms"]
    return failures


COPY_BYTES, ROUNDS = 64 << 20, 5


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth of one large copy without other traffic, in 10^9 bytes per second."""

    h2d_gbps: float
    d2h_gbps: float


def bandwidth(device: torch.device) -> Bandwidth:
    """Measure the best of a few copies each way, with page-locked memory if there is a GPU."""
    on_gpu = device.type == "cuda"
    host = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
    there = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    up = min(_copy_s(host, there) for _ in range(ROUNDS))
    down = min(_copy_s(there, host) for _ in range(ROUNDS))
    return Bandwidth(COPY_BYTES / up / 1e9, COPY_BYTES / down / 1e9)


def _copy_s(source: Tensor, target: Tensor) -> float:
    device = source.device if source.is_cuda else target.device
    if device.type != "cuda":
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Recorded on the stream, the events enclose only the copy, not the time of its launch.
    start.record()
    target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
