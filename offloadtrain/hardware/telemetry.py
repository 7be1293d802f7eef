"""Facts and samples of the machine; the only importer of psutil.

Nothing here may fail a run. A missing GPU library or driver, or a refused query, is a state with a
reason, shown to the user.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import psutil

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.events.schema import Event, System
from offloadtrain.hardware import cgroup
from offloadtrain.hardware.host_memory import available_bytes, resident_bytes, stated_bytes
from offloadtrain.hardware.nvml import Gpu, Nvml

_T = TypeVar("_T")
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNREADABLE = (psutil.Error, OSError, ValueError, OffloadTrainError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemInfo:
    """The machine of a run.

    Attributes:
        cores_usable: cores that this process may use, by affinity and cgroup quota.
        host_memory_bytes: installed memory, or the smallest limit of the cgroups of this process.
        torch: version, "" if it is not installed.
        gpu_state: "" if the GPUs could be queried, otherwise the reason.
    """

    host: str
    system: str
    cpu: str
    cores_physical: int
    cores_logical: int
    cores_usable: int
    host_memory_bytes: int
    host_available_bytes: int
    python: str
    torch: str
    driver: str
    gpus: tuple[Gpu, ...]
    gpu_state: str


def probe(nvml: Nvml | None = None) -> SystemInfo:
    """Probe this machine; takes milliseconds."""
    nvml, usable = nvml or Nvml(), len(os.sched_getaffinity(0))
    quota = cgroup.cpu_quota(_CGROUPS, _PROC / "self/cgroup")
    return SystemInfo(
        host=socket.gethostname(),
        system=platform.platform(),
        cpu=_cpu_name(),
        cores_physical=psutil.cpu_count(logical=False) or 1,
        cores_logical=psutil.cpu_count() or 1,
        cores_usable=usable if quota is None else max(min(int(quota), usable), 1),
        host_memory_bytes=host_memory_bytes(),
        host_available_bytes=host_available_bytes(),
        python=platform.python_version(),
        torch=installed_version("torch"),
        driver=nvml.driver(),
        gpus=nvml.describe(),
        gpu_state=nvml.state,
    )


def anonymous_mappings() -> list[tuple[int, str]]:
    """Return (bytes, name) of the anonymous memory of this process, by the names that the kernel
    gives to mappings, the largest first; empty if they cannot be read. Takes milliseconds."""
    with suppress(*_UNREADABLE):
        mappings = psutil.Process().memory_maps(grouped=True)
        return sorted(((each.anonymous, each.path) for each in mappings), reverse=True)
    return []


class Sampler:
    """Emits a `System` event every few seconds from its own thread."""

    def __init__(
        self, emit: Callable[[Event], None], interval_s: float = 5.0, nvml: Nvml | None = None
    ) -> None:
        self._emit = emit
        self._interval_s = interval_s
        self.nvml = nvml or Nvml()
        self._process = psutil.Process()
        # The first call only sets the reference.
        _or_default(lambda: self._process.cpu_percent(), 0.0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def sample(self) -> System:
        """Take one sample; 0: not reported by the machine."""
        cpus = psutil.cpu_count() or 0
        return System(
            cpu_percent=_or_default(lambda: self._process.cpu_percent(), 0.0),
            rss_bytes=resident_bytes() or 0,
            host_available_bytes=host_available_bytes(),
            host_total_bytes=host_memory_bytes(),
            swap_used_bytes=_or_default(lambda: psutil.swap_memory().used, 0),
            gpus=self.nvml.sample(),
            gpu_state=self.nvml.state,
            host_cpu_percent=cpus * _or_default(psutil.cpu_percent, 0.0),
            host_cpus=cpus,
        )

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        self._thread.join(timeout=self._interval_s)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._emit(self.sample())


def host_memory_bytes() -> int:
    """Return the installed or stated memory, or the smallest limit of the cgroups of this process;
    0: unknown."""
    total = stated_bytes() or _or_default(lambda: psutil.virtual_memory().total, 0)
    limits = cgroup.memory_limits(_CGROUPS, _PROC / "self/cgroup")
    return min([total, *(limit.num_bytes for limit in limits)])


def host_available_bytes() -> int:
    """Return the memory still available under every limit; 0: unknown."""
    return max(_or_default(available_bytes, 0), 0)


def _or_default(ask: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return ask()
    except _UNREADABLE:
        return otherwise


def _cpu_name() -> str:
    with suppress(OSError), open(_PROC / "cpuinfo", errors="replace") as info:
        for line in info:
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed_version(package: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
