"""Examines a machine: collects facts and checks them, then measures rates and checks these."""

from __future__ import annotations

import os
import platform
import resource
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from offloadtrain.cli.doctor import checks
from offloadtrain.cli.doctor.checks import Check, DriveRates, Status
from offloadtrain.cli.doctor.measure import drive_rates, measure
from offloadtrain.config.errors import DiskError
from offloadtrain.hardware import cgroup
from offloadtrain.hardware.cpus import SYSFS, gpu_node, numa_nodes, parse_cpulist
from offloadtrain.hardware.file_system import free_bytes
from offloadtrain.hardware.machine import Machine
from offloadtrain.hardware.nvml import Nvml, link_gbps
from offloadtrain.hardware.telemetry import installed_version, probe
from offloadtrain.runtime import cuda_driver, kernels
from offloadtrain.runtime.device import resolve_precision

PIN_BYTES = 1 << 30
NEEDED = {"versions", "gpu", "driver", "torch kernels"}
"""Checks that must pass for the device to compute."""


def examine(
    folder: Path, *, quick: bool, tell: Callable[[Check], object], say: Callable[[str], None]
) -> Examination:
    """Check facts, then measure.

    Args:
        folder: the folder for checkpoints.
        tell: called with each check as soon as it is done.
        say: called with the name of each measurement.
    """
    examination = Examination(folder, quick, say)
    for check in examination.run():
        examination.checks.append(check)
        tell(check)
    return examination


