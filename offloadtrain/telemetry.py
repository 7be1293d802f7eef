"""What the machine is and how it does: the only door to NVML and psutil.

Nothing here may fail a run. A GPU library that is missing, has no driver, or refuses a query is a
state with a reason, shown to the user.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import psutil

from offloadtrain.events import Event, GpuSample, System
from offloadtrain.memory import available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU as NVML tells; None is what it would not tell."""

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
        cores_usable: what this process may use, by affinity.
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
    """NVML behind guarded calls; `state` says why there are no GPUs to see."""

    def __init__(self, load: Callable[[], Any] = lambda: import_module("pynvml")) -> None:
        """`load`: returns the module `pynvml`."""
        self._module: Any = None
        self._handles: list[Any] = []
        self.state = self._start(load)

    def _start(self, load: Callable[[], Any]) -> str:
        try:
            module = load()
            module.nvmlInit()
            count = module.nvmlDeviceGetCount()
            self._handles = [module.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except ImportError as error:
            return f"the module pynvml is not installed ({error})"
        except Exception as error:  # NVMLError classes are made at run time, one per code
            return f"NVML: {error}"
        self._module = module
        return "" if self._handles else "NVML sees no GPU"

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
        return tuple(self._describe(i, handle) for i, handle in enumerate(self._handles))

    def sample(self) -> tuple[GpuSample, ...]:
        """Memory, load, power and temperature now."""
        return tuple(self._sample(i, handle) for i, handle in enumerate(self._handles))

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


def probe(nvml: Nvml | None = None) -> Machine:
    """Look at this machine; takes milliseconds."""
    nvml = nvml or Nvml()
    return Machine(
        host=socket.gethostname(),
        system=platform.platform(),
        cpu=_cpu_name(),
        cores_physical=psutil.cpu_count(logical=False) or 1,
        cores_logical=psutil.cpu_count() or 1,
        cores_usable=len(os.sched_getaffinity(0)),
        host_memory_bytes=psutil.virtual_memory().total,
        host_available_bytes=available_bytes(),
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
        self._process.cpu_percent()  # the first call only sets the reference point
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def sample(self) -> System:
        """One sample now."""
        memory = psutil.virtual_memory()
        return System(
            cpu_percent=self._process.cpu_percent(),
            rss_bytes=self._process.memory_info().rss,
            host_available_bytes=available_bytes(),
            host_total_bytes=memory.total,
            swap_used_bytes=psutil.swap_memory().used,
            gpus=self._nvml.sample(),
            gpu_state=self._nvml.state,
        )

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        self._thread.join(timeout=self._interval_s)

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            with suppress(psutil.Error, OSError):  # a sample that cannot be taken is left out
                self._emit(self.sample())


def _cpu_name() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as info:
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
