"""Collectives as operations of the comm lane, in one order on every rank."""

from __future__ import annotations

from zlib import crc32

from torch import Tensor

from offloadtrain.distributed import Ranks
from offloadtrain.transfer import Event, Lane, Lanes, Operation, Range


class Collectives:
    """Launches them, counts their bytes and remembers their order; alone it does nothing."""

    def __init__(self, lanes: Lanes, ranks: Ranks) -> None:
        self.ranks = ranks
        self._lanes = lanes
        self._digest = 0

    @property
    def upload_lane(self) -> Lane:
        """Where an upload ends: when this lane is done, every rank has the weights."""
        return Lane.H2D if self.ranks.alone else Lane.COMM

    @property
    def load_lane(self) -> Lane:
        """As `upload_lane`, of a load."""
        return Lane.LOAD if self.ranks.alone else Lane.COMM

    def reduce_scatter(self, name: str, whole: Range, after: Event) -> Event:
        """Sum `whole` (device, (n,)) over ranks, in place, into the shards; returns its event."""

        def reduce(memory: Tensor) -> None:
            self.ranks.reduce_scatter(memory)

        return self._launch("reduce-scatter", name, reduce, whole, after)

    def all_gather(self, name: str, whole: Range, after: Event) -> Event:
        """Make `whole` (device, (n,)) of every rank's shard of it; returns its event."""
        if self.ranks.alone:
            return after

        def gather(memory: Tensor) -> None:
            self.ranks.all_gather(memory)

        return self._launch("all-gather", name, gather, whole, after)

    def take_digest(self) -> int:
        """Of what was launched since the last call, and in which order."""
        digest, self._digest = self._digest, 0
        return digest

    def _launch(self, kind: str, name: str, fn: Operation, whole: Range, after: Event) -> Event:
        label = f"{kind} {name}"
        self._digest = crc32(label.encode(), self._digest)
        self._lanes.totals.comm_bytes += self.ranks.sent_bytes(whole.view)
        self._lanes.wait(Lane.COMM, after, f"this rank's part of {name}")
        self._lanes.launch(Lane.COMM, label, fn, (), [whole])
        return self._lanes.record(Lane.COMM)