class Examination:
    """One examination of this machine.

    Attributes:
        checks: completed checks.
        machine: the measurements; None before them, or if torch cannot use the GPU.
    """

    def __init__(self, folder: Path, quick: bool, say: Callable[[str], None]) -> None:
        self.checks: list[Check] = []
        self.machine: Machine | None = None
        self.folder, self.quick, self.say, self.nvml = folder, quick, say, Nvml()
        # Before torch creates a context, which itself takes memory.
        self.samples = self.nvml.sample()
        self.probe = probe(self.nvml)
        self.gpus, self.reason = torch_gpus()
        limits = [limit.num_bytes for limit in cgroup.memory_limits()]
        self.limit = min(limits, default=None)
        self.host_memory = self.probe.host_memory_bytes or total_memory_bytes()
        self.has_bf16 = bool(self.gpus and self.gpus[0].bf16)
        self.drive: DriveRates | str | None = None

    @property
    def failed(self) -> bool:
        return bool(self._failed())

    def _failed(self) -> set[str]:
        return {check.name for check in self.checks if check.status is Status.FAIL}

    def run(self) -> Iterator[Check]:
        """Check facts and measure; the caller adds each yielded check to `checks`."""
        yield from self._device()
        yield from self._host()
        if not self._failed() & NEEDED:
            self.machine = measure(
                torch.device("cuda", 0) if self.gpus else torch.device("cpu"),
                bf16=self.has_bf16,
                host_memory=self.host_memory,
                cores=min(self.probe.cores_physical, self.probe.cores_usable),
                drive=self.drive if isinstance(self.drive, DriveRates) else None,
                quick=self.quick,
                say=self.say,
            )
        yield from self._speeds(self.machine)

    def _device(self) -> Iterator[Check]:
        """Check software, GPUs and their precision."""
        probe = self.probe
        yield checks.check_versions(
            {
                "offloadtrain": installed_version("offloadtrain"),
                "Python": platform.python_version(),
                "torch": torch.__version__,
                "numba": installed_version("numba"),
            }
        )
        yield checks.check_gpu(
            [gpu.description for gpu in self.gpus],
            [gpu.name for gpu in probe.gpus] or ["a GPU"] * torch.cuda.device_count(),
            cuda=torch.version.cuda,
            reason=self.reason or probe.gpu_state or "this torch is built without CUDA",
            hidden=os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"),
        )
        yield checks.check_driver(probe.driver, torch.version.cuda)
        yield checks.check_nvml(probe.gpu_state, len(probe.gpus))
        listed = torch.cuda.get_arch_list()
        for name, capability in dict.fromkeys((gpu.name, gpu.capability) for gpu in self.gpus):
            yield checks.check_arch(name, capability, listed, torch.__version__)
        for sample in self.samples:
            yield checks.check_gpu_memory(
                sample.index, sample.memory_used_bytes, sample.memory_total_bytes
            )
        if self.gpus:
            # Emulated bf16 is many times slower.
            has = "computes in bf16" if self.has_bf16 else "has no bf16 arithmetic, only emulation"
            yield checks.check_bf16(f"{self.gpus[0].name} {has}", self.has_bf16, "fp16")
        else:
            precision, why = resolve_precision("auto", torch.device("cpu"))
            self.has_bf16 = precision == "bf16"
            yield checks.check_bf16(why, self.has_bf16, "fp32")

    def _host(self) -> Iterator[Check]:
        """Check memory, cores and the folder for checkpoints; measures its drive."""
        probe, backend = self.probe, kernels.backend()
        available = min(probe.host_available_bytes, self.host_memory)
        yield checks.check_host_memory(self.host_memory, available)
        yield checks.check_cgroup(self.limit, total_memory_bytes())
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = None if soft == resource.RLIM_INFINITY else soft
        yield checks.check_memlock(limit, available if self.gpus else 0)
        if self.gpus:
            num_bytes = min(PIN_BYTES, available // 8)
            yield checks.check_pinning(num_bytes, can_pin(num_bytes))
        cores = (probe.cores_physical, probe.cores_logical, probe.cores_usable)
        yield checks.check_cores(*cores, backend.threads, backend.where)
        nodes = [gpu.node for gpu in self.gpus]
        usable = os.sched_getaffinity(0)
        yield checks.check_numa(numa_nodes(SYSFS), usable, allowed_memories(), nodes)
        yield checks.check_kernels(backend.name, backend.isa, backend.why)
        free = free_bytes(self.folder)
        if not self.quick and free >= checks.LEAST_FREE_BYTES:
            self.say("the disk")
            self.drive = _drive(self.folder)
        yield checks.check_disk(str(self.folder.resolve()), free, self.drive)

    def _speeds(self, machine: Machine | None) -> Iterator[Check]:
        """Check warm links and speeds; `machine` is None if nothing was measured."""
        links = self.nvml.describe()
        for gpu in links:
            yield checks.check_pcie(
                gpu.index,
                (gpu.pcie_generation, gpu.pcie_generation_max),
                (gpu.pcie_width, gpu.pcie_width_max),
                busy=machine is not None and len(links) == len(self.gpus),
            )
        most = [link_gbps(g.pcie_generation_max, g.pcie_width_max) for g in links[:1]]
        if machine is not None:
            link = most[0] if most and self.gpus else None
            yield from checks.check_speeds(machine, link, bf16=self.has_bf16)


def _drive(folder: Path) -> DriveRates | str:
    """Return the drive's rates, or the error of a failed write."""
    try:
        return drive_rates(folder)
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    except DiskError as error:
        return str(error)


@dataclass(frozen=True, slots=True)
class TorchGpu:
    """One GPU as torch sees it.

    Attributes:
        bf16: it has bf16 in hardware.
        node: NUMA node; None if not reported.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    bf16: bool
    node: int | None

    @property
    def description(self) -> str:
        major, minor = self.capability
        return (
            f"{self.name}, compute capability {major}.{minor}, {self.memory_bytes / 2**30:.1f} GiB"
        )


def torch_gpus() -> tuple[tuple[TorchGpu, ...], str]:
    """Return the GPUs that torch sees, and the reason or warning if it sees none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gpus = tuple(_torch_gpu(i) for i in range(torch.cuda.device_count()))
            reason = "; ".join(_first_line(warning.message) for warning in caught)
        except RuntimeError as error:  # no context can be created: exclusive mode, or a lost GPU
            return (), _first_line(error)
    return gpus, reason


def _torch_gpu(index: int) -> TorchGpu:
    properties = torch.cuda.get_device_properties(index)
    address = cuda_driver.pci_address(index)
    with torch.cuda.device(index):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return TorchGpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        bf16=bf16,
        node=gpu_node(address, SYSFS),
    )


def _first_line(message: object) -> str:
    return str(message).strip().partition("\n")[0]


def allowed_memories() -> list[int]:
    """Return the NUMA nodes whose memory this process may use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Mems_allowed_list:"):
            return parse_cpulist(line.partition(":")[2])
    return []


def total_memory_bytes() -> int:
    """Return the machine's memory, regardless of limits on this process."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def can_pin(nbytes: int) -> bool:
    """Return True if the driver page-locks this many bytes at once; needs a GPU."""
    memory = torch.empty(nbytes, dtype=torch.uint8)
    locked = cuda_driver.register(memory)
    if locked:
        cuda_driver.unregister(memory)
    return locked
