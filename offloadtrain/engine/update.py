"""The way up: Adam per block on the host, the new working weights back to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from offloadtrain import kernels
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.ring import Lease, Ring
from offloadtrain.optim import UpdateRule
from offloadtrain.transfer import Event, Lane, Lanes, Range, copy


class Updates:
    """Updates blocks in forward order, so that the next forward can begin behind the first
    upload."""

    def __init__(
        self,
        lanes: Lanes,
        rule: UpdateRule,
        groups: Sequence[Mapping[str, Any]],
        host_ring: Ring,
        *,
        seed: int,
    ) -> None:
        self.seed = seed
        """Of stochastic rounding."""
        self._lanes = lanes
        self._rule = rule
        self._groups = groups
        self._host_ring = host_ring

    def apply(self, blocks: Sequence[Block], *, step: int, grad_scale: float) -> None:
        """Launch Adam and the upload of every block; returns before they are done.

        Args:
            blocks: in forward order.
            step: optimizer step, 1-based.
            grad_scale: unscaling times clipping, multiplied into each gradient in fp32.
        """
        read = self._lanes.record(Lane.COMPUTE)
        for block in blocks:
            for bucket in block.buckets:
                staged = self._stage(bucket)
                self._update(bucket, staged.range, step, grad_scale)
                self._upload(bucket, staged, read)
                bucket.touched = bucket.normed = False
            block.launched_upload(self._lanes.record(Lane.H2D))

    def emit(self, blocks: Sequence[Block]) -> None:
        """Upload the masters as they are: after they were set or loaded."""
        read = self._lanes.record(Lane.COMPUTE)
        for block in blocks:
            for bucket in block.buckets:
                staged = self._stage(bucket)
                if bucket.host_weight is None:
                    self._cast(bucket, staged.range)
                self._upload(bucket, staged, read)
            block.launched_upload(self._lanes.record(Lane.H2D))

    def _stage(self, bucket: Bucket) -> Lease:
        """Where the new weights wait for their upload: in the state itself, over the gradient, or
        in a ring slot."""
        if bucket.host_weight is not None:
            if bucket.weight_free_after is not None:
                self._lanes.wait(
                    Lane.HOST, bucket.weight_free_after, f"upload of {bucket.name} has left"
                )
                bucket.weight_free_after = None
            return _StateWeight(bucket, bucket.host_weight.whole)
        if bucket.grad is not None:
            return _OverGradient(bucket, bucket.grad.whole)
        return self._host_ring.take(bucket.numel, bucket.dtype, Lane.HOST)

    def _cast(self, bucket: Bucket, staged: Range) -> None:
        master = bucket.state[0].whole
        self._lanes.launch(Lane.HOST, f"cast {bucket.name}", kernels.cast, [master], [staged])

    def _update(self, bucket: Bucket, staged: Range, step: int, grad_scale: float) -> None:
        group = dict(self._groups[bucket.group])  # as it is now: it may change after step()
        rule, format, layout, seed = self._rule, bucket.format, bucket.layout, self.seed

        def adam(grad: Tensor, *written: Tensor) -> None:
            working = None if format.holds_weight else written[0]
            state = written if format.holds_weight else written[1:]
            rule.update(
                format,
                state,
                grad,
                working,
                layout,
                group=group,
                step=step,
                grad_scale=grad_scale,
                seed=seed,
            )

        state = [buffer.whole for buffer in bucket.state]
        writes = state if format.holds_weight else [staged, *state]
        self._lanes.launch(Lane.HOST, f"adam {bucket.name}", adam, [bucket.gradient], writes)
        if format.holds_weight:
            bucket.grad_free_after = self._lanes.record(Lane.HOST)

    def _upload(self, bucket: Bucket, staged: Lease, read: Event) -> None:
        """To the device, once compute has read the old weights for the last time (`read`)."""
        self._lanes.wait(Lane.H2D, self._lanes.record(Lane.HOST), f"adam of {bucket.name}")
        self._lanes.wait(Lane.H2D, read, "backward has read the old weights")
        self._lanes.launch(
            Lane.H2D, f"h2d {bucket.name}", copy, [staged.range], [bucket.working.whole]
        )
        staged.release(self._lanes.record(Lane.H2D))


class _OverGradient(Lease):
    """A bucket's own gradient buffer as staging."""

    __slots__ = ("_bucket",)

    def __init__(self, bucket: Bucket, range_: Range) -> None:
        super().__init__(range_)
        self._bucket = bucket

    def release(self, event: Event) -> None:
        """The next gradient may overwrite the staged weights after `event`."""
        self._bucket.grad_free_after = event


class _StateWeight(Lease):
    """The working weights that the state itself holds."""

    __slots__ = ("_bucket",)

    def __init__(self, bucket: Bucket, range_: Range) -> None:
        super().__init__(range_)
        self._bucket = bucket

    def release(self, event: Event) -> None:
        """The next update may overwrite them after `event`."""
        self._bucket.weight_free_after = event
