"""The way up: Adam per bucket on the host, its new working weights back to where compute reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offloadtrain.step.dependencies import Dependencies
from offloadtrain.step.operations import (
    Event,
    Kind,
    Lane,
    Launch,
    Memory,
    Ref,
    Renew,
    Swap,
    Update,
)
from offloadtrain.step.places import Bucket, Ring
from offloadtrain.step.spec import StepSpec
from offloadtrain.step.streaming import Streaming


class UpdatePath:
    """The two halves of an update, for the update modes to launch when they see fit."""

    def __init__(
        self, spec: StepSpec, order: Dependencies, host_ring: Ring, streaming: Streaming
    ) -> None:
        self._spec = spec
        self._order = order
        self._host_ring = host_ring
        self._streaming = streaming

    def adam(self, bucket: Bucket, update: Update) -> Ref:
        """Launch the update of a bucket; returns where the new working weights wait."""
        staged = self._staged(bucket, other=update.out_of_place)
        state = bucket.state()
        reads = (bucket.gradient, *(state if update.out_of_place else ()))
        after = bucket.state(other=update.out_of_place)
        emits = () if bucket.spec.format.holds_weight else (staged,)
        writes = (*emits, *after)
        op = Launch(Kind.ADAM, Lane.HOST, bucket.name, reads, writes, update=update)
        self._order.launch(op, fresh=_in_turn(staged))
        return staged

    def swap(self, bucket: Bucket) -> None:
        """What an update out of place has written becomes the state."""
        bucket.copy = 1 - bucket.copy
        self._order.operations.append(Swap(bucket.name))

    def upload(self, block: str, buckets: Iterable[tuple[Bucket, Ref]]) -> None:
        """Bring a block's new weights to where compute, or its loads, read them; graphs over the
        old ones are stale."""
        any_left = False
        for bucket, staged in buckets:  # each before the next one's Adam, which may take its slot
            self._upload(bucket, staged)
            any_left = True
        if any_left:
            self._order.operations.append(Renew(block))
            self._streaming.drop(block)  # a slot holds the weights of before

    def emit(self, blocks: Sequence[tuple[str, Sequence[Bucket]]]) -> None:
        """Upload the masters as they are: after they were set or loaded."""
        event = self.backward_is_over(blocks)
        if not self._spec.offloaded:  # masters on the device were set on the compute lane
            self._order.wait(Lane.HOST, event, "masters are set")
        for block, buckets in blocks:
            self.upload(block, ((bucket, self._cast(bucket)) for bucket in buckets))
            self._streaming.drop(block)  # also where all of it is frozen: that may have been loaded

    def backward_is_over(self, blocks: Iterable[tuple[str, Sequence[Bucket]]]) -> Event:
        """Compute has read these weights for the last time."""
        event = self._order.record(Lane.COMPUTE)
        for block, buckets in blocks:
            if not self._streaming.streams(block):
                refs = [bucket.whole for bucket in buckets]
                self._order.was_read(refs, event, f"backward {block}")
        return event

    def _upload(self, bucket: Bucket, staged: Ref) -> None:
        if bucket.loads_from_host:
            if bucket.has_snapshot:
                self._launch(Kind.PUBLISH, Lane.HOST, bucket, staged, bucket.snapshot)
            return  # else loads read the weights where they are
        self._launch(Kind.WEIGHTS_UP, Lane.H2D, bucket, staged, bucket.upload_target)
        if not self._spec.is_single and not bucket.loads_from_shard:
            op = Launch(Kind.ALL_GATHER, Lane.COMM, bucket.name, writes=(bucket.whole,))
            self._order.launch(op)

    def _staged(self, bucket: Bucket, *, other: bool = False) -> Ref:
        """Where the new weights wait for their upload: in the state itself, in memory of their own,
        over the gradient, or in a slot of the ring."""
        place = bucket.waiting(other=other)
        if place is None:
            place = self._host_ring.take(bucket.spec.shard_numel, bucket.spec.dtype)
        return place

    def _cast(self, bucket: Bucket) -> Ref:
        staged = self._staged(bucket)
        if not bucket.spec.format.holds_weight:
            op = Launch(Kind.CAST, Lane.HOST, bucket.name, (bucket.state()[0],), (staged,))
            self._order.launch(op, fresh=_in_turn(staged))
        return staged

    def _launch(self, kind: Kind, lane: Lane, bucket: Bucket, read: Ref, written: Ref) -> None:
        self._order.launch(Launch(kind, lane, bucket.name, (read,), (written,)))


def _in_turn(staged: Ref) -> Ref | None:
    """A slot of the ring, which held something else before."""
    return staged if staged.memory is Memory.HOST_STAGING else None
