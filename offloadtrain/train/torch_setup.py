"""torch as a job asks for it: seeds, threads, determinism, a limit on GPU memory."""

from __future__ import annotations

import os

import torch

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.units import format_bytes, parse_bytes
from offloadtrain.hardware import cgroup
from offloadtrain.runtime import kernels
from offloadtrain.runtime.failure_detector import RankInfo
from offloadtrain.train.resume import ResumedSettings
from offloadtrain.train.saved import rng


def set_up_torch(
    config: Config, device: torch.device, rank_info: RankInfo, resumed: ResumedSettings | None
) -> None:
    """Set up this process, before anything is drawn or allocated.

    Raises:
        ConfigError: the limit on GPU memory cannot be kept.
    """
    # Each rank draws its own dropout, but for those that compute the same batch.
    rng.seed_all(config.train.seed + rank_info.rank // config.ranks.tensor)
    torch.set_num_threads(_threads(config, device, rank_info, resumed))
    if config.device.threads:
        kernels.set_threads(config.device.threads)
    elif rank_info.local_size > 1 and device.type == "cpu":
        kernels.set_threads(_share(rank_info))
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.train.deterministic)
    _bound_process(config.device.process_memory_limit, device)


def _threads(
    config: Config, device: torch.device, rank_info: RankInfo, resumed: ResumedSettings | None
) -> int:
    """Return torch's number of threads: as requested, or as in the checkpoint since bits depend on
    it, or as available."""
    if config.device.threads:
        return config.device.threads
    alone = rank_info.local_size == 1
    if alone and "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    if resumed is not None and resumed.threads and resumed.ranks == rank_info.size:
        return min(resumed.threads, len(os.sched_getaffinity(0)))
    if not alone and device.type == "cuda":
        return torch.get_num_threads()
    return _share(rank_info) if not alone else min(torch.get_num_threads(), _share(rank_info))


def _share(rank_info: RankInfo) -> int:
    """Return the CPUs per rank of this host, by affinity and quota; at least 1."""
    usable, quota = len(os.sched_getaffinity(0)), cgroup.cpu_quota()
    if quota is not None:
        usable = min(usable, int(quota))
    return max(1, usable // rank_info.local_size)


def _bound_process(limit: str, device: torch.device) -> None:
    """Let torch enforce the limit for every allocation."""
    if not limit:
        return
    if device.type != "cuda":
        raise ConfigError(
            "device.process_memory_limit bounds the memory of a GPU, and this run computes on the "
            "CPU: leave it out"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    if parse_bytes(limit) > total:
        raise ConfigError(
            f"device.process_memory_limit = {limit}, and the GPU has {format_bytes(total)}"
        )
    torch.cuda.set_per_process_memory_fraction(parse_bytes(limit) / total, device)
