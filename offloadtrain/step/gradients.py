"""The way down: a bucket's gradient from autograd to its sum and its norm on the host."""

from __future__ import annotations

from collections.abc import Iterable

from offloadtrain.step.dependencies import Dependencies
from offloadtrain.step.operations import Kind, Lane, Launch, Memory, Ref
from offloadtrain.step.places import NORMS_DTYPE, Bucket, Ring
from offloadtrain.step.spec import StepSpec


class GradientPath:
    """Sends gradients down piece by piece, through staging on the device and on the host."""

    def __init__(self, spec: StepSpec, rank: int, order: Dependencies, host_ring: Ring) -> None:
        self._spec = spec
        self._rank = rank
        self._order = order
        self._host_ring = host_ring
        self._ring = Ring(Memory.STAGING, spec.staging_slots)
        self._rounded = Ring(Memory.ROUNDED, spec.staging_slots)
        self._norms = Ref(Memory.NORMS, "", 0, 0, spec.num_tensors, NORMS_DTYPE)

    def send(self, bucket: Bucket, *, complete: bool, last: bool) -> None:
        """All that its parameters hold.

        Args:
            complete: each of them holds a gradient, or other ranks have theirs.
            last: of the step's micro-steps this is the last.
        """
        whole = last and complete
        # One piece is squared while it is added: one pass over memory less.
        measured = whole and bucket.accumulates and len(bucket.pieces) == 1
        for lo, hi in bucket.pieces:
            staged = self._reduced(bucket, lo, hi)
            if bucket.accumulates:
                self._accumulate(bucket, staged, lo, hi, measured=measured)
            elif bucket.touched:
                self._add(bucket, staged, lo, hi)
            else:
                target = bucket.piece(lo, hi)
                self._order.launch(
                    Launch(Kind.GRAD_DOWN, Lane.D2H, bucket.name, (staged,), (target,), lo, hi)
                )
        bucket.touched, bucket.normed = True, measured
        if whole and not measured:
            self._measure(bucket)

    def complete(self, buckets: Iterable[Bucket]) -> None:
        """Zeros where nothing was delivered, and the norms that are missing; the thread waits."""
        for bucket in buckets:
            if not bucket.touched:
                zeros = (bucket.gradient,)
                self._order.launch(Launch(Kind.NO_GRADIENT, Lane.HOST, bucket.name, (), zeros))
                bucket.touched, bucket.normed = True, False
            if not bucket.normed:
                self._measure(bucket)
        # Not for the whole lane: updates that ran inside backward may still be at work on it.
        measured = self._order.written(self._norms)
        assert measured is not None
        self._order.host_wait(measured, "the gradient norm")

    def _reduced(self, bucket: Bucket, lo: int, hi: int) -> Ref:
        """One piece of the shard's gradient on the device, in the dtype that goes down."""
        ranks, count = self._spec.ranks, hi - lo
        wide = self._spec.reduced_bytes(bucket.spec) != bucket.spec.weight_bytes
        dtype = "float32" if wide else bucket.spec.dtype
        whole = self._staging(bucket, lo, ranks * count, dtype)
        op = Launch(Kind.GATHER, Lane.COMPUTE, bucket.name, (), (whole,), lo, hi)
        self._order.launch(op, fresh=whole)
        if self._spec.is_single:
            return whole
        self._order.launch(
            Launch(Kind.REDUCE_SCATTER, Lane.COMM, bucket.name, (), (whole,), lo, hi)
        )
        first = self._rank * count
        shard = Ref(whole.memory, whole.owner, 0, first, first + count, dtype)
        if not wide:
            return shard
        narrow = self._rounded.take(count, bucket.spec.dtype)
        op = Launch(Kind.ROUND, Lane.COMM, bucket.name, (shard,), (narrow,), lo, hi)
        self._order.launch(op, fresh=narrow)
        return narrow

    def _staging(self, bucket: Bucket, lo: int, numel: int, dtype: str) -> Ref:
        if self._spec.zero_stage == 1:  # every piece keeps a place of its own
            return Ref(Memory.STAGING, f"{bucket.name}[{lo}]", 0, 0, numel, dtype)
        return self._ring.take(numel, dtype)

    def _staged_on_host(self, bucket: Bucket, staged: Ref, lo: int, hi: int) -> Ref:
        target = self._host_ring.take(hi - lo, bucket.spec.dtype)
        op = Launch(Kind.GRAD_DOWN, Lane.D2H, bucket.name, (staged,), (target,), lo, hi)
        self._order.launch(op, fresh=target)
        return target

    def _add(self, bucket: Bucket, staged: Ref, lo: int, hi: int) -> None:
        """A second gradient of one micro-step: added in its dtype, as autograd itself does."""
        arrived = self._staged_on_host(bucket, staged, lo, hi)
        target = (bucket.piece(lo, hi),)
        self._order.launch(Launch(Kind.ADD, Lane.HOST, bucket.name, (arrived,), target, lo, hi))

    def _accumulate(self, bucket: Bucket, staged: Ref, lo: int, hi: int, *, measured: bool) -> None:
        """Into the fp32 sum over microbatches; squared in the same pass if it is the last one."""
        arrived = self._staged_on_host(bucket, staged, lo, hi)
        writes = (bucket.piece(lo, hi), *([self._norms] if measured else []))
        first = not bucket.touched
        op = Launch(
            Kind.ACCUMULATE, Lane.HOST, bucket.name, (arrived,), writes, lo, hi, first=first
        )
        self._order.launch(op)

    def _measure(self, bucket: Bucket) -> None:
        """Sum of squares per parameter, on the host as soon as the gradient is there."""
        reads, writes = (bucket.gradient,), (self._norms,)
        self._order.launch(Launch(Kind.NORM, Lane.HOST, bucket.name, reads, writes))
        bucket.normed = True
