"""State and gradients on the disk: read into a slot of the host, used there, written back.

[Note: State on the disk]
A bucket's state is in a file. While it is used, it is in one of a few slots of pinned memory, each
as large as the largest bucket's state. Every use is launched as read, use, write. Nothing has to be
launched ahead, since lanes run concurrently: disk_read fills the next slot while the host updates
this bucket and disk_write writes the previous one. The order of use is known, so there is no cache:
slots are used in turn. The waits follow from the slots and files that the operations name.

In mode "exact" the drive would be idle from one update until the next norm is known. So after an
update the slots are filled with the state that the next update reads first.

Gradients and streamed weights may be in files, too. A gradient has a slot while backward fills it,
is written to its file, and is read again for its update; if the update follows immediately, it
stays in its slot. Weights are read into a slot before their copy to the device (`Streaming`). New
weights are written after their update, unless the state contains them. Reads of weights have a
separate lane, since the reads of a complete update are launched before the first load of the next
forward.

The file always contains what the slot contained when its last write was launched, so a slot can be
reused at any time. Code that accesses the state between steps, outside the lanes, reads and
writes the file, and the slots and the checksums of written data are dropped: see [Note:
Checksums of the scratch file] in `runtime/disk_arena.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offloadtrain.step.layout.buffers import BufferTable, Memory
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import Dependencies, Kind, Lane, Launch, Ref, Written
from offloadtrain.step.program.places import BucketRefs


class DiskPath:
    """Gives slots to buckets whose state is on the disk.

    Attributes:
        count: number of slots.
    """

    def __init__(self, table: BufferTable, order: Dependencies) -> None:
        self._order = order
        self.count = table.slots(Memory.STATE)
        self._slots: list[BucketRefs | None] = [None] * self.count
        """The bucket whose state each slot holds."""
        self._next = 0

    def read(self, bucket: BucketRefs) -> None:
        """Launch the read of a bucket's state into a slot, unless it has a slot."""
        if bucket in self._slots:
            return
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        before, self._slots[slot] = self._slots[slot], bucket
        bucket.copy = slot
        state = bucket.state()
        # The slot is reused: the read waits for every use of the previous bucket.
        self._order.reuse(state, () if before is None else before.state())
        # disk_read, during the update of the previous bucket. It waits until the file has the last
        # written state; users of the state wait for it.
        self._order.launch(
            Launch(Kind.READ_STATE, Lane.DISK_READ, bucket.name, bucket.state_files, state),
            fresh=state[0],
        )

    def write(self, bucket: BucketRefs) -> None:
        """Launch the write of new state from its slot to the file."""
        # disk_write, during the update of the next bucket and its read. It waits for the update;
        # the slot's next read waits for it.
        state, file = bucket.state(), bucket.state_files
        self._order.launch(Launch(Kind.WRITE_STATE, Lane.DISK_WRITE, bucket.name, state, file))

    def forget(self) -> None:
        """The lanes are idle, and the files may change outside of them."""
        self._slots = [None] * len(self._slots)


_Parts = Sequence[tuple[Written, Ref]]


class SavePath:
    """Writes the state after the updates launched so far."""

    def __init__(
        self,
        spec: StepSpec,
        order: Dependencies,
        buckets: Mapping[str, BucketRefs],
        disk: DiskPath,
    ) -> None:
        """`buckets`: by name, including frozen ones."""
        self._order = order
        self._disk = disk
        self._has_in_use = spec.is_delayed
        self._trained = [buckets[bucket.name] for bucket in spec.save_order]
        self._frozen = [bucket for bucket in buckets.values() if not spec.is_trained(bucket.spec)]

    def save(self) -> None:
        """Launch the writes of all state, and the copies into the spill that some of them read."""
        for bucket in self._trained:
            if bucket.state_files:
                self._disk.read(bucket)
            # Writes end where the spill starts. They still read all of a field, because a window of
            # the file may extend into the spilled end.
            ends = {part.field: part.lo for part in bucket.spilled}
            fields = [
                (Written(number, 0, ends.get(number, ref.hi)), ref)
                for number, ref in enumerate(bucket.state())
            ]
            # In mode "delayed" also the weights in use.
            in_use = [_all_of(len(fields), bucket.in_use)] if self._has_in_use else []
            unspilled = [(part, ref) for part, ref in fields if part.hi]
            self._write_checkpoint(bucket.name, [*unspilled, *in_use])
        spilled = [bucket for bucket in self._trained if bucket.has(Memory.SPILL)]
        for bucket in spilled:
            # On the lane of the next update of this memory, which thus follows without a wait.
            self._order.launch(
                Launch(Kind.SPILL, Lane.HOST, bucket.name, bucket.spill_sources, bucket.spill)
            )
        for bucket in spilled:
            parts = [Written(part.field, part.lo, part.hi) for part in bucket.spilled]
            self._write_checkpoint(bucket.name, list(zip(parts, bucket.spill, strict=True)))
        for bucket in self._frozen:
            self._write_checkpoint(bucket.name, [_all_of(0, bucket.load_source)])
        # After all others on their lane: it ends the file.
        self._order.launch(Launch(Kind.WRITE, Lane.WRITE, ""))

    def average(self) -> None:
        """Launch reads of the masters for a moving average."""
        for bucket in self._trained:
            if bucket.state_files:
                self._disk.read(bucket)
            # State on the host: on the lane of the updates, after all of them, during the next
            # forward. State on the device: during its next steps; the bucket's next update waits.
            lane = Lane.HOST if bucket.lane is Lane.HOST else Lane.WRITE
            self._order.launch(Launch(Kind.AVERAGE, lane, bucket.name, bucket.state()))

    def _write_checkpoint(self, owner: str, parts: _Parts) -> None:
        # write, during forward and backward of the next steps: waits for the last update of its
        # source, or for its copy; the next update waits for it.
        written, reads = tuple(part for part, _ in parts), tuple(ref for _, ref in parts)
        if parts:
            self._order.launch(Launch(Kind.WRITE, Lane.WRITE, owner, reads, written=written))


def _all_of(number: int, ref: Ref) -> tuple[Written, Ref]:
    return Written(number, 0, ref.hi - ref.lo), ref
