"""What the machine is and how it does: the only door to NVML and psutil.

Nothing here may fail a run. A GPU library that is missing, has no driver, or refuses a query is a
state with a reason, shown to the user.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil

from offloadtrain import cgroup
from offloadtrain.errors import OffloadTrainError
from offloadtrain.events import Event, GpuSample, System
from offloadtrain.memory import available_bytes

_T = TypeVar("_T")
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_UNREADABLE = (psutil.Error, OSError, ValueError, OffloadTrainError)

_NVML_STATES = {
    4: "NVML: this user may not ask the driver",
    9: "the NVIDIA driver is not loaded",
    12: "no NVIDIA driver on this machine (libnvidia-ml is missing)",
    13: "the NVIDIA driver is too old for NVML",
    15: "a GPU is lost: the machine must be restarted",
    18: "the NVIDIA driver was updated and is not loaded yet: the machine must be restarted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU as NVML tells; None is what it would not tell, `index` is NVML's."""

    index: int
    name: str
    uuid: str
    memory_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a run runs on.

    Attributes:
        cores_usable: what this process may use, by affinity and cgroup quota.
        host_memory_bytes: what is there, or the least limit of the cgroups above this process.
        torch: version, "" if it is not installed.
        gpu_state: "" if the GPUs could be asked, otherwise why not.
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


class Nvml:
    """NVML behind guarded calls.

    Attributes:
        state: "" if every GPU could be opened, otherwise why not.
    """

    def __init__(self, load: Callable[[], Any] = lambda: import_module("pynvml")) -> None:
        """`load`: returns the module `pynvml`."""
        self._module: Any = None
        self._handles: dict[int, Any] = {}
        self.state = self._start(load)

    def _start(self, load: Callable[[], Any]) -> str:
        try:
            module = load()
            module.nvmlInit()
            count = int(module.nvmlDeviceGetCount())
        except ImportError as error:
            return f"the module pynvml is not installed ({error})"
        except Exception as error:  # NVMLError classes are made at run time, one per code
            return _nvml_state(error)
        self._module = module
        lost = [f"GPU {i}: {why}" for i in range(count) if (why := self._open(i))]
        return "; ".join(lost) if count else "NVML sees no GPU"

    def _open(self, index: int) -> str:
        """Return why this GPU cannot be asked, "" if it can."""
        try:
            self._handles[index] = self._module.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:
            return _nvml_state(error)
        return ""

    def ask(self, function: str, *args: Any) -> Any:
        """The answer of one NVML call, None where it is not supported."""
        if self._module is None:
            return None
        try:
            return getattr(self._module, function)(*args)
        except Exception:  # a card that does not answer one question answers the others
            return None

    def driver(self) -> str:
        return _text(self.ask("nvmlSystemGetDriverVersion"))

    def describe(self) -> tuple[Gpu, ...]:
        """What does not change."""
        return tuple(self._describe(i, handle) for i, handle in self._handles.items())

    def sample(self) -> tuple[GpuSample, ...]:
        """Memory, load, power and temperature now."""
        return tuple(self._sample(i, handle) for i, handle in self._handles.items())

    def _describe(self, index: int, handle: Any) -> Gpu:
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
        return Gpu(
            index=index,
            name=_text(self.ask("nvmlDeviceGetName", handle)),
            uuid=_text(self.ask("nvmlDeviceGetUUID", handle)),
            memory_bytes=None if memory is None else int(memory.total),
            pcie_generation=self.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            pcie_generation_max=self.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_width=self.ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            pcie_width_max=self.ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        )

    def _sample(self, index: int, handle: Any) -> GpuSample:
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
        load = self.ask("nvmlDeviceGetUtilizationRates", handle)
        milliwatts = self.ask("nvmlDeviceGetPowerUsage", handle)
        celsius = self.ask("nvmlDeviceGetTemperature", handle, 0)
        return GpuSample(
            index=index,
            name=_text(self.ask("nvmlDeviceGetName", handle)),
            uuid=_text(self.ask("nvmlDeviceGetUUID", handle)),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            utilization_percent=None if load is None else float(load.gpu),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            temperature_c=None if celsius is None else float(celsius),
        )


def _nvml_state(error: Exception) -> str:
    return _NVML_STATES.get(getattr(error, "value", 0), f"NVML: {error}")


def probe(nvml: Nvml | None = None) -> Machine:
    """Look at this machine; takes milliseconds."""
    nvml = nvml or Nvml()
    return Machine(
        host=socket.gethostname(),
        system=platform.platform(),
        cpu=_cpu_name(),
        cores_physical=psutil.cpu_count(logical=False) or 1,
        cores_logical=psutil.cpu_count() or 1,
        cores_usable=min(len(os.sched_getaffinity(0)), _cgroup_cores()),
        host_memory_bytes=host_memory_bytes(),
        host_available_bytes=host_available_bytes(),
        python=platform.python_version(),
        torch=_version("torch"),
        driver=nvml.driver(),
        gpus=nvml.describe(),
        gpu_state=nvml.state,
    )


class Sampler:
    """Emits a `System` event every few seconds from a thread of its own."""

    def __init__(
        self, emit: Callable[[Event], None], interval_s: float = 5.0, nvml: Nvml | None = None
    ) -> None:
        self._emit = emit
        self._interval_s = interval_s
        self._nvml = nvml or Nvml()
        self._process = psutil.Process()
        _told(lambda: self._process.cpu_percent(), 0.0)  # the first only sets the reference point
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def sample(self) -> System:
        """One sample now; 0 is what the machine does not tell."""
        return System(
            cpu_percent=_told(lambda: self._process.cpu_percent(), 0.0),
            rss_bytes=_told(lambda: self._process.memory_info().rss, 0),
            host_available_bytes=host_available_bytes(),
            host_total_bytes=host_memory_bytes(),
            swap_used_bytes=_told(lambda: psutil.swap_memory().used, 0),
            gpus=self._nvml.sample(),
            gpu_state=self._nvml.state,
        )

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        self._thread.join(timeout=self._interval_s)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._emit(self.sample())


def host_memory_bytes() -> int:
    """Memory of the machine, or the least limit of the cgroups above this process; 0: unknown."""
    total = _told(lambda: psutil.virtual_memory().total, 0)
    limits = [int(text) for text in _cgroup_files("memory.max") if text.isdigit()]
    return min([total, *limits])


def host_available_bytes() -> int:
    """Memory that can still be had under every limit; 0: unknown."""
    return max(_told(available_bytes, 0), 0)


def _told(ask: Callable[[], _T], otherwise: _T) -> _T:
    try:
        return ask()
    except _UNREADABLE:
        return otherwise


def _cgroup_cores() -> int:
    """CPU time that the tightest cgroup allows, in whole cores, at least one."""
    quota = cgroup.cpu_quota(_CGROUPS, _PROC / "self/cgroup")
    cores = os.cpu_count() or 1
    return cores if quota is None else max(min(int(quota), cores), 1)


def _cgroup_files(name: str) -> Iterator[str]:
    """Yield the text of a file of this process's cgroup (version 2) and of each one above it."""
    for folder in cgroup.folders(_CGROUPS, _PROC / "self/cgroup"):
        with suppress(OSError):  # the root has no limits, and version 1 other names
            yield (folder / name).read_text().strip()


def _cpu_name() -> str:
    with suppress(OSError), open(_PROC / "cpuinfo", errors="replace") as info:
        for line in info:
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
