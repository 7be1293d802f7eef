"""The way up: Adam per bucket on the host, the new working weights back to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from offloadtrain import kernels
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.collectives import Collectives
from offloadtrain.engine.ring import Lease, Ring
from offloadtrain.kernels import KernelCalls
from offloadtrain.optim import UpdateRule
from offloadtrain.transfer import Event, Lane, Lanes, Range, copy


class Updates:
    """The two operations of an update, for the update modes to launch when they see fit."""

    def __init__(
        self,
        lanes: Lanes,
        rule: UpdateRule,
        groups: Sequence[Mapping[str, Any]],
        host_ring: Ring,
        collectives: Collectives,
        *,
        seed: int,
    ) -> None:
        self.seed = seed
        """Of stochastic rounding."""
        self._lanes = lanes
        self._rule = rule
        self._groups = groups
        self._host_ring = host_ring
        self._collectives = collectives

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Of every group, as they are now."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self._groups]

    def adam(self, bucket: Bucket, *, step: int, grad_scale: float, beside: bool = False) -> Lease:
        """Launch the update of a bucket; returns where the new working weights wait.

        Args:
            step: optimizer step, 1-based.
            grad_scale: unscaling times clipping, multiplied into each gradient in fp32.
            beside: write the new state into the other copy and leave the gradient as it is.
        """
        staged = self._stage(bucket, beside)
        self._launch_adam(bucket, staged.range, step, grad_scale, beside)
        staged.filled = self._lanes.record(Lane.HOST)
        if not isinstance(staged, _OverGradient):
            bucket.grad_free_after = staged.filled
        return staged

    def upload(self, bucket: Bucket, staged: Lease, read: Event) -> None:
        """To the device, once compute has read the old weights for the last time (`read`), and from
        there to all ranks.

        Of a streamed block: to where its next load reads them.
        """
        if bucket.from_host:
            self._publish(bucket, staged)
            return
        if staged.filled is not None:
            self._lanes.wait(Lane.H2D, staged.filled, f"adam of {bucket.name}")
        if bucket.kept is not None:
            self._wait_read(bucket, Lane.H2D)
        else:
            self._lanes.wait(Lane.H2D, read, "backward has read the old weights")
        if bucket.gathered is not None:  # two uploads without a forward in between
            self._lanes.wait(Lane.H2D, bucket.gathered, f"last all-gather of {bucket.name}")
            bucket.gathered = None
        target = bucket.shard if bucket.kept is None else bucket.kept.whole
        self._lanes.launch(Lane.H2D, f"h2d {bucket.name}", copy, [staged.range], [target])
        arrived = self._lanes.record(Lane.H2D)
        staged.release(arrived)
        if bucket.kept is not None:
            bucket.weight_ready = arrived
        elif not self._collectives.ranks.alone:
            whole = bucket.working.whole
            bucket.gathered = self._collectives.all_gather(bucket.name, whole, arrived)

    def emit(self, blocks: Sequence[Block]) -> None:
        """Upload the masters as they are: after they were set or loaded."""
        read = self._lanes.record(Lane.COMPUTE)
        if not self._lanes.counts_bus:  # masters on the device were set on the compute lane
            self._lanes.wait(Lane.HOST, read, "masters are set")
        for block in blocks:
            for bucket in block.buckets:
                staged = self._stage(bucket, beside=False)
                if bucket.host_weight is None:
                    self._cast(bucket, staged.range)
                    staged.filled = self._lanes.record(Lane.HOST)
                self.upload(bucket, staged, read)
            self.uploaded(block)

    def uploaded(self, block: Block) -> None:
        """All buckets of the block have been given to `upload`."""
        if not block.buckets:
            return  # all of it is frozen
        if block.streamer is not None:
            block.replaced()
        else:
            block.launched_upload(self._lanes.record(self._collectives.upload_lane))

    def _publish(self, bucket: Bucket, staged: Lease) -> None:
        if bucket.shown is not None:
            self._wait_read(bucket, Lane.HOST)
            name, shown = f"show {bucket.name}", bucket.shown.whole
            show = KernelCalls(kernels.copy)
            self._lanes.launch(Lane.HOST, name, show, [staged.range], [shown])
            staged.release(self._lanes.record(Lane.HOST))
            staged.filled = self._lanes.record(Lane.HOST)
        bucket.weight_ready = staged.filled

    def _wait_read(self, bucket: Bucket, lane: Lane) -> None:
        """Before `lane` overwrites what loads read."""
        if bucket.visible_free_after is not None:
            why = f"last load of {bucket.name}"
            self._lanes.wait(lane, bucket.visible_free_after, why)
            bucket.visible_free_after = None

    def _stage(self, bucket: Bucket, beside: bool) -> Lease:
        """Where the new weights wait for their upload: in the state itself, in memory of their
        own, over the gradient, or in a ring slot."""
        if bucket.host_weight is not None:
            weight = bucket.other[0] if beside else bucket.host_weight
            return self._waiting(bucket, weight.whole)
        if bucket.pending is not None:
            return self._waiting(bucket, bucket.pending.whole)
        if bucket.grad is not None:
            return _OverGradient(bucket, bucket.grad.whole)
        return self._host_ring.take(bucket.shard_numel, bucket.dtype, Lane.HOST)

    def _waiting(self, bucket: Bucket, weights: Range) -> Lease:
        if bucket.weight_free_after is not None:
            self._lanes.wait(
                Lane.HOST, bucket.weight_free_after, f"upload of {bucket.name} has left"
            )
            bucket.weight_free_after = None
        if bucket.shown is None and bucket.kept is None:
            self._wait_read(bucket, Lane.HOST)
        return _OwnWeights(bucket, weights)

    def _cast(self, bucket: Bucket, staged: Range) -> None:
        master = bucket.state[0].whole
        cast = KernelCalls(kernels.cast)
        self._lanes.launch(Lane.HOST, f"cast {bucket.name}", cast, [master], [staged])

    def _launch_adam(
        self, bucket: Bucket, staged: Range, step: int, grad_scale: float, beside: bool
    ) -> None:
        group = dict(self._groups[bucket.group])  # as it is now: it may change after step()
        rule, format, layout, seed = self._rule, bucket.format, bucket.layout, self.seed
        state = [buffer.whole for buffer in bucket.state]
        fields, emits = len(state), not format.holds_weight

        def adam(grad: Tensor, *rest: Tensor) -> None:
            after = rest[-fields:]
            rule.update(
                format,
                rest[:fields] if beside else after,
                grad,
                rest[-fields - 1] if emits else None,
                layout,
                group=group,
                step=step,
                grad_scale=grad_scale,
                seed=seed,
                out=after if beside else None,
            )

        written = [staged] if emits else []
        after = [buffer.whole for buffer in bucket.other] if beside else state
        reads = [bucket.gradient, *state] if beside else [bucket.gradient]
        update = KernelCalls(adam) if rule.calls_only_kernels else adam
        self._lanes.launch(Lane.HOST, f"adam {bucket.name}", update, reads, [*written, *after])


class _OverGradient(Lease):
    """A bucket's own gradient buffer as staging."""

    __slots__ = ("_bucket",)

    def __init__(self, bucket: Bucket, range_: Range) -> None:
        super().__init__(range_)
        self._bucket = bucket

    def release(self, event: Event) -> None:
        """The next gradient may overwrite the staged weights after `event`."""
        self._bucket.grad_free_after = event


class _OwnWeights(Lease):
    """Weights that wait where nothing but the next update overwrites them."""

    __slots__ = ("_bucket",)

    def __init__(self, bucket: Bucket, range_: Range) -> None:
        super().__init__(range_)
        self._bucket = bucket

    def release(self, event: Event) -> None:
        """The next update may overwrite them after `event`."""
        self._bucket.weight_free_after = event
