"""Rendezvous of the ranks of a run: the store, and torch's default process group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from offloadtrain.config.errors import ConfigError
from offloadtrain.runtime import launcher_link
from offloadtrain.runtime.failure_detector import RankInfo, Store
from offloadtrain.runtime.process_group import RankError


def connect(rank_info: RankInfo, *, on_gpu: bool, timeout_s: float) -> Store:
    """Create the default process group; return the store that outlives restarts of the ranks.

    Every attempt has separate keys, so that values of dead ranks are not read.

    Args:
        on_gpu: use NCCL in addition to Gloo, on the GPU of the local rank.

    Raises:
        RankError: the network, or another rank, has failed.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        return _connected(rank_info, on_gpu=on_gpu, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, OSError) as error:  # torch raises RuntimeErrors
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise RankError(f"the ranks cannot be connected through {host}:{port}: {why}") from error


def _connected(rank_info: RankInfo, *, on_gpu: bool, timeout: timedelta) -> Store:
    on_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank_info.local_size == rank_info.size:
        stay_on_this_host()
    keeps = rank_info.rank == 0 and not on_agent
    store = TCPStore(
        host,
        port,
        None if on_agent else rank_info.size,
        keeps,
        timeout,
        master_listen_fd=_listen(host, port, launcher_link.store_fd()) if keeps else None,
    )
    if on_gpu:
        torch.cuda.set_device(rank_info.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=attempt_store(store, rank_info),  # type: ignore[arg-type]
        rank=rank_info.rank,
        world_size=rank_info.size,
        timeout=timeout,
    )
    # A separate connection: a request that waits for a key blocks other requests.
    return TCPStore(host, port, None, False, timeout)


def stay_on_this_host() -> None:
    """Make Gloo and NCCL listen on the loopback interface only, unless the user has set another."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")


def _listen(host: str, port: int, inherited_fd: int | None) -> int:
    """Return a listening socket for the store at this address only: torch's listens on all.

    Args:
        inherited_fd: the launcher's socket, which listens already.

    Raises:
        ConfigError: the address is not this host's, or the port is taken.
    """
    if inherited_fd is not None:
        return inherited_fd
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family).detach()
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen at MASTER_ADDR = {host}, MASTER_PORT = {port}: "
            f"{error.strerror}. Set them to an address of the host of rank 0 and a free port"
        ) from error


def join_through(file: Path, rank: int, size: int, *, on_gpu: bool) -> None:
    """Create the default process group of processes on this host that share `file`, a new file."""
    stay_on_this_host()
    if on_gpu:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    url = f"file://{file}"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size)


def attempt_store(store: Store, rank_info: RankInfo) -> Store:
    """Return a store with the keys of this attempt only."""
    prefix = f"offloadtrain/attempt{rank_info.attempt}"
    return PrefixStore(prefix, store)  # type: ignore[arg-type]


def disconnect() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
