"""NVIDIA GPUs through NVML: the only importer of the module `pynvml`.

Nothing here raises. A missing library or driver, or a refused query, is a state with a reason.
Devices are identified by UUID, because NVML's index differs from CUDA's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from offloadtrain.events.schema import GpuProcess, GpuSample

_PCIE_COUNTERS = (197, 198)
"""NVML_FI_DEV_PCIE_COUNT_TX_BYTES and …_RX_BYTES."""

_NVLINK_COUNTERS = ((138, 0xFFFFFFFF), (139, 0xFFFFFFFF))
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and …_RX, in KiB, of all links together."""

LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCIe generation → 10^9 bytes per second of one lane, one way, after line coding."""

_SM_CLOCK = 1
"""NVML_CLOCK_SM."""

_WIDE = (2, 3)
"""Value types of 64 bits: unsigned long on Linux, and unsigned long long."""

_THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

_NVML_STATES = {
    4: "NVML: this user may not query the driver",
    9: "the NVIDIA driver is not loaded",
    12: "no NVIDIA driver on this machine (libnvidia-ml is missing)",
    13: "the NVIDIA driver is too old for NVML",
    15: "a GPU is lost: the machine must be restarted",
    18: "the NVIDIA driver was updated and is not loaded yet: the machine must be restarted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU as NVML reports it; None: not reported. `index` is NVML's index."""

    index: int
    name: str
    uuid: str
    memory_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None


class Nvml:
    """NVML behind guarded calls.

    Attributes:
        state: "" if every GPU could be opened, otherwise the reason.
    """

    def __init__(
        self,
        load: Callable[[], Any] = lambda: import_module("pynvml"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` returns the module `pynvml`; `clock` returns seconds."""
        self._clock = clock
        self._module: Any = None
        self._handles: dict[int, Any] = {}
        self._by_uuid: dict[str, Any] = {}
        self._counted: dict[tuple[int, int], tuple[float, int]] = {}
        """Time and value of the last reading of each counter, by (GPU, field)."""
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
        """Return the reason why this GPU cannot be queried, "" if it can."""
        try:
            self._handles[index] = self._module.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:
            return _nvml_state(error)
        return ""

    def ask(self, function: str, *args: Any) -> Any:
        """Return the result of one NVML call, None if unsupported."""
        if self._module is None:
            return None
        try:
            return getattr(self._module, function)(*args)
        except Exception:  # one unsupported query does not affect the others
            return None

    def driver(self) -> str:
        return _text(self.ask("nvmlSystemGetDriverVersion"))

    def describe(self) -> tuple[Gpu, ...]:
        """Read the constant facts."""
        return tuple(self._describe(i, handle) for i, handle in self._handles.items())

    def sample(self, *, processes: bool = False) -> tuple[GpuSample, ...]:
        """Sample memory, load, power, heat, clock and links; takes about a millisecond per GPU.

        With `processes`, also list the processes that have memory on the GPU.
        """
        return tuple(self._sample(i, handle, processes) for i, handle in self._handles.items())

    def _describe(self, index: int, handle: Any) -> Gpu:
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
        return Gpu(
            index=index,
            name=_text(self.ask("nvmlDeviceGetName", handle)),
            uuid=_text(self.ask("nvmlDeviceGetUUID", handle)),
            memory_bytes=None if memory is None else int(memory.total),
            **_link(self.ask, handle),
        )

    def memory_free(self, uuid: str) -> int | None:
        """Return the free bytes on the GPU with this UUID, as the driver reports them; None if
        unknown."""
        if uuid not in self._by_uuid:
            named = ((_text(self.ask("nvmlDeviceGetUUID", h)), h) for h in self._handles.values())
            self._by_uuid = dict(named)
        handle = self._by_uuid.get(uuid)
        memory = None if handle is None else self.ask("nvmlDeviceGetMemoryInfo", handle)
        return None if memory is None else int(memory.free)

    def _rates(self, index: int, handle: Any) -> list[float | None]:
        """Return the bytes per second that the GPU has sent and received since the last sample,
        over PCIe, and over NVLink if it exists.

        The byte counters are used because NVML's own rate blocks for 20 ms per direction.
        """
        fields = [*_PCIE_COUNTERS, *_NVLINK_COUNTERS]
        values = self.ask("nvmlDeviceGetFieldValues", handle, fields)
        if values is None:
            return [None] * len(fields)
        rates = [self._rate(index, value) for value in values]
        return [*rates[:2], *(None if rate is None else 1024 * rate for rate in rates[2:])]

    def _rate(self, index: int, value: Any) -> float | None:
        # 32-bit counters are useless: at bus speed they wrap several times a second.
        if value.nvmlReturn != 0 or value.valueType not in _WIDE:
            return None
        now, count = self._clock(), int(value.value.ullVal)
        key = (index, int(value.fieldId))
        before = self._counted.get(key)
        self._counted[key] = (now, count)
        if before is None or now <= before[0] or count < before[1]:
            return None
        return (count - before[1]) / (now - before[0])

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...]:
        """List the processes that compute on the GPU, largest first."""
        running = self.ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        listed = [
            GpuProcess(pid=int(process.pid), num_bytes=process.usedGpuMemory) for process in running
        ]
        return tuple(sorted(listed, key=lambda process: -(process.num_bytes or 0)))

    def _sample(self, index: int, handle: Any, processes: bool) -> GpuSample:
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle)
        load = self.ask("nvmlDeviceGetUtilizationRates", handle)
        milliwatts = self.ask("nvmlDeviceGetPowerUsage", handle)
        celsius = self.ask("nvmlDeviceGetTemperature", handle, 0)
        rates = self._rates(index, handle)
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        active = [word for bit, word in _THROTTLES.items() if (reasons or 0) & bit]
        return GpuSample(
            **_link(self.ask, handle),
            throttle=", ".join(active),
            processes=self._processes(handle) if processes else (),
            pcie_tx_bytes_per_s=rates[0],
            pcie_rx_bytes_per_s=rates[1],
            nvlink_tx_bytes_per_s=rates[2],
            nvlink_rx_bytes_per_s=rates[3],
            index=index,
            name=_text(self.ask("nvmlDeviceGetName", handle)),
            uuid=_text(self.ask("nvmlDeviceGetUUID", handle)),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            utilization_percent=None if load is None else float(load.gpu),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            temperature_c=None if celsius is None else float(celsius),
            clock_mhz=self.ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
            clock_max_mhz=self.ask("nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK),
        )


def link_gbps(generation: int | None, width: int | None) -> float | None:
    """Return the bandwidth of a PCIe link; None if not reported."""
    if generation is None or width is None or generation not in LANE_GBPS:
        return None
    return LANE_GBPS[generation] * width


def _nvml_state(error: Exception) -> str:
    return _NVML_STATES.get(getattr(error, "value", 0), f"NVML: {error}")


def _link(ask: Callable[..., Any], handle: Any) -> dict[str, int | None]:
    return {
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        "pcie_generation_max": ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        "pcie_width_max": ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
    }


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
