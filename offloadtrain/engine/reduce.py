"""A bucket's gradient on the device: gathered from where autograd left it, summed over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.collectives import Collectives
from offloadtrain.engine.gather import Delivered, fill, pieces
from offloadtrain.engine.ring import Lease, Ring
from offloadtrain.transfer import Event, Lane, Lanes, Range

TakeStaging = Callable[[str, int, torch.dtype], Lease]
"""(whose piece, elements, dtype) → device memory to be written on the compute lane."""


class Reduction:
    """Leaves this rank's shard of a gradient on the device, piece by piece, for its way down.

    [Note: Pieces of a shard]
    A bucket that is larger than a staging slot goes through it in pieces. A piece is a part
    [lo, hi) of *every* rank's shard, one behind the other in the slot, so that a reduce-scatter of
    the slot leaves each rank the part of its own shard.
    """

    def __init__(
        self,
        lanes: Lanes,
        collectives: Collectives,
        take: TakeStaging,
        *,
        piece_bytes: int,
        dtype: torch.dtype | None = None,
        rounded: Ring | None = None,
    ) -> None:
        """`piece_bytes`: of a slot. `dtype`: in which ranks' gradients are summed; None: their own.
        `rounded`: for shards that are summed in another one."""
        self._lanes = lanes
        self._collectives = collectives
        self._take = take
        self._piece_bytes = piece_bytes
        self._dtype = dtype
        self._rounded = rounded

    def pieces(self, bucket: Bucket) -> list[tuple[int, int]]:
        """Ranges [lo, hi) of the shard that go down one after the other."""
        itemsize = self._reduced_in(bucket).itemsize * self._collectives.ranks.size
        return pieces(bucket.shard_numel, self._piece_bytes // itemsize)

    def launch(self, bucket: Bucket, delivered: Delivered, lo: int, hi: int) -> Lease:
        """One piece of the shard, in the working dtype; `filled` is its event."""
        lease = self._gather(bucket, delivered, lo, hi)
        if self._collectives.ranks.alone:
            return lease
        return self._reduce(bucket, lease, hi - lo)

    def _reduced_in(self, bucket: Bucket) -> torch.dtype:
        return bucket.dtype if self._collectives.ranks.alone else self._dtype or bucket.dtype

    def _gather(self, bucket: Bucket, delivered: Delivered, lo: int, hi: int) -> Lease:
        """A flat copy of the gradients, zero where there is none, on the compute lane."""
        shards, count = self._collectives.ranks.size, hi - lo
        lease = self._take(f"{bucket.name}[{lo}]", shards * count, self._reduced_in(bucket))
        whole = count == bucket.shard_numel

        def gather(flat: Tensor) -> None:
            if whole:
                fill(flat, 0, delivered)
                return
            for rank in range(shards):
                start = rank * bucket.shard_numel + lo
                fill(flat[rank * count : (rank + 1) * count], start, delivered)

        self._lanes.launch(Lane.COMPUTE, f"gather {bucket.name}", gather, (), [lease.range])
        lease.filled = self._lanes.record(Lane.COMPUTE)
        return lease

    def _reduce(self, bucket: Bucket, lease: Lease, count: int) -> Lease:
        assert lease.filled is not None
        whole, rank = lease.range, self._collectives.ranks.rank
        reduced = self._collectives.reduce_scatter(bucket.name, whole, lease.filled)
        shard = Range(whole.buffer, whole.lo + rank * count, whole.lo + (rank + 1) * count)
        if shard.buffer.flat.dtype == bucket.dtype:
            return _Part(lease, shard, reduced)
        return self._round(bucket, lease, shard)

    def _round(self, bucket: Bucket, lease: Lease, shard: Range) -> Lease:
        """The sum in the dtype that goes down."""
        assert self._rounded is not None
        target = self._rounded.take(shard.hi - shard.lo, bucket.dtype, Lane.COMM)

        def round_(wide: Tensor, narrow: Tensor) -> None:
            narrow.copy_(wide)

        self._lanes.launch(Lane.COMM, f"round {bucket.name}", round_, [shard], [target.range])
        target.filled = self._lanes.record(Lane.COMM)
        lease.release(target.filled)
        return target


class _Part(Lease):
    """A part of leased memory; the rest is undefined."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Lease, range_: Range, filled: Event) -> None:
        super().__init__(range_)
        self._whole = whole
        self.filled = filled

    def release(self, event: Event) -> None:
        self._whole.release(event)
