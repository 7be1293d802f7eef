"""Samples of this machine by the monitor itself: host memory, and GPUs through NVML; no torch.

They run on their own thread, since drivers answer late, or never: nobody waits for its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import psutil

from offloadtrain.events.schema import GpuProcess, System
from offloadtrain.hardware import cgroup
from offloadtrain.hardware.nvml import Nvml

SAMPLE_S = 1.0


def keep_sampling(on_sample: Callable[[System], object], ended: threading.Event) -> None:
    """Call `on_sample` every second, on a thread of its own, until `ended` is set."""
    nvml = Nvml()
    while not ended.is_set():
        on_sample(sample(nvml))
        ended.wait(SAMPLE_S)


def sample(nvml: Nvml) -> System:
    """Sample the machine, without figures of a process."""
    memory, limits = psutil.virtual_memory(), cgroup.memory_limits()
    return System(
        cpu_percent=psutil.cpu_percent(),
        rss_bytes=0,
        # In a container the machine's memory is more than programs get.
        host_available_bytes=max(min([memory.available, *(x.free_bytes for x in limits)]), 0),
        host_total_bytes=min([memory.total, *(limit.num_bytes for limit in limits)]),
        swap_used_bytes=psutil.swap_memory().used,
        gpus=tuple(
            replace(gpu, processes=tuple(map(_with_owner, gpu.processes)))
            for gpu in nvml.sample(processes=True)
        ),
        gpu_state=nvml.state,
    )


def _with_owner(process: GpuProcess) -> GpuProcess:
    """Add user and command; they stay empty for a process of another container."""
    try:
        details = psutil.Process(process.pid)
        return replace(process, user=details.username(), command=" ".join(details.cmdline()))
    except (psutil.Error, OSError, ValueError):
        return process
