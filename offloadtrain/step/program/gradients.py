"""The way down: a bucket's gradient from autograd to its sum and its norm where its state is.

Lanes: compute gathers, comm reduces, d2h copies, host adds and measures; all beside backward. Where
the state is on the device nothing crosses the bus: `update` adds and measures, and a gradient that
is neither summed nor reduced is gathered straight into its place.

[Note: Measured in the gather]
A gradient that nothing is added to, of one microbatch and of a single rank, is measured by compute,
tensor by tensor where backward has left it: no pass over the host's memory. Where a second gradient
of the same backward is added, or none has come, the norm is taken where the sum is, and counts
instead.

The device's sums of squares come down into pinned memory by a copy that nobody waits in. Where all
state is on the host, it is behind the copies of the gradients, so that step() waits for these, too:
a decided step needs the device no more and can be finished without it ([Note: Salvage] in
`engine.salvage`). The update begins no later: its first bucket is that of the first forward,
whose gradient comes down last.
"""

from __future__ import annotations

from collections.abc import Iterable

from offloadtrain.step.layout.buffers import BufferKey, BufferTable, Memory
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.dependencies import Dependencies
from offloadtrain.step.program.disk import GradientSlots
from offloadtrain.step.program.operations import Kind, Lane, Launch, Ref
from offloadtrain.step.program.places import BucketRefs, Ring, ref_of


