"""Facts of this machine: the inputs of the checks that need no measurement."""

from __future__ import annotations

import os
import resource
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from offloadtrain.hardware import cgroup
from offloadtrain.hardware.cpus import SYSFS, parse_cpulist
from offloadtrain.runtime import cuda_driver

PIN_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class TorchGpu:
    """One GPU as torch sees it.

    Attributes:
        bf16: bf16 in hardware.
        node: NUMA node, None: not reported.
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
    """The GPUs torch sees, and the reason or warning if it sees none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            gpus = tuple(_torch_gpu(i) for i in range(torch.cuda.device_count()))
            reason = "; ".join(_first_line(warning.message) for warning in caught)
        except RuntimeError as error:  # no context can be made: exclusive mode, a lost GPU
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


def gpu_node(address: str | None, sysfs: Path) -> int | None:
    """Return the NUMA node of a GPU by PCI address; None: not reported, as on most machines with
    one node."""
    file = sysfs / f"bus/pci/devices/{address}/numa_node"
    node = int(file.read_text()) if address and file.exists() else -1
    return node if node >= 0 else None


def numa_nodes(sysfs: Path) -> dict[int, list[int]]:
    """Return node → its CPUs; empty if the system has no nodes."""
    files = sysfs.glob("devices/system/node/node[0-9]*/cpulist")
    return {int(f.parent.name.removeprefix("node")): parse_cpulist(f.read_text()) for f in files}


def allowed_memories(status: Path = Path("/proc/self/status")) -> list[int]:
    """Return the nodes whose memory this process may use."""
    for line in status.read_text().splitlines():
        if line.startswith("Mems_allowed_list:"):
            return parse_cpulist(line.partition(":")[2])
    return []


def memlock_limit() -> int | None:
    """Return the bytes this process may lock; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def total_memory_bytes() -> int:
    """Return the machine's memory, regardless of limits on this process."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limit(mount: Path = cgroup.MOUNT, membership: Path = cgroup.MEMBERSHIP) -> int | None:
    """Return the least memory limit of this process's cgroups, of either version; None: no
    limit."""
    limits = cgroup.memory_limits(mount, membership)
    return min((limit.num_bytes for limit in limits), default=None)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the file system of a folder, for this user."""
    return shutil.disk_usage(folder).free


def can_pin(nbytes: int) -> bool:
    """Return whether the driver page-locks this much at once; needs a GPU."""
    memory = torch.empty(nbytes, dtype=torch.uint8)
    locked = cuda_driver.register(memory)
    if locked:
        cuda_driver.unregister(memory)
    return locked
