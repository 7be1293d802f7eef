"""Ranks: the processes that share one model's optimizer state, and their collectives.

[Note: Shards]
Every flat buffer of a bucket is divided into one equal *shard* per rank, rank r's at elements [r·S,
(r+1)·S). Gradients are summed into the shards by a reduce-scatter in place, so that each rank sends
only its shard to its host and updates only its shard; an all-gather in place assembles all shards
on every device. Both move (N-1)/N of a bucket out of each rank. A single rank has one shard and no
collective.

[Note: Copies]
In hybrid sharding the ranks form groups, usually those of a host. Each group holds all of the
state, divided into its shards; the other groups hold copies of it. A gradient is reduce-scattered
within the group; then the ranks with the same shard sum it among each other. Only one shard of a
gradient crosses hosts; weights are gathered within the group. All copies have equal sums, make the
same updates, and stay equal to the bit: every step compares them.

Collectives are matched by their order. They run on one lane, and every rank launches them in the
same order (`engine.gradients.ReduceOrder`). Host values for decisions use a separate process
group, so that they never interfere.

[Note: Names of groups]
torch names a subgroup after its ranks and the number of groups that the process has.
Members with different numbers would wait for each other forever, and a live group's name is
reused after another group was destroyed. So the members agree on a number, larger than any before
among them, and each has as many groups when it makes this one.

[Note: Long waits]
In a user's own loop, a call that only some of the ranks make leaves them waiting until the
process group times out, after half an hour by torch's default, and silently. So a thread reports
where this process waits for other ranks, if that takes long. Jobs have the watchdog.

[Note: Lost ranks]
Errors of torch's backends contain an address. So a rank whose own code has failed reports this in
the store of `init_process_group`, and the others, whose collectives fail once its process has
ended, read it there. This is for loops of users: jobs have the failure detector, which also ends
waiting ranks.

[Note: No pickles]
torch's object collectives unpickle the received bytes, and a pickle can run code. Ranks therefore
exchange only tensors and JSON: received data can be wrong, but is never executed.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.runtime.heartbeat import HEARTBEAT
from offloadtrain.runtime.user_code import called_from

_log = logging.getLogger(__name__)

LONG_S = 60.0
LOOK_EVERY_S = 5.0
_started = threading.Lock()

Group = dist.ProcessGroup
# torch 2.13 has renamed both and deprecates the old names.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_to_all_single = dist.all_to_all_single
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class RankError(OffloadTrainError):
    """Ranks have diverged, or one of them has failed."""


class LostRankError(RankError):
    """A collective has failed because another rank has ended."""


UNTRAINED = "untrained"
"""Field name for the values of a parameter without optimizer state."""


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
    """One rank among `size`; for a single rank every call returns at once.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
    """

    def __init__(self, group: Group | None = None, device: torch.device | None = None) -> None:
        """Join the processes of `group`; each of them must call this at the same point.

        Args:
            group: group that shards the state; None: only this process.
            device: device of gradients and weights: NCCL for a GPU, Gloo for the CPU.
        """
        self.rank, self.size = 0, 1
        self._groups: list[Group] = []
        self._of_some = False
        self._copies: Ranks | None = None
        self._everyone: Ranks | None = None
        self._of_experts: Ranks | None = None
        if group is not None:
            self._join(dist.get_process_group_ranks(group), device)

    def _join(self, members: list[int], device: torch.device | None) -> None:
        """Create the groups of `members`: for collectives on `device`, and a Gloo group for the
        host."""
        if len(members) == 1:
            return
        self.rank, self.size = members.index(dist.get_rank()), len(members)
        on_gpu = device is not None and device.type == "cuda"
        self._of_some = self.size < dist.get_world_size()
        for backend in ("nccl" if on_gpu else "gloo", "gloo"):
            # Ranks outside a subgroup need not call this.
            with _named_alike(members) if self._of_some else nullcontext():
                made = dist.new_group(
                    members,
                    backend=backend,
                    use_local_synchronization=self._of_some,
                    timeout=_timeout(),
                )
            assert isinstance(made, Group)  # this process is a member
            self._groups.append(made)
            if backend == "gloo":  # a rank may close before others connect: meet first
                with HEARTBEAT.collective():
                    dist.barrier(made)

    @classmethod
    def of(cls, group: Group | None, device: torch.device) -> Ranks:
        """Return the ranks of `group`; None: all ranks.

        Raises:
            ValueError: this process is not a member, and would train alone.
        """
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not one of the ranks of process_group, which "
                "dist.new_group() returns to all: call offload() on those only, or give each rank "
                "a group that it belongs to"
            )
        return cls(group, device)

    @classmethod
    def hybrid(
        cls, shards: Group, copies: Group, everyone: list[int], device: torch.device
    ) -> Ranks:
        """Return the ranks of `shards`, which share the state, with the ranks that hold copies of
        it: see [Note: Copies].

        Args:
            copies: the ranks that hold the same shard as this rank, in the order of their groups.
            everyone: the ranks of all groups, group after group.
        """
        ranks = cls(shards, device)
        ranks._copies, ranks._everyone = cls(copies, device), cls()
        ranks._everyone._join(everyone, torch.device("cpu"))
        return ranks

    @classmethod
    def with_experts(cls, everyone: list[int], same: Group | None, device: torch.device) -> Ranks:
        """Return the ranks of `everyone`, with the ranks that hold the same experts as this one;
        see [Note: Sharers] in `step.layout.step_spec`."""
        ranks = cls()
        ranks._join(everyone, device)
        ranks._of_experts = cls(same, device)
        return ranks

    @property
    def of_experts(self) -> Ranks:
        """The ranks that hold the same experts; all ranks without expert parallelism."""
        return self._of_experts or self

    @property
    def copies(self) -> Ranks:
        """The ranks that hold the same shard; only this rank without hybrid sharding."""
        return self._copies or ALONE

    @property
    def everyone(self) -> Ranks:
        """The ranks whose batches form a step: those of all copies."""
        return self._everyone or self

    @classmethod
    def fake(cls, size: int, copies: int = 1, expert_parts: int = 1) -> Ranks:
        """Return rank 0 of `size` virtual ranks, with `copies` copies and different experts on
        `expert_parts` ranks, for code that depends on sizes only."""
        ranks = cls()
        ranks.size = size
        if expert_parts > 1:
            ranks._of_experts = cls.fake(size // expert_parts)
        if copies > 1:
            ranks._copies, ranks._everyone = cls.fake(copies), cls.fake(size * copies)
        return ranks

    @property
    def is_single(self) -> bool:
        return self.size == 1

    @property
    def members(self) -> list[int]:
        """World ranks of these processes."""
        return dist.get_process_group_ranks(self._groups[-1]) if self._groups else [self.world_rank]

    @property
    def world_rank(self) -> int:
        """World rank of this process; defined outside the group, too."""
        known = dist.is_available() and dist.is_initialized()
        return dist.get_rank() if known else self.rank

    @property
    def world_size(self) -> int:
        """World size, including ranks outside the group."""
        known = dist.is_available() and dist.is_initialized()
        return max(self.size, dist.get_world_size()) if known else self.size

    def shard(self, numel: int) -> tuple[int, int]:
        """Return this rank's [lo, hi) of `numel` elements; `numel` is divisible by `size`."""
        count = numel // self.size
        return self.rank * count, (self.rank + 1) * count

    def sent_bytes(self, nbytes: int) -> int:
        """Return the elements or bytes this rank sends in a reduce-scatter or an all-gather."""
        return nbytes // self.size * (self.size - 1)

    def reduce_scatter(self, whole: Tensor) -> None:
        """Sum over ranks, in place: afterwards this rank's shard of `whole` (n,) holds its sum, the
        rest is undefined. In the order of the current stream."""
        lo, hi = self.shard(whole.numel())
        with HEARTBEAT.collective():
            reduce_scatter_single(whole[lo:hi], whole, group=self._groups[0])

    def all_gather(self, whole: Tensor) -> None:
        """All-gather in place: every rank's shard of `whole` (n,) to every rank. In the order of
        the current stream."""
        lo, hi = self.shard(whole.numel())
        with HEARTBEAT.collective():
            all_gather_single(whole, whole[lo:hi], group=self._groups[0])

    def all_reduce(self, part: Tensor) -> None:
        """Sum over ranks, in place, to every rank. In the order of the current stream."""
        with HEARTBEAT.collective():
            dist.all_reduce(part, group=self._groups[0])

    def all_gather_host(self, row: Sequence[float] | Tensor) -> Tensor:
        """All-gather a few numbers.

        Args:
            row: (k,), of equal size on every rank.

        Returns:
            (size, k) fp64 on the host, equal on every rank.
        """
        return self.send_host(row)()

    def send_host(self, row: Sequence[float] | Tensor) -> Callable[[], Tensor]:
        """Start an all-gather of a few numbers; every rank must start it in the same order.

        Args:
            row: (k,), of equal size on every rank.

        Returns:
            A function that waits for the other ranks and returns the result of `all_gather_host`.
        """
        local_row = torch.as_tensor(row, dtype=torch.float64, device="cpu").reshape(1, -1).clone()
        if self.is_single:
            return lambda: local_row
        rows = torch.empty(self.size, local_row.shape[1], dtype=torch.float64, device="cpu")
        work = all_gather_single(rows, local_row, group=self._groups[1], async_op=True)

        def wait() -> Tensor:
            # As late as the caller needs the rows, so that it can compute before. A rank that waits
            # here is not the rank that hangs.
            with HEARTBEAT.collective():
                work.wait()
            return rows

        return wait

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Broadcast the values of rank `source` into every rank's `tensor`, which is on the host
        and contiguous."""
        if not self.is_single:
            group = self._groups[1]
            with HEARTBEAT.collective():
                dist.broadcast(tensor, dist.get_global_rank(group, source), group=group)

    def assemble(self, whole: Tensor, parts: Sequence[tuple[int, int]]) -> None:
        """Fill `whole` (n,) on the host; each rank has its [lo, hi) already.

        Args:
            parts: [lo, hi) of each rank in order, equal on every rank.
        """
        for source, (lo, hi) in enumerate(parts):
            if lo < hi:
                self.broadcast(whole[lo:hi], source)

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast rank 0's `value`, made of JSON types ([Note: No pickles]).

        Returns:
            The value, equal on every rank; with several ranks, tuples become lists.
        """
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Gather every rank's `value`, made of JSON types, in rank order; tuples become lists."""
        if self.is_single:
            return [value]
        # Raises TypeError for types that JSON does not have.
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self.all_gather_host([text.numel()])[:, 0].long().tolist()
        texts = torch.zeros(self.size, max(sizes), dtype=torch.uint8)
        local_text = texts[self.rank].clone()
        local_text[: text.numel()] = text
        with HEARTBEAT.collective():
            all_gather_single(texts, local_text[None], group=self._groups[1])
        rows = zip(texts, sizes, strict=True)
        return [json.loads(row[:size].numpy().tobytes()) for row, size in rows]

    def barrier(self) -> None:
        """Wait until every rank calls this."""
        self.all_gather_host([0.0])

    def close(self) -> None:
        """Release the groups after their operations are complete. Idempotent."""
        for other in (self._copies, self._everyone, self._of_experts):
            if other is not None:
                other.close()
        while self._groups:
            group = self._groups.pop()
            if not self._of_some and dist.is_initialized():
                dist.destroy_process_group(group)

    def let_go(self) -> None:
        """Release groups that `torch.distributed` has destroyed already. Waits for their threads.

        If this is left to the end of the interpreter, a Gloo thread that still frees the
        tensors of the last collective waits for the GIL, and aborts the process.
        """
        if not dist.is_initialized():
            self.close()


