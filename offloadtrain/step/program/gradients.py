"""The path of gradients: from autograd to the sum and the norm on the tier of the state.

Lanes, all concurrent with backward: compute gathers, comm reduces, d2h copies, host adds and
measures. If the state is on the device, nothing crosses the bus: the `update` lane adds and
measures, and a gradient that is neither summed nor reduced is gathered directly into its place.

[Note: Measured in the gather]
With one rank and one microbatch nothing is added to a gradient. Compute then measures each tensor
where backward left it, which saves a pass over host memory. If a second gradient of the same
backward is added, or if none arrives, the norm is measured on the sum and replaces the first one.

The device's sums of squares are copied into pinned memory. If all state is on the host, this copy
follows the copies of the gradients, so that step() waits for those, too. A decided step then no
longer needs the device and can be finished without it ([Note: Salvage] in `engine.interpreter`).
This does not delay the update: its first bucket is the first one of the forward, whose gradient
arrives last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from offloadtrain.step.layout.block_spec import BucketSpec
from offloadtrain.step.layout.buffers import BufferKey, BufferTable, Memory
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.program.operations import Dependencies, Kind, Lane, Launch, Ref, Ring, ref_of

Refs = Mapping[tuple[Memory, int, int], Ref]
"""Kind, version and field → a buffer of one bucket."""


class GradientRefs:
    """A bucket's gradient: its buffers in the table, and its status in the current step.

    Attributes:
        rank: index of this rank among those that share the bucket.
        pieces: ranges [lo, hi) of the shard in which it is copied to the host.
        marks: marks of the experts that got a gradient; None if all of the bucket is always
            updated.
        file: its memory on the disk; None for a gradient that stays in memory.
        separate_sum: the sum of microbatches on the device, if the state is on the host; None if
            microbatches are added to the gradient itself.
        rounds_sum: the sum on the device is rounded to the working dtype before it is measured.
        staged_dtype: the dtype in which ranks sum it.
        lane: the lane that adds to it, and later updates the state.
        versions: its possible buffers: its sums, or the host slots of a gradient on the disk.
        adding: the gradient that microbatches are added to.
        decided: the gradient that Adam reads.
        touched: its memory holds a gradient of the current step.
        arrived: the copy of its sum to the host was launched.
        measured_on: the tier that measures its sums of squares in this step; None until launched.
    """

    def __init__(self, spec: BucketSpec, step: StepSpec, refs: Refs, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.pieces = step.pieces(spec)
        self.marks = refs.get((Memory.USED, 0, 0))
        self.file = refs.get((Memory.GRADIENT_FILE, 0, 0))
        self.separate_sum = refs.get((Memory.SUM, 0, 0))
        self.rounds_sum = step.rounds_sum(spec)
        self.staged_dtype = step.reduced_dtype(spec)
        self.lane = UPDATE_LANES[spec.update_tier]
        self.versions = [ref for key, ref in refs.items() if key[0] is Memory.GRADIENT]
        self.adding = self.decided = self.versions[0]
        self.touched = self.arrived = False
        self.measured_on: Tier | None = None

    @property
    def summed(self) -> Ref:
        """The memory in which the gradient is complete first; it is measured there."""
        return self.adding if self.separate_sum is None else self.separate_sum

    @property
    def sums_lane(self) -> Lane:
        """The lane that adds microbatches and measures them."""
        return self.lane if self.separate_sum is None else Lane.UPDATE

    def end_step(self) -> None:
        """Clear the status: the step was applied or dropped."""
        self.touched = self.arrived = False
        self.measured_on = None


UPDATE_LANES = {Tier.DEVICE: Lane.UPDATE, Tier.HOST: Lane.HOST}
"""Tier → the lane that adds to gradients there, and updates the state."""


def part_of(full: Ref, lo: int, hi: int) -> Ref:
    """Return elements [lo, hi) of a buffer."""
    return full if hi - lo == full.hi else full._replace(lo=lo, hi=hi)


def _norms(table: BufferTable, version: int) -> dict[Tier, Ref]:
    keys = {tier: BufferKey(tier.value, Memory.NORMS, version) for tier in Tier}
    return {tier: ref_of(key, table.rows[key]) for tier, key in keys.items() if key in table.rows}


class GradientSlots:
    """Assigns host slots to buckets whose gradient is on the disk; no-op for other buckets.

    A gradient is written to its file as soon as a backward has filled its slot, or not at all if
    its update follows immediately ("early").
    """

    def __init__(self, spec: StepSpec, table: BufferTable, order: Dependencies) -> None:
        self._order = order
        self._slots: list[GradientRefs | None] = [None] * table.slots(Memory.GRADIENT)
        """The present or last bucket of each slot."""
        self._next = 0
        self._written_late = spec.updates_early
        self._unwritten: set[GradientRefs] = set()
        """Buckets whose slot is newer than their file."""

    def acquire(self, gradient: GradientRefs, *, keep: bool) -> None:
        """Assign a slot to the gradient.

        Args:
            keep: its current contents are needed.
        """
        if gradient.file is None or gradient in self._slots:
            return
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        before, self._slots[slot] = self._slots[slot], gradient
        if before is not None:
            self._write(before)
        left = () if before is None else (before.adding,)
        gradient.adding = gradient.decided = gradient.versions[slot]
        # The slot is reused: its first write waits for every use of the previous bucket.
        self._order.reuse((gradient.adding,), left)
        if keep:
            reads, writes = (gradient.file,), (gradient.adding,)
            # disk_read, during the update of the previous bucket. It waits until the file has the
            # last written gradient; the update waits for it.
            self._order.launch(
                Launch(Kind.READ_GRADIENT, Lane.DISK_READ, gradient.spec.name, reads, writes),
                fresh=gradient.adding,
            )

    def changed(self, gradient: GradientRefs) -> None:
        """All writes into the slot were launched for now: write the slot to its file."""
        if gradient.file is not None:
            self._unwritten.add(gradient)
            if not self._written_late:
                self._write(gradient)

    def used(self, gradient: GradientRefs) -> None:
        """Its update was launched: the gradient is no longer needed."""
        self._unwritten.discard(gradient)

    def end_step(self) -> None:
        """No gradient is needed after a step."""
        self._unwritten.clear()

    def reset(self) -> None:
        """The lanes are idle and all gradients are dropped."""
        self._slots = [None] * len(self._slots)
        self._unwritten.clear()

    def _write(self, gradient: GradientRefs) -> None:
        if gradient.file is None or gradient not in self._unwritten:
            return
        self._unwritten.discard(gradient)
        # disk_write, during backward of the next blocks: waits for their last copy to the host, or
        # for their sum; the slot's next bucket waits for it.
        reads, writes = (gradient.adding,), (gradient.file,)
        self._order.launch(
            Launch(Kind.WRITE_GRADIENT, Lane.DISK_WRITE, gradient.spec.name, reads, writes)
        )


class GradientPath:
    """Sends gradients to the host piece by piece, through staging on the device and on the host.

    Attributes:
        slots: the host slots of gradients on the disk.
    """

    def __init__(
        self,
        spec: StepSpec,
        table: BufferTable,
        order: Dependencies,
        host_ring: Ring,
    ) -> None:
        self._is_single = spec.is_single
        self._accumulates = spec.accumulates
        self._has_copies = spec.copies > 1
        self._measures_gathered = spec.measures_gathered
        on_host = all(bucket.state_tier is Tier.HOST for bucket in spec.buckets)
        # See [Note: Measured in the gather]. Compute is otherwise idle until the step is
        # decided.
        self._norms_lane = Lane.D2H if on_host and self._measures_gathered else Lane.COMPUTE
        self._order = order
        self._host_ring = host_ring
        self.slots = GradientSlots(spec, table, order)
        self._ring = Ring(Memory.STAGING, table.slots(Memory.STAGING))
        self._rounded = Ring(Memory.ROUNDED, table.slots(Memory.ROUNDED))
        self._norms_are_last = not spec.updates_in_backward
        """True if no Adam follows a norm on the host lane until `complete` has waited for the last
        norm: a single event, recorded then, is enough for all norms."""
        self._norms, self._copied_norms = _norms(table, 0), _norms(table, 1)
        """Tier → the sums of squares that are computed there; those that are then copied to the
        host."""

    def send(self, gradient: GradientRefs, *, complete: bool, last: bool) -> None:
        """Launch the transfer of all gradients of the bucket's parameters.

        Args:
            complete: every parameter has a gradient, here or on another rank.
            last: this is the last micro-step of the step.
        """
        is_final = last and complete
        if gradient.marks is not None:
            self._mark(gradient, gradient.marks)
        # A single piece is squared while it is added, which saves a pass over host memory.
        measured = is_final and self._accumulates and len(gradient.pieces) == 1
        measured = measured and not gradient.rounds_sum
        in_slot = gradient.file is not None and gradient.separate_sum is None
        if in_slot:
            self.slots.acquire(gradient, keep=gradient.touched)
        if self._measures_gathered and not gradient.touched:
            gradient.measured_on, measured = Tier.DEVICE, True
            norms = (self._norms[Tier.DEVICE],)
            # Compute, between the kernels that made the gradients and the gather, which frees them.
            self._order.launch(
                Launch(Kind.NORM, Lane.COMPUTE, gradient.spec.name, (), norms), late=True
            )
        # If nothing is added to the gradient, compute writes it directly into the memory that Adam
        # reads.
        in_place = gradient.lane is Lane.UPDATE and self._is_single
        in_place = in_place and not (self._accumulates or gradient.touched)
        name, ranks = gradient.spec.name, gradient.spec.ranks
        for lo, hi in gradient.pieces:
            # In ZeRO stage 1 the ring has no slots: each piece has separate memory.
            piece = (
                part_of(gradient.adding, lo, hi)
                if in_place
                else self._ring.take(ranks * (hi - lo), gradient.staged_dtype, name, lo)
            )
            # Compute, after the kernels that made the gradients. It waits until d2h, comm or Adam
            # of the last step no longer uses the memory; a ring with one slot more than a bucket
            # has pieces makes that wait short.
            gather = Launch(Kind.GATHER, Lane.COMPUTE, name, (), (piece,), lo, hi)
            self._order.launch(gather, fresh=piece)
            if in_place:
                continue
            if ranks > 1:
                piece = self._reduce(gradient, piece, lo, hi)
            if self._accumulates or gradient.touched:
                self._add(gradient, piece, lo, hi, measured=measured)
            else:
                on_device = gradient.lane is Lane.UPDATE
                kind, lane = (Kind.COPY, Lane.UPDATE) if on_device else (Kind.GRAD_DOWN, Lane.D2H)
                target = (part_of(gradient.adding, lo, hi),)
                # During backward of the next blocks; norm and Adam wait for it. It waits for the
                # last step's upload, which may read new weights from the gradient's memory.
                self._order.launch(Launch(kind, lane, name, (piece,), target, lo, hi))
        gradient.touched = True
        if not measured:
            gradient.measured_on = None
        if is_final and not measured:
            self._measure(gradient)
        if in_slot:
            self.slots.changed(gradient)
        if is_final and gradient.separate_sum is not None:
            self._bring_down(gradient, gradient.separate_sum)
        gradient.arrived = is_final

    def complete(self, gradients: Iterable[GradientRefs]) -> None:
        """Write zeros where nothing was delivered, launch the missing norms, and wait for all."""
        marked = []
        for gradient in gradients:
            if gradient.marks is not None:
                marked.append(gradient.marks)
            if not gradient.touched:
                if gradient.marks is not None:
                    self._mark(gradient, gradient.marks)
                if gradient.separate_sum is None:
                    self.slots.acquire(gradient, keep=False)
                zeros = (gradient.summed,)
                # Host lane, so in order before the norm. The last step's upload may still read this
                # memory: without its wait, zeros would be uploaded as weights.
                self._order.launch(
                    Launch(Kind.NO_GRADIENT, gradient.sums_lane, gradient.spec.name, (), zeros),
                    late=True,
                )
                if gradient.separate_sum is None:
                    self.slots.changed(gradient)
                gradient.touched, gradient.measured_on = True, None
            if gradient.measured_on is None:
                self._measure(gradient)
            if gradient.separate_sum is not None and not gradient.arrived:
                self._bring_down(gradient, gradient.separate_sum)
            gradient.arrived = True
        # The thread needs the norm to decide on skipping and clipping. It waits for the last norm
        # only, not for the complete host lane, where Adam launched inside backward may still run.
        for tier, norms in self._norms.items():
            measured = self._order.last_write(norms)
            if measured is not None and (down := self._copied_norms.get(tier)):
                # Reading the device's memory would wait for all of compute's stream.
                measured = self._order.launch(
                    Launch(Kind.NORMS_DOWN, self._norms_lane, "", (norms,), (down,))
                )
            # Nothing is decided yet: if the device fails during this wait, the step is abandoned.
            if measured is not None:
                self._order.host_wait(measured, "the gradient norm")
        # Ranks exchange next which experts are used.
        for used in marked:
            if (known := self._order.last_write(used)) is not None:
                self._order.host_wait(known, "the used experts")

    def _mark(self, gradient: GradientRefs, used: Ref) -> None:
        """Mark the experts whose gradients are about to be sent."""
        first = not gradient.touched
        # Compute, between the kernels that made the gradients and the gather, which frees them.
        # The training thread has read the marks of the previous step.
        self._order.launch(
            Launch(Kind.MARK, Lane.COMPUTE, gradient.spec.name, (), (used,), first=first)
        )

    def _reduce(self, gradient: GradientRefs, staging: Ref, lo: int, hi: int) -> Ref:
        """Launch the reduction of a piece among ranks; returns this rank's part of the staging
        slot, in the dtype that is copied to the host."""
        count, dtype = hi - lo, gradient.staged_dtype
        # comm, in place, concurrently with backward of the next blocks. The copy to the host, or
        # the rounding, waits for it through the slot.
        self._order.launch(
            Launch(Kind.REDUCE_SCATTER, Lane.COMM, gradient.spec.name, (), (staging,), lo, hi)
        )
        first = gradient.rank * count
        shard = Ref(staging.memory, staging.owner, 0, first, first + count, dtype)
        if self._has_copies:
            # comm, right after its reduce-scatter, during backward: 1/N crosses hosts.
            self._order.launch(
                Launch(Kind.ALL_REDUCE, Lane.COMM, gradient.spec.name, (), (shard,), lo, hi)
            )
        if dtype == gradient.spec.dtype:
            return shard
        narrow = self._rounded.take(count, gradient.spec.dtype)
        # comm, right after its reduce-scatter, so that the bus carries 16 bits. It waits for the
        # last copy out of its slot; the copy to the host waits for it there.
        self._order.launch(
            Launch(Kind.ROUND, Lane.COMM, gradient.spec.name, (shard,), (narrow,), lo, hi),
            fresh=narrow,
        )
        return narrow

    def _add(
        self, gradient: GradientRefs, staged: Ref, lo: int, hi: int, *, measured: bool
    ) -> None:
        """Add a microbatch to the fp32 sum, or a second gradient of one micro-step to the first in
        their dtype, as autograd itself does; `measured`: square the sum in the same pass."""
        name, arrived = gradient.spec.name, staged
        if gradient.sums_lane is not Lane.UPDATE:
            arrived = self._host_ring.take(hi - lo, gradient.spec.dtype)
            # d2h, during backward and the host's sum of the other ring slot. It waits for the last
            # reader of this slot: a sum, or an upload of weights that were staged here.
            self._order.launch(
                Launch(Kind.GRAD_DOWN, Lane.D2H, name, (staged,), (arrived,), lo, hi), fresh=arrived
            )
        norms = [self._norms_of(gradient)] if measured else []
        writes = (part_of(gradient.summed, lo, hi), *norms)
        kind = Kind.ACCUMULATE if self._accumulates else Kind.ADD
        first = self._accumulates and not gradient.touched
        # Host, during backward and the next copy to the host: waits for its copy through the ring,
        # and for the copy of a first gradient through that. Norm and Adam run on the same lane and
        # need no wait for the sum.
        self._order.launch(
            Launch(kind, gradient.sums_lane, name, (arrived,), writes, lo, hi, first=first)
        )

    def _measure(self, gradient: GradientRefs) -> None:
        """Launch the sum of squares per parameter."""
        if gradient.separate_sum is None:
            self.slots.acquire(gradient, keep=True)
        if gradient.rounds_sum:
            # update, in order before its norm: the norm is that of the values that the host will
            # read.
            self._order.launch(
                Launch(Kind.ROUND_SUM, Lane.UPDATE, gradient.spec.name, (), (gradient.summed,)),
                late=True,
            )
        reads, writes = (gradient.summed,), (self._norms_of(gradient),)
        # On the gradient's tier, as soon as it is complete, during backward of the next blocks:
        # `complete` then waits for little more than the norm of the last block.
        self._order.launch(
            Launch(Kind.NORM, gradient.sums_lane, gradient.spec.name, reads, writes),
            late=self._norms_are_last,
        )

    def _norms_of(self, gradient: GradientRefs) -> Ref:
        """Return the destination of its sums of squares, on the tier where it is complete first."""
        gradient.measured_on = Tier.DEVICE if gradient.sums_lane is Lane.UPDATE else Tier.HOST
        return self._norms[gradient.measured_on]

    def _bring_down(self, gradient: GradientRefs, device_sum: Ref) -> None:
        """Copy a sum that was made on the device to the memory that Adam reads."""
        self.slots.acquire(gradient, keep=False)
        for lo, hi in gradient.pieces:
            down = part_of(device_sum, lo, hi)
            if gradient.rounds_sum:
                name, dtype = gradient.spec.name, gradient.spec.dtype
                summed, down = down, self._ring.take(hi - lo, dtype, name, lo)
                # update, during backward of the next blocks: waits for the last copy out of the
                # slot. The copy to the host waits for it there.
                self._order.launch(
                    Launch(Kind.ROUND, Lane.UPDATE, gradient.spec.name, (summed,), (down,), lo, hi),
                    fresh=down,
                )
            target = (part_of(gradient.adding, lo, hi),)
            # d2h, during backward of the next blocks: waits for the last microbatch, and for the
            # last step's Adam; Adam waits for it.
            self._order.launch(
                Launch(Kind.GRAD_DOWN, Lane.D2H, gradient.spec.name, (down,), target, lo, hi)
            )
        self.slots.changed(gradient)
