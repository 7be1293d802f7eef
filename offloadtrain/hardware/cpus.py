"""The choice of CPUs for the kernels' threads: physical cores near the GPU, within the limits.

Pure functions over a sysfs tree make these decisions:
* One thread per physical core, minus one for the launching thread if there are more than two cores.
  Two threads on one core share its load units and are not faster.
* With a GPU on a NUMA node, the threads are bound to the cores of that node as a group: then the
  state is in memory local to the threads and the GPU. Threads are not bound to single cores,
  because another process on the node could stall one thread, and with it the bucket.
* Ranks whose GPUs share a node divide its cores.
* A CPU quota (containers) bounds the number of threads and forbids binding. A quota is a share of
  time on any core, and containers bound to the first cores would compete for them. The ranks of
  a host share one container and divide its quota.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offloadtrain.hardware import cgroup

SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """The threads and CPUs of the kernels.

    Attributes:
        threads: at least 1.
        cpus: logical CPUs to which the threads are bound as a group; empty: not bound.
        why: one sentence for a report.
    """

    threads: int
    cpus: tuple[int, ...]
    why: str


def plan(
    *,
    rank_gpus: Sequence[str | None] = (None,),
    local_rank: int = 0,
    allowed: Collection[int] | None = None,
    quota: float | None = None,
    sysfs: Path = SYSFS,
) -> CpuPlan:
    """Return the plan of one rank.

    Args:
        rank_gpus: PCI address ("0000:3b:00.0") of each local rank's GPU, or None without GPU.
        local_rank: index of this process among the local ranks.
        allowed: logical CPUs of this process's affinity; None: query them.
        quota: CPU quota of all local ranks together, in CPUs; None: no limit.
    """
    usable = os.sched_getaffinity(0) if allowed is None else set(allowed)
    cpus_of = numa_nodes(sysfs)
    nearest = [gpu_node(gpu, sysfs) for gpu in rank_gpus]
    # A node counts if this process may use its CPUs.
    nodes = [n if n is not None and usable & set(cpus_of.get(n, ())) else None for n in nearest]
    node = nodes[local_rank]
    near = usable if node is None else usable & set(cpus_of[node])
    cores = physical_cores(near, sysfs)
    sharers = [rank for rank, other in enumerate(nodes) if other == node]
    share = _share(cores, sharers.index(local_rank), len(sharers))
    threads, limits = _count(len(share), quota, len(rank_gpus))
    where = "physical cores" if node is None else f"physical cores of NUMA node {node}"
    why = f"{len(share)} of {len(cores)} {where}{limits}"
    bound = node is not None and quota is None
    return CpuPlan(
        threads, tuple(sorted(cpu for core in share for cpu in core)) if bound else (), why
    )


def local_plan(rank_gpus: Sequence[str | None] = (None,), local_rank: int = 0) -> CpuPlan:
    """Return `plan` for this process on this machine."""
    return plan(rank_gpus=rank_gpus, local_rank=local_rank, quota=cgroup.cpu_quota())


def _count(cores: int, quota: float | None, ranks: int) -> tuple[int, str]:
    """Return the number of threads for `cores` cores, and its limits; `ranks` divide the quota."""
    limits = ""
    if quota is not None and int(quota / ranks) < cores:
        cores = max(int(quota / ranks), 1)
        limits = f", cgroup quota {quota:g}" + (f" for {ranks} ranks" if ranks > 1 else "")
    if cores <= 2:
        return cores, limits
    return cores - 1, limits + ", one left to the launching thread"


def _share(cores: Sequence[tuple[int, ...]], rank: int, ranks: int) -> Sequence[tuple[int, ...]]:
    """Return this rank's contiguous part of the cores; ranks beyond the number of cores share a
    core."""
    if len(cores) < ranks:
        return [cores[rank % len(cores)]]
    return cores[len(cores) * rank // ranks : len(cores) * (rank + 1) // ranks]


def physical_cores(cpus: Iterable[int], sysfs: Path) -> list[tuple[int, ...]]:
    """Return the logical CPUs of each physical core, in the order of their first CPU."""
    cores: dict[object, list[int]] = {}
    for cpu in sorted(cpus):
        cores.setdefault(_core_of(cpu, sysfs), []).append(cpu)
    return [tuple(core) for core in cores.values()]


def _core_of(cpu: int, sysfs: Path) -> object:
    folder = sysfs / f"devices/system/cpu/cpu{cpu}/topology"
    package, core = folder / "physical_package_id", folder / "core_id"
    if not (package.exists() and core.exists()):
        return cpu
    return package.read_text().strip(), core.read_text().strip()


def cache_bytes(sysfs: Path = SYSFS) -> int:
    """Return the total size of the last-level caches of the CPUs that this process may use, over
    all chiplets; 0: not reported."""
    caches: dict[tuple[int, str], int] = {}
    for cpu in os.sched_getaffinity(0):
        for folder in sysfs.glob(f"devices/system/cpu/cpu{cpu}/cache/index[0-9]*"):
            level, shared, size = (
                file.read_text().strip() if (file := folder / name).exists() else ""
                for name in ("level", "shared_cpu_list", "size")
            )
            if level.isdecimal() and size.removesuffix("K").isdecimal():
                caches[int(level), shared] = int(size.removesuffix("K")) << 10
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)


def gpu_node(address: str | None, sysfs: Path) -> int | None:
    """Return the NUMA node of a GPU by PCI address; None if not reported, which is usual on
    machines with one node."""
    file = sysfs / f"bus/pci/devices/{(address or '').lower()}/numa_node"
    node = int(file.read_text()) if address and file.exists() else -1
    return node if node >= 0 else None


def numa_nodes(sysfs: Path) -> dict[int, list[int]]:
    """Return the CPUs of each node; empty if the system has no nodes."""
    files = sysfs.glob("devices/system/node/node[0-9]*/cpulist")
    return {int(f.parent.name.removeprefix("node")): parse_cpulist(f.read_text()) for f in files}


def parse_cpulist(text: str) -> list[int]:
    """Read "0-3,8,10-11" as [0, 1, 2, 3, 8, 10, 11]."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