def _timeout() -> timedelta | None:
    """Return the timeout of `init_process_group`: new groups would have torch's default."""
    world = dist.distributed_c10d._get_default_group()
    backends = (world._get_backend(device) for device in world._device_types)
    options = (getattr(backend, "options", None) for backend in backends)
    return next((option._timeout for option in options if option is not None), None)


_named: dict[tuple[int, ...], list[int]] = {}
"""Members of a subgroup → the number in the name of each of its groups."""


@contextmanager
def _named_alike(members: Sequence[int]) -> Iterator[None]:
    """Create a group in this context; see [Note: Names of groups]."""
    names, group_names = (
        _named.setdefault(tuple(members), []),
        dist.distributed_c10d._world.pg_names,
    )
    store, key = dist.distributed_c10d._get_default_store(), f"group {members} {len(names)}"
    store.set(
        f"{key} {dist.get_rank()}", str(max(len(group_names), *(number + 1 for number in names), 0))
    )
    with HEARTBEAT.collective():  # waits for the other members
        names.append(max(int(store.get(f"{key} {other}")) for other in members))
    alone, this_rank = [], [dist.get_rank()]
    while len(group_names) < names[-1]:
        alone.append(dist.new_group(this_rank, backend="gloo", use_local_synchronization=True))
    try:
        yield
    finally:
        for group in alone:
            dist.destroy_process_group(group)


