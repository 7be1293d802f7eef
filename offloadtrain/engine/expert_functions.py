"""The functions of operations over buckets whose unused experts are skipped: [Note: Unused experts]
in `step.layout.skipping`. What is used is known when they are made, in step()."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from offloadtrain.engine.bucket import Bucket, Delivered
from offloadtrain.engine.experts import Experts, gaps
from offloadtrain.optim import UpdateRule
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import KernelCalls
from offloadtrain.runtime.lanes import Operation, copy
from offloadtrain.runtime.lanes.base import LaneTotals
from offloadtrain.step.layout.buffers import BufferKey, Memory
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.operations import Launch

_LASTING = (Memory.WORKING, Memory.DEVICE_SHARD, Memory.PENDING)
"""Memory that holds the new weights of a bucket until its next update."""


def mark_used(op: Launch, bucket: Bucket, delivered: Delivered) -> Operation:
    """Return the function of a `MARK`; called once for each, on the training thread."""
    experts, first = bucket.experts, op.first
    assert experts is not None
    experts.note(delivered, first=first)

    def mark(used: Tensor) -> None:
        if first:
            used.zero_()
        experts.mark(delivered, used)

    return mark


def adam_of_used(
    op: Launch, bucket: Bucket, rule: UpdateRule, group: Mapping[str, Any], seed: int
) -> Operation:
    """Return the function of an `ADAM` that leaves the memory of unused experts alone."""
    update, experts, format = op.update, bucket.experts, bucket.format
    assert update is not None and not update.out_of_place and experts is not None
    runs = experts.runs(bucket.lo, bucket.hi)
    fields, emits = format.fields(bucket.spec.moments), not format.holds_weight
    written = [(run.lo, run.hi) for run, _ in runs]
    # Unused experts' weights need not move where what the upload writes holds them already.
    on_device = bucket.spec.state_tier is Tier.DEVICE
    has_shard = BufferKey(bucket.name, Memory.DEVICE_SHARD) in bucket.memory
    partly = not on_device and (has_shard or not bucket.moves)
    experts.uploads = written if partly else None
    # Memory that others use between two updates must get all weights that go on from there.
    fills = emits and not partly and op.writes[0].memory not in _LASTING
    left = gaps(written, bucket.shard_numel) if fills else []

    def adam(grad: Tensor, *rest: Tensor) -> None:
        after, working = rest[-len(fields) :], rest[0] if emits else None
        for lo, hi in left:
            assert working is not None
            kernels.cast(after[0][lo:hi], working[lo:hi])
        for run, layout in runs:
            lo, hi = run.lo, run.hi
            rule.update(
                format,
                kernels.cut(fields, after, lo, hi),
                grad[lo:hi],
                None if working is None else working[lo:hi],
                layout,
                group=group,
                step=run.step,
                grad_scale=update.grad_scale,
                seed=seed,
            )

    return KernelCalls(adam) if rule.calls_only_kernels(format) else adam


def upload_used(op: Launch, experts: Experts, totals: LaneTotals) -> Operation:
    """Return the function of a `WEIGHTS_UP` behind the update of used experts, or of all weights;
    takes the bytes that stay out of `totals`."""
    if experts.uploads is None:
        return copy
    # Those of the update that stands before it; another one's come whole.
    ranges, experts.uploads = experts.uploads, None
    (source,) = op.reads
    moved = sum(hi - lo for lo, hi in ranges) * source.nbytes // (source.hi - source.lo)
    totals.h2d_bytes -= source.nbytes - moved

    def upload(staged: Tensor, target: Tensor) -> None:
        for lo, hi in ranges:
            # h2d: as one copy of all; the launch orders every part of it.
            copy(staged[lo:hi], target[lo:hi])

    return upload
