"""Samples of this machine by the monitor itself: host memory, and GPUs through NVML; no torch.

They run on their own thread, since drivers answer late, or never.
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


class MachineSampler:
    """Calls `on_sample` every second; no failure here reaches the screen's thread."""

    def __init__(
        self,
        on_sample: Callable[[System], object],
        *,
        interval_s: float = SAMPLE_S,
        make_nvml: Callable[[], Nvml] = Nvml,
    ) -> None:
        self._on_sample = on_sample
        self._interval_s = interval_s
        self._make_nvml = make_nvml
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="machine-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop sampling, without waiting for a hanging driver."""
        self._ended.set()

    def _run(self) -> None:
        nvml = self._make_nvml()
        while not self._ended.is_set():
            self._on_sample(sample(nvml))
            self._ended.wait(self._interval_s)


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