ALONE = Ranks()
"""A single rank: this process."""


def tell_of_long_waits() -> None:
    """Start to report where this process waits for other ranks, if that takes long; see [Note: Long
    waits]. One thread per process, until the process ends."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and _started.acquire(blocking=False):
        # A daemon: it holds no resources, and must not keep a process from ending.
        rank = dist.get_rank()
        threading.Thread(target=_watch, args=(rank,), name="long waits", daemon=True).start()


def _watch(rank: int) -> None:
    known, since_s, warned = -1, time.monotonic(), False
    while True:
        # Concurrently with training, which it never delays.
        time.sleep(LOOK_EVERY_S)
        count, waits = HEARTBEAT.collectives, HEARTBEAT.waits and not HEARTBEAT.watched
        if count != known or not waits:
            known, since_s, warned = count, time.monotonic(), False
        elif not warned and (waited_s := time.monotonic() - since_s) >= LONG_S:
            warned = True
            _log.warning(
                "rank %d has waited %.0f s for other ranks, %s; its last collective was '%s'. "
                "Every rank must call backward, step, load_state_dict, master_weights and so on at "
                "the same point and as often, also where its loss is not finite or its data has "
                "ended: look for a call that only some make. In stage 3 (keep_whole) also for a "
                "module that only some use",
                rank,
                waited_s,
                _place(),
                HEARTBEAT.collective_of,
            )


def _place() -> str:
    """Return the line of the user's code that the training thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    called, line = called_from(frame)
    return f"in {called or 'a call'}(){' at ' + line if line else ''}"


