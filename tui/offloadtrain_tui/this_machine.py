"""The monitor's own samples of this machine: host memory, and GPUs through NVML, without torch.

They are taken on a separate thread, which is never joined, because a driver may hang.
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
    """Call `on_sample` every second until `ended` is set; runs on its own thread."""
    nvml = Nvml()
    while not ended.is_set():
        on_sample(sample(nvml))
        ended.wait(SAMPLE_S)


def sample(nvml: Nvml) -> System:
    """Sample the machine; figures of the process are 0."""
    memory, limits = psutil.virtual_memory(), cgroup.memory_limits()
    return System(
        cpu_percent=psutil.cpu_percent(),
        rss_bytes=0,
        # A container has less memory than the machine.
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
    """Add user and command, which stay empty for a process of another container."""
    try:
        details = psutil.Process(process.pid)
        return replace(process, user=details.username(), command=" ".join(details.cmdline()))
    except (psutil.Error, OSError, ValueError):
        return process