class GradientPath:
    """Sends gradients down piece by piece, through staging on the device and on the host."""

    def __init__(
        self,
        spec: StepSpec,
        table: BufferTable,
        order: Dependencies,
        host_ring: Ring,
        slots: GradientSlots,
    ) -> None:
        self._is_single = spec.is_single
        self._accumulates = spec.accumulates
        self._reduced_bytes = spec.reduced_bytes
        self._has_copies = spec.copies > 1
        self._measures_gathered = spec.measures_gathered
        on_host = all(bucket.state_tier is Tier.HOST for bucket in spec.buckets)
        # See [Note: Measured in the gather]. Compute has nothing else to do until the step is
        # decided.
        self._norms_lane = Lane.D2H if on_host and self._measures_gathered else Lane.COMPUTE
        self._keeps_pieces = table.slots(Memory.STAGING) == 0
        """Every piece has staging of its own."""
        self._order = order
        self._host_ring = host_ring
        self._slots = slots
        self._ring = Ring(Memory.STAGING, table.slots(Memory.STAGING))
        self._rounded = Ring(Memory.ROUNDED, table.slots(Memory.ROUNDED))
        self._norms_are_last = not spec.updates_in_backward
        """No Adam stands behind a norm on the host lane until `complete` has waited for the last
        one: a single event, recorded then, is enough for all of them."""
        self._norms = {
            tier: ref_of(key, row)
            for tier in Tier
            for key in [BufferKey(tier.value, Memory.NORMS)]
            if (row := table.rows.get(key)) is not None
        }

    def send(self, bucket: BucketRefs, *, complete: bool, last: bool) -> None:
        """Send all gradients that the bucket's parameters hold.

        Args:
            complete: each parameter holds a gradient, or other ranks have theirs.
            last: this is the last micro-step of the step.
        """
        is_final = last and complete
        if bucket.used is not None:
            self._mark(bucket, bucket.used)
        # A single piece is squared while it is added: one pass over host memory less.
        measured = is_final and self._accumulates and len(bucket.pieces) == 1
        measured = measured and not bucket.rounds_sum
        if not bucket.sums_on_device:
            self._slots.hold(bucket, keep=bucket.touched)
        if self._measures_gathered and not bucket.touched:
            self._measure_gathered(bucket)
            measured = True
        # Nothing has to be added to the gradient: compute writes it where Adam reads it.
        in_place = bucket.on_device and self._is_single
        in_place = in_place and not (self._accumulates or bucket.touched)
        for lo, hi in bucket.pieces:
            if in_place:
                self._gather(bucket, bucket.piece(lo, hi), lo, hi)
                continue
            staged = self._reduced(bucket, lo, hi)
            if self._accumulates:
                self._accumulate(bucket, staged, lo, hi, measured=measured)
            elif bucket.touched:
                self._add(bucket, staged, lo, hi)
            else:
                self._place(bucket, staged, lo, hi)
        bucket.touched, bucket.normed, bucket.arrived = True, measured, False
        if is_final and not measured:
            self._measure(bucket)
        if not bucket.sums_on_device:
            self._slots.changed(bucket)
        if is_final:
            self._bring_down(bucket)

    def complete(self, buckets: Iterable[BucketRefs]) -> None:
        """Write zeros where nothing was delivered, launch the missing norms, and wait for all."""
        marked = []
        for bucket in buckets:
            if bucket.used is not None:
                marked.append(bucket.used)
            if not bucket.touched:
                if bucket.used is not None:
                    self._mark(bucket, bucket.used)
                if not bucket.sums_on_device:
                    self._slots.hold(bucket, keep=False)
                zeros = (bucket.summed,)
                # Host lane, so in order before the norm. The last step's upload may still read this
                # memory: without its wait, zeros would go up as weights.
                op = Launch(Kind.NO_GRADIENT, bucket.sums_lane, bucket.name, (), zeros)
                self._order.launch(op, late=True)
                if not bucket.sums_on_device:
                    self._slots.changed(bucket)
                bucket.touched, bucket.normed = True, False
            if not bucket.normed:
                self._measure(bucket)
            if not bucket.arrived:
                self._bring_down(bucket)
        # The thread needs the norm to decide on skipping and clipping. It waits for the last norm
        # and not for the whole host lane, where Adam launched inside backward may still run.
        for tier, norms in self._norms.items():
            measured = self._order.written(norms)
            if measured is not None and tier is Tier.DEVICE:
                down = norms._replace(copy=1)
                op = Launch(Kind.NORMS_DOWN, self._norms_lane, "", (norms,), (down,))
                # Reading the device's memory would wait for all of compute's stream.
                measured = self._order.launch(op)
            # Nothing is decided yet: if the device fails during this wait, the step is given up.
            if measured is not None:
                self._order.host_wait(measured, "the gradient norm")
        # And which experts are used, which ranks tell each other next.
        for used in marked:
            if (known := self._order.written(used)) is not None:
                self._order.host_wait(known, "the used experts")

    def _mark(self, bucket: BucketRefs, used: Ref) -> None:
        """Mark the experts that the gradients about to be sent are of."""
        first = not bucket.touched
        op = Launch(Kind.MARK, Lane.COMPUTE, bucket.name, (), (used,), first=first)
        # Compute, behind the kernels that made the gradients, and in front of the gather, which
        # frees them. The training thread has read the marks of the step before.
        self._order.launch(op)

    def _gather(self, bucket: BucketRefs, target: Ref, lo: int, hi: int) -> None:
        op = Launch(Kind.GATHER, Lane.COMPUTE, bucket.name, (), (target,), lo, hi)
        # Compute, after the kernels that made the gradients. It waits until d2h, comm or Adam of
        # the last step is done with the memory; a ring with one slot more than a bucket has pieces
        # makes that wait short.
        self._order.launch(op, fresh=target)

    def _reduced(self, bucket: BucketRefs, lo: int, hi: int) -> Ref:
        """Launch gather and reduction of a piece; returns this rank's part of the staging slot, in
        the dtype that goes down."""
        ranks, count = bucket.spec.ranks, hi - lo
        wide = self._reduced_bytes(bucket.spec) != bucket.spec.weight_bytes
        dtype = "float32" if wide else bucket.spec.dtype
        staging = self._staging(bucket, lo, ranks * count, dtype)
        self._gather(bucket, staging, lo, hi)
        if ranks == 1:
            return staging
        # comm, in place, concurrently with backward of the next blocks. The copy down, or the
        # rounding, waits for it through the slot.
        self._order.launch(
            Launch(Kind.REDUCE_SCATTER, Lane.COMM, bucket.name, (), (staging,), lo, hi)
        )
        first = bucket.rank * count
        shard = Ref(staging.memory, staging.owner, 0, first, first + count, dtype)
        if self._has_copies:
            # comm, right after its reduce-scatter, during backward: 1/N crosses hosts.
            op = Launch(Kind.ALL_REDUCE, Lane.COMM, bucket.name, (), (shard,), lo, hi)
            self._order.launch(op)
        if not wide:
            return shard
        narrow = self._rounded.take(count, bucket.spec.dtype)
        op = Launch(Kind.ROUND, Lane.COMM, bucket.name, (shard,), (narrow,), lo, hi)
        # comm, right after its reduce-scatter, so that the bus carries 16 bits. It waits for the
        # last copy out of its own slot; the copy down waits for it there.
        self._order.launch(op, fresh=narrow)
        return narrow

    def _staging(self, bucket: BucketRefs, lo: int, numel: int, dtype: str) -> Ref:
        if self._keeps_pieces:
            return Ref(Memory.STAGING, f"{bucket.name}[{lo}]", 0, 0, numel, dtype)
        return self._ring.take(numel, dtype)

    def _place(self, bucket: BucketRefs, staged: Ref, lo: int, hi: int) -> None:
        """Bring a piece from its slot to the gradient."""
        kind, lane = (Kind.GRAD_DOWN, Lane.D2H)
        if bucket.on_device:
            kind, lane = (Kind.COPY, Lane.UPDATE)
        target = bucket.piece(lo, hi)
        # Beside backward of the next blocks; norm and Adam wait for it. It waits for the last
        # step's upload, which may read new weights from the gradient's memory.
        self._order.launch(Launch(kind, lane, bucket.name, (staged,), (target,), lo, hi))

    def _beside_gradient(self, bucket: BucketRefs, staged: Ref, lo: int, hi: int) -> Ref:
        """Return the piece on the tier where it is added."""
        if bucket.sum_tier is Tier.DEVICE:
            return staged
        target = self._host_ring.take(hi - lo, bucket.spec.dtype)
        op = Launch(Kind.GRAD_DOWN, Lane.D2H, bucket.name, (staged,), (target,), lo, hi)
        # d2h, beside backward and beside the host's sum of the other ring slot. It waits for the
        # last reader of this slot: a sum, or an upload of weights that were staged here.
        self._order.launch(op, fresh=target)
        return target

    def _add(self, bucket: BucketRefs, staged: Ref, lo: int, hi: int) -> None:
        """Add a second gradient of one micro-step in its dtype, as autograd itself does."""
        arrived = self._beside_gradient(bucket, staged, lo, hi)
        target = (bucket.piece(lo, hi),)
        # Host: waits for both copies, the first through the gradient and this one through the ring.
        self._order.launch(Launch(Kind.ADD, bucket.lane, bucket.name, (arrived,), target, lo, hi))

    def _accumulate(
        self, bucket: BucketRefs, staged: Ref, lo: int, hi: int, *, measured: bool
    ) -> None:
        """Add to the fp32 sum over microbatches; square in the same pass if it is the last one."""
        arrived = self._beside_gradient(bucket, staged, lo, hi)
        writes = (bucket.piece_summed(lo, hi), *([self._norms_of(bucket)] if measured else []))
        first, lane = not bucket.touched, bucket.sums_lane
        op = Launch(Kind.ACCUMULATE, lane, bucket.name, (arrived,), writes, lo, hi, first=first)
        # Host, beside backward and the next copy down: waits for its own copy through the ring.
        # Norm and Adam run on the same lane and need no wait for the sum.
        self._order.launch(op)

    def _measure(self, bucket: BucketRefs) -> None:
        """Launch the sum of squares per parameter."""
        if not bucket.sums_on_device:
            self._slots.hold(bucket, keep=True)
        if bucket.rounds_sum:
            # update, in order before its norm, which is that of what the host will read.
            rounded = Launch(Kind.ROUND_SUM, Lane.UPDATE, bucket.name, (), (bucket.summed,))
            self._order.launch(rounded, late=True)
        reads, writes = (bucket.summed,), (self._norms_of(bucket),)
        # Where the gradient is, as soon as it is there, beside backward of the next blocks:
        # `complete` then waits for little more than the norm of the last block.
        op = Launch(Kind.NORM, bucket.sums_lane, bucket.name, reads, writes)
        self._order.launch(op, late=self._norms_are_last)
        bucket.normed = True

    def _measure_gathered(self, bucket: BucketRefs) -> None:
        bucket.measured_on = Tier.DEVICE
        op = Launch(Kind.NORM, Lane.COMPUTE, bucket.name, (), (self._norms[Tier.DEVICE],))
        # Compute, behind the kernels that made the gradients, and in front of the gather, which
        # frees them.
        self._order.launch(op, late=True)

    def _norms_of(self, bucket: BucketRefs) -> Ref:
        bucket.measured_on = bucket.sum_tier
        return self._norms[bucket.sum_tier]

    def _bring_down(self, bucket: BucketRefs) -> None:
        """Copy a sum that was made on the device to where Adam reads it."""
        bucket.arrived = True
        if not bucket.sums_on_device:
            return
        self._slots.hold(bucket, keep=False)
        for lo, hi in bucket.pieces:
            down = bucket.piece_summed(lo, hi)
            if bucket.rounds_sum:
                summed, down = down, self._staging(bucket, lo, hi - lo, bucket.spec.dtype)
                # update, beside backward of the next blocks: waits for the last copy out of the
                # slot. The copy down waits for it there.
                op = Launch(Kind.ROUND, Lane.UPDATE, bucket.name, (summed,), (down,), lo, hi)
                self._order.launch(op, fresh=down)
            target = (bucket.piece(lo, hi),)
            # d2h, beside backward of the next blocks: waits for the last microbatch, and for the
            # last step's Adam; Adam waits for it.
            self._order.launch(
                Launch(Kind.GRAD_DOWN, Lane.D2H, bucket.name, (down,), target, lo, hi)
            )
        self._slots.changed(bucket)
