"""The way up: Adam per bucket where its state is, then the upload of its new working weights.

[Note: Matrices]
Some rules (Muon) need whole matrices, and arithmetic that is fast on the device only. A bucket of
matrices is updated by three operations. `DIRECTION`, on the host, updates the moments and replaces
the gradient by the matrix to orthogonalize. `ORTHOGONALIZE`, on the device, takes one matrix after
the other: up, in place, down. `ADAM`, on the host, applies decay, updates the masters and writes
the new working weights. The first two run one block ahead of the third, so that the device works on
one block while the host works on another. All three wait until step() knows the norm: `DIRECTION`
overwrites the gradient, so that a wrong guess could not be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offloadtrain.step.layout.block_spec import MatrixSpec
from offloadtrain.step.layout.buffers import BufferTable, Memory, WeightRoute
from offloadtrain.step.program.disk import DiskPath
from offloadtrain.step.program.gradients import GradientSlots
from offloadtrain.step.program.operations import (
    Dependencies,
    Enter,
    Event,
    Flip,
    Kind,
    Lane,
    Launch,
    Ref,
    Renew,
    Ring,
    Swap,
    Update,
)
from offloadtrain.step.program.places import BlockRefs, BucketRefs
from offloadtrain.step.program.streaming import Streaming


class UpdatePath:
    """Launches the two halves of an update, Adam and upload, when an update mode asks for them."""

    def __init__(
        self,
        table: BufferTable,
        order: Dependencies,
        host_ring: Ring,
        streaming: Streaming,
        disk: DiskPath,
        gradients: GradientSlots,
    ) -> None:
        self._order = order
        self._host_ring = host_ring
        self._streaming = streaming
        self._disk = disk
        self._gradients = gradients
        self._new_weights = Ring(Memory.NEW_WEIGHTS, table.slots(Memory.NEW_WEIGHTS))

    def begin(self, bucket: BucketRefs, update: Update) -> None:
        """Launch the operations before `adam`, for matrices; see [Note: Matrices]."""
        if bucket.directions is None:
            return
        if bucket.state_files:
            self._disk.read(bucket)
        self._gradients.acquire(bucket.gradient, keep=True)
        reads, writes = (bucket.gradient.decided,), (bucket.directions, *bucket.state())
        # Host, while the device works on the matrices of the previous block. It waits for the last
        # copy down; the first copy up waits for it.
        self._order.launch(
            Launch(Kind.DIRECTION, bucket.lane, bucket.name, reads, writes, update=update)
        )
        if bucket.state_files:
            self._disk.write(bucket)
        for matrix in bucket.matrices:
            self._orthogonalize(bucket, bucket.directions, matrix)
        self._gradients.changed(bucket.gradient)

    def _orthogonalize(self, bucket: BucketRefs, directions: Ref, matrix: MatrixSpec) -> None:
        lo, hi = matrix.offset, matrix.offset + matrix.numel
        on_host = directions._replace(lo=lo, hi=hi)
        # An update on the device moves nothing.
        moves = bucket.lane is Lane.HOST
        on_device, used = on_host, 0
        if moves:
            used = matrix.numel
            on_device = Ref(Memory.MATRIX, 0, 0, 0, used, directions.dtype)
        workspace = Ref(Memory.MATRIX, 0, 0, used, used + matrix.workspace_numel, directions.dtype)
        name = bucket.name
        # ortho, during compute and the host's work: the copy up waits for the host, Adam for the
        # copy down. One matrix is on the device at a time, so this lane's order separates two.
        if moves:
            up = Launch(Kind.MATRIX_UP, Lane.ORTHO, name, (on_host,), (on_device,), lo, hi)
            self._order.launch(up, fresh=on_device)
        both = (on_device, workspace)
        self._order.launch(Launch(Kind.ORTHOGONALIZE, Lane.ORTHO, name, (), both, lo, hi))
        if moves:
            self._order.launch(
                Launch(Kind.MATRIX_DOWN, Lane.ORTHO, name, (on_device,), (on_host,), lo, hi)
            )

    def adam(self, bucket: BucketRefs, update: Update) -> Ref:
        """Launch the update of a bucket, for matrices after `begin`; return where the new working
        weights are staged."""
        if bucket.state_files:
            self._disk.read(bucket)
        self._gradients.acquire(bucket.gradient, keep=True)
        staged = self._staged(bucket, other=update.out_of_place)
        state = bucket.state()
        reads = (
            bucket.directions or bucket.gradient.decided,
            *(state if update.out_of_place else ()),
        )
        after = bucket.state(other=update.out_of_place)
        emits = () if bucket.spec.format.holds_weight else (staged,)
        writes = (*emits, *after)
        op = Launch(Kind.ADAM, bucket.lane, bucket.name, reads, writes, update=update)
        # Host, during backward, or during the uploads and the forward after step(). It waits for
        # the last copy down; in place, also for loads of weights from this state. The upload waits
        # for it. On the device it may write the weights themselves: it waits for backward, and
        # forward waits for it.
        self._order.launch(op, fresh=_in_turn(staged))
        self._gradients.used(bucket.gradient)
        self._keep_weight(bucket, staged)
        if bucket.state_files:
            self._disk.write(bucket)
        return staged

    def _keep_weight(self, bucket: BucketRefs, staged: Ref) -> None:
        """Copy a new weight out of a state that may leave the host before the upload, and write it
        to its file if loads read it from the disk."""
        if (file := bucket.new_weight_file) is not None:
            # disk_write, during the update of the next bucket. It waits for Adam, and for loads of
            # what the file held before; the next load waits for it.
            self._launch(Kind.WRITE_WEIGHTS, Lane.DISK_WRITE, bucket, staged, file)
        if bucket.spec.format.holds_weight and bucket.has(Memory.PENDING):
            # Host, after its Adam: waits for the last upload, or for loads in flight, of the
            # weights before.
            self._launch(Kind.PUBLISH, Lane.HOST, bucket, bucket.state()[0], staged)

    def is_over(self, order: Iterable[BlockRefs]) -> None:
        """All updates of the step were launched, and those of the next will have this order."""
        # disk_read, during the next forward and backward: waits for the writes of this update.
        on_disk = [bucket for _, buckets in order for bucket in buckets if bucket.state_files]
        if on_disk:
            self._disk.read_ahead(on_disk)

    def swap(self, bucket: BucketRefs) -> None:
        """Make the copy written by an out-of-place update the state."""
        # Copies no byte: operations launched so far keep their views, later ones name the other.
        bucket.copy = 1 - bucket.copy
        self._order.operations.append(Swap(bucket.name))

    def upload(self, block: str, buckets: Iterable[tuple[BucketRefs, Ref]]) -> None:
        """Bring a block's new weights to the memory that compute or its loads read. Graphs over the
        old weights become stale."""
        renewed = False
        # `buckets` may be lazy: each upload is launched before the next bucket's Adam, which may
        # take its ring slot and then waits for it.
        for bucket, staged in buckets:
            self._upload(bucket, staged)
            renewed = renewed or not bucket.updates_other_version
        if renewed:
            self._order.operations.append(Renew(block))
            # A slot still holds the old weights: the next use must load the new ones.
            self._streaming.drop(block)

    def keep(self, bucket: BucketRefs) -> None:
        """The state is about to change: loads read a snapshot of the weights in use from now on."""
        # Of two versions, loads read the one in the state, which the next update overwrites.
        if bucket.loads_in_turn and bucket.load_source.memory is Memory.STATE:
            # Host, during forward: waits for loads in flight of the version before; the next loads
            # of the block wait for it.
            snapshot = bucket.ref(Memory.SNAPSHOT)
            self._launch(Kind.PUBLISH, Lane.HOST, bucket, bucket.load_source, snapshot)
            self._switch_version(bucket)

    def show(self, blocks: Sequence[BlockRefs]) -> None:
        """Let compute read the newest version of these blocks' weights, which is the other one."""
        for bucket in (bucket for _, buckets in blocks for bucket in buckets):
            self._publish_weights(bucket)
        # The next use waits for the uploads; graphs keep the version that they were built with.
        self._enter(blocks, 1)

    def switch_version(self, blocks: Sequence[BlockRefs], *, to_previous: bool) -> None:
        """Let compute read the previous version of the weights shown last, or the newest again."""
        for bucket in (bucket for _, buckets in blocks for bucket in buckets):
            self._switch_version(bucket)
        # No upload is on its way to either version: the step whose backwards read the one before is
        # not decided. Compute has waited for both.
        self._enter(blocks, -1 if to_previous else 1)

    def _enter(self, blocks: Iterable[BlockRefs], by: int) -> None:
        for block, buckets in (entry for entry in blocks if entry[1]):
            if self._streaming.loads(block):
                # A slot holds the version that was loaded: the next use loads the other.
                self._streaming.drop(block)
            else:
                self._order.operations.append(Enter(block, buckets[0].version))
            self._order.operations.append(Renew(block, by))

    def _switch_version(self, bucket: BucketRefs) -> None:
        bucket.version = 1 - bucket.version
        if bucket.sources:
            self._order.operations.append(Flip(bucket.name))

    def _publish_weights(self, bucket: BucketRefs) -> None:
        if bucket.publish_weights() and bucket.sources:
            self._order.operations.append(Flip(bucket.name))

    def emit(self, blocks: Sequence[BlockRefs]) -> None:
        """Upload the masters as they are, after they were set or loaded."""
        event = self.end_backward(blocks)
        # Masters on the device were set by the caller on compute, which no launch declares: the
        # cast on a lane of its own would read them too early.
        if any(bucket.lane is Lane.UPDATE for _, buckets in blocks for bucket in buckets):
            self._order.wait(Lane.UPDATE, event, "masters are set")
        for block, buckets in blocks:
            # Nor does one declare the allocation of shards on compute, which may be new.
            shards = [b.upload_target for b in buckets if b.source_kind is Memory.DEVICE_SHARD]
            self._order.was_read(shards, event)
            self.upload(block, ((bucket, self._cast(bucket)) for bucket in buckets))
            # A block without trained buckets uploads nothing, but its frozen weights may be new.
            self._streaming.drop(block)

    def defer(self, blocks: Sequence[BlockRefs]) -> dict[str, list[tuple[BucketRefs, Ref]]]:
        """Round the masters and leave the result on the host: the caller has set other weights in
        the memory that compute or loads read. Return block → where the new weights wait."""
        self._renew_weights_in_use(blocks)
        return {block: [(bucket, self._cast(bucket)) for bucket in some] for block, some in blocks}

    def defer_to_other_version(self, blocks: Sequence[BlockRefs]) -> None:
        """Like `defer`, with two versions of the weights: upload the masters into the other one."""
        self._renew_weights_in_use(blocks)
        for bucket in (bucket for _, buckets in blocks for bucket in buckets):
            bucket.updates_other_version = True
        self.emit(blocks)

    def _renew_weights_in_use(self, blocks: Sequence[BlockRefs]) -> None:
        """The caller has written the weights that compute or loads read."""
        # It wrote on compute, which no launch declares: collectives wait for it.
        self.end_backward(blocks)
        for block, buckets in blocks:
            for bucket in buckets:
                self._gather(bucket)
            self._order.operations.append(Renew(block))
            # A slot still holds the weights before them.
            self._streaming.drop(block)

    def end_backward(self, blocks: Iterable[BlockRefs]) -> Event:
        """Compute has read these weights for the last time before their upload."""
        # The user's backward is no launch: this event stands for its reads. Uploads wait for it, or
        # they would overwrite weights that backward reads. Streamed blocks: see `Streaming.drop`.
        event = self._order.record(Lane.COMPUTE, "backward")
        for block, buckets in blocks:
            if not self._streaming.loads(block):
                refs = [bucket.newest for bucket in buckets]
                self._order.was_read(refs, event)
        return event

    def _upload(self, bucket: BucketRefs, staged: Ref) -> None:
        match bucket.weight_route:
            case WeightRoute.FILE:
                # Written after its Adam. Loads launched so far read the version before, and of a
                # single one what was written last.
                if len(bucket.sources) > 1:
                    self._switch_version(bucket)
            case WeightRoute.IN_TURN:
                # Loads read the staged weights themselves and wait for Adam.
                if not bucket.updates_other_version:
                    self._publish_weights(bucket)
            case WeightRoute.SNAPSHOT:
                # Host, after its Adam: waits for loads in flight of the old snapshot.
                snapshot = bucket.ref(Memory.SNAPSHOT)
                self._launch(Kind.PUBLISH, Lane.HOST, bucket, staged, snapshot)
            case WeightRoute.ON_DEVICE:
                # update, during compute: waits for backward's last read of the old weights.
                if staged != bucket.upload_target:
                    self._launch(Kind.COPY, Lane.UPDATE, bucket, staged, bucket.upload_target)
                self._gather(bucket)
            case WeightRoute.UPLOAD:
                # h2d, during Adam of the next bucket and forward of the blocks before: forward
                # waits for its own block only. The next copy down waits until the staged weights
                # are read.
                self._launch(Kind.WEIGHTS_UP, Lane.H2D, bucket, staged, bucket.upload_target)
                self._gather(bucket)

    def _gather(self, bucket: BucketRefs) -> None:
        """Launch the exchange of a bucket's shards, where each rank keeps all of them."""
        if bucket.spec.ranks > 1 and not bucket.sources:
            op = Launch(Kind.ALL_GATHER, Lane.COMM, bucket.name, writes=(bucket.newest,))
            # comm, during the upload of the next bucket: waits for its own upload, and compute
            # waits for it in the place of the upload.
            self._order.launch(op)

    def _staged(self, bucket: BucketRefs, *, other: bool = False) -> Ref:
        """Return the memory for new weights until their upload: the state itself, memory reserved
        for them, the gradient's, a slot of a ring, or the memory where they are used."""
        place = bucket.staged(other=other)
        if place is None:
            to_disk = bucket.staging is Memory.NEW_WEIGHTS
            ring = self._new_weights if to_disk else self._host_ring
            place = ring.take(bucket.spec.shard_numel, bucket.spec.dtype)
        return place

    def _cast(self, bucket: BucketRefs) -> Ref:
        # The weights that loads read are those in the state's file.
        if bucket.source_kind is Memory.STATE_FILE:
            return bucket.load_source
        if bucket.state_files:
            self._disk.read(bucket)
        # The new weights may lie over the gradient, which nothing needs any more.
        self._gradients.acquire(bucket.gradient, keep=False)
        staged = self._staged(bucket)
        if not bucket.spec.format.holds_weight:
            op = Launch(Kind.CAST, bucket.lane, bucket.name, (bucket.state()[0],), (staged,))
            # Host, during the upload of the bucket before, which waits for its own cast only.
            self._order.launch(op, fresh=_in_turn(staged))
        self._keep_weight(bucket, staged)
        return staged

    def _launch(self, kind: Kind, lane: Lane, bucket: BucketRefs, read: Ref, written: Ref) -> None:
        self._order.launch(Launch(kind, lane, bucket.name, (read,), (written,)))


def _in_turn(staged: Ref) -> Ref | None:
    """Return a ring slot, whose old contents are undefined; None for other memory."""
    return staged if staged.memory in (Memory.HOST_STAGING, Memory.NEW_WEIGHTS) else None