# ---- [Note: Lost ranks]

_FAILED = "offloadtrain: a rank's own code has failed"


def is_of_exchange(error: BaseException) -> bool:
    """Return True if a torch backend raised the error. Gloo raises RuntimeErrors with a place in
    its source."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "/gloo/" in str(error)
    )


def lost(what: str) -> str:
    """Return a sentence that `what` has lost another rank, with that rank's error if known."""
    with suppress(Exception):  # the store may have ended with the rank that hosts it
        store = dist.distributed_c10d._get_default_store()
        if store.check([_FAILED]):
            return f"{what} has lost another rank: {store.get(_FAILED).decode(errors='replace')}"
    return (
        f"{what} has lost another rank: its process has ended, and its own output says why, or it "
        "did not make the same call before the timeout of the process group"
    )


@contextmanager
def telling(who: str) -> Iterator[None]:
    """A context for collectives and user code: reports errors of user code to the other ranks.

    Args:
        who: this rank, for messages of other ranks.

    Raises:
        LostRankError: a collective has failed.
    """
    try:
        yield
    except Exception as error:
        if is_of_exchange(error):
            raise LostRankError(lost(who)) from error
        with suppress(Exception):
            store = dist.distributed_c10d._get_default_store()
            store.set(_FAILED, f"{who} has raised {type(error).__name__}: {error}")
        raise
