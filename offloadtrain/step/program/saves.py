"""The launches of a save: the state to the disk, while the next steps run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.dependencies import Dependencies
from offloadtrain.step.program.disk import DiskPath
from offloadtrain.step.program.operations import Kind, Lane, Launch, Ref, Written
from offloadtrain.step.program.places import BucketRefs

_Parts = Sequence[tuple[Written, Ref]]


class SavePath:
    """Writes the state as it is after the updates launched so far."""

    def __init__(
        self,
        spec: StepSpec,
        order: Dependencies,
        buckets: Mapping[str, BucketRefs],
        disk: DiskPath,
    ) -> None:
        """`buckets`: by name, frozen ones included."""
        self._order = order
        self._disk = disk
        self._has_in_use = spec.is_delayed
        self._trained = [buckets[bucket.name] for bucket in spec.save_order]
        self._frozen = [bucket for bucket in buckets.values() if not spec.is_trained(bucket.spec)]

    def save(self) -> None:
        """Launch the writes of everything, and the copies of what is written from the spill."""
        for bucket in self._trained:
            self._disk.read(bucket)
            # What the spill does not hold. All of a field, though its end is in the spill: a window
            # of the file may go on into it.
            ends = {part.field: part.lo for part in bucket.spilled}
            fields = [
                (Written(number, 0, ends.get(number, ref.hi)), ref)
                for number, ref in enumerate(bucket.state())
            ]
            # In mode "delayed" the weights in use, too.
            in_use = [_all_of(len(fields), bucket.in_use)] if self._has_in_use else []
            unspilled = [(part, ref) for part, ref in fields if part.hi]
            self._write(bucket.name, [*unspilled, *in_use])
        spilled = [bucket for bucket in self._trained if bucket.spilled]
        for bucket in spilled:
            # On the lane of the next update of this memory, which so follows without a wait.
            self._order.launch(
                Launch(Kind.SPILL, Lane.HOST, bucket.name, bucket.spill_sources, bucket.spill)
            )
        for bucket in spilled:
            parts = [Written(part.field, part.lo, part.hi) for part in bucket.spilled]
            self._write(bucket.name, list(zip(parts, bucket.spill, strict=True)))
        for bucket in self._frozen:
            self._write(bucket.name, [_all_of(0, bucket.load_source)])
        # After all others on their lane: it ends the file.
        self._order.launch(Launch(Kind.WRITE, Lane.WRITE, ""))

    def _write(self, owner: str, parts: _Parts) -> None:
        # Beside forward and backward of the next steps: it waits for the last update of what it
        # reads, or for its copy; the next update waits for it.
        written, reads = tuple(part for part, _ in parts), tuple(ref for _, ref in parts)
        if parts:
            self._order.launch(Launch(Kind.WRITE, Lane.WRITE, owner, reads, written=written))


def _all_of(number: int, ref: Ref) -> tuple[Written, Ref]:
    return Written(number, 0, ref.hi - ref.lo), ref
