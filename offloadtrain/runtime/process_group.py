"""Ranks: the processes that share one model's optimizer state. The only door to process groups.

[Note: Shards]
Every flat buffer of a bucket is cut into as many equal *shards* as there are ranks, rank r's at
elements [r·S, (r+1)·S). Gradients are summed into the shards by a reduce-scatter in place, so that
each rank sends only its own shard to its host and updates only that; an all-gather in place makes
every shard whole on every device. Both move (N-1)/N of a bucket out of each rank. One rank has one
shard and no collective.

Collectives are matched by their order. They run on one lane, and every rank launches them in one
order (`step.prefetch_policy.ReduceOrder`). What goes to the host for a decision has a process group of
its own, so that it never meets them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.runtime.failure_detector import RankInfo, Store

Group = dist.ProcessGroup
# torch 2.13 has given both a new name and deprecates the old one.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_T = TypeVar("_T")


class RankError(OffloadTrainError):
    """Ranks do not do the same thing, or one of them cannot go on."""


UNTRAINED = "untrained"
"""What the values of a parameter without state are called beside the fields of a state."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements [lo, hi) of a parameter of `shape`, in the order of its memory."""

    shape: tuple[int, ...]
    lo: int
    hi: int

    @property
    def whole(self) -> bool:
        return self.hi - self.lo == math.prod(self.shape)


class Ranks:
    """One rank among `size`; alone, every call returns at once.

    Attributes:
        rank: of this process among them.
        size: how many there are.
    """

    def __init__(self, group: Group | None = None, device: torch.device | None = None) -> None:
        """Join the processes of `group`; each of them calls this at the same point.

        Args:
            group: whose members share the state; None: this process alone.
            device: where gradients and weights are: NCCL for a GPU, Gloo for the CPU.
        """
        self.rank, self.size = 0, 1
        self._groups: list[Group] = []
        self._of_some = False
        if group is None or dist.get_world_size(group) == 1:
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        on_gpu = device is not None and device.type == "cuda"
        # Others need not call this for a group of some of them. Such a group's name is made of its
        # ranks and of what is alive: it is kept, or the next one would meet its addresses.
        self._of_some = self.size < dist.get_world_size()
        for backend in ("nccl" if on_gpu else "gloo", "gloo"):
            made = dist.new_group(
                dist.get_process_group_ranks(group),
                backend=backend,
                use_local_synchronization=self._of_some,
            )
            assert isinstance(made, Group)  # this process is one of them
            self._groups.append(made)
            if backend == "gloo":  # who is connected may close before the others are: meet first
                dist.barrier(made)

    @classmethod
    def of(cls, group: Group | None, device: torch.device) -> Ranks:
        """The ranks of `group`; if None, all there are."""
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        return cls(group, device)

    @classmethod
    def fake(cls, size: int) -> Ranks:
        """The first of so many that are not there: for what depends on sizes alone."""
        ranks = cls()
        ranks.size = size
        return ranks

    @property
    def is_single(self) -> bool:
        return self.size == 1

    @property
    def world_size(self) -> int:
        """How many ranks there are with those that have no share in this."""
        known = dist.is_available() and dist.is_initialized()
        return max(self.size, dist.get_world_size()) if known else self.size

    def shard(self, numel: int) -> tuple[int, int]:
        """[lo, hi) of this rank among `numel` elements, which `size` divides."""
        count = numel // self.size
        return self.rank * count, (self.rank + 1) * count

    def sent_bytes(self, nbytes: int) -> int:
        """What this rank sends to others in a reduce-scatter or an all-gather of so many."""
        return nbytes // self.size * (self.size - 1)

    def reduce_scatter(self, whole: Tensor) -> None:
        """Sum over ranks, in place: afterwards this rank's shard of `whole` (n,) holds its sum, the
        rest is undefined. In the order of the current stream."""
        lo, hi = self.shard(whole.numel())
        reduce_scatter_single(whole[lo:hi], whole, group=self._groups[0])

    def all_gather(self, whole: Tensor) -> None:
        """In place: every rank's shard of `whole` (n,) to every rank. In the order of the current
        stream."""
        lo, hi = self.shard(whole.numel())
        all_gather_single(whole, whole[lo:hi], group=self._groups[0])

    def all_gather_host(self, row: Sequence[float] | Tensor) -> Tensor:
        """A few numbers from every rank.

        Args:
            row: (k,), as many from every rank.

        Returns:
            (size, k) fp64 on the host, the same on every rank.
        """
        own = torch.as_tensor(row, dtype=torch.float64, device="cpu").reshape(1, -1)
        if self.is_single:
            return own.clone()
        rows = torch.empty(self.size, own.shape[1], dtype=torch.float64, device="cpu")
        all_gather_single(rows, own, group=self._groups[1])
        return rows

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's values into every rank's `tensor`, which is on the host and contiguous."""
        if not self.is_single:
            group = self._groups[1]
            dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)

    def broadcast_object(self, value: _T) -> _T:
        """Rank 0's `value`, which can be pickled."""
        if self.is_single:
            return value
        group, told = self._groups[1], [value]
        dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group=group)
        return told[0]

    def gather(self, value: _T) -> list[_T]:
        """Every rank's `value`, which can be pickled, in the order of ranks."""
        if self.is_single:
            return [value]
        gathered: list[_T] = [value] * self.size
        dist.all_gather_object(gathered, value, group=self._groups[1])
        return gathered

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather_host([0.0])

    def close(self) -> None:
        """Let go of the groups; what runs on them must be over. Idempotent."""
        while self._groups:
            group = self._groups.pop()
            if not self._of_some and dist.is_initialized():
                dist.destroy_process_group(group)


ALONE = Ranks()
"""This process and nobody else."""


def connect(rank_info: RankInfo, *, on_gpu: bool, timeout_s: float) -> Store:
    """Make the default process group; return the store that outlives restarts of the ranks.

    Every attempt has keys of its own: what dead ranks have left there must not be read.

    Args:
        on_gpu: NCCL beside Gloo, on the GPU of the local rank.
    """
    on_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    keeps = rank_info.rank == 0 and not on_agent
    store = TCPStore(host, port, None if on_agent else rank_info.size, keeps, timeout)
    if on_gpu:
        torch.cuda.set_device(rank_info.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=attempt_store(store, rank_info),  # type: ignore[arg-type]
        rank=rank_info.rank,
        world_size=rank_info.size,
        timeout=timeout,
    )
    # A connection of its own: one that waits for a key keeps others from asking.
    return TCPStore(host, port, None, False, timeout)


def join_through(file: Path, rank: int, size: int, *, on_gpu: bool) -> None:
    """Make the default process group of processes of this host that share a file, which is new."""
    if on_gpu:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    url = f"file://{file}"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size)


def attempt_store(store: Store, rank_info: RankInfo) -> Store:
    """Keys of this attempt only."""
    prefix = f"offloadtrain/attempt{rank_info.attempt}"
    return PrefixStore(prefix, store)  # type: ignore[arg-type]


def disconnect() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
