"""The update of a step: when Adam of a bucket runs (the update modes), and the path of its new
weights to the memory that compute reads (`UpdatePath`).

[Note: Update modes]
Exact        Adam runs when the norm is known, block after block in forward order. Each block
             is uploaded during the next block's Adam and the next forward
Early        if no global value is needed (no clipping, loss scaling or skipping), Adam of a
             bucket runs inside backward, as soon as its gradient is on the host
Speculative  Adam runs inside backward on the guess "no clipping, no overflow" and writes the
             second copy of the state. If the guess is right, that copy becomes the state;
             otherwise it is discarded and the update runs as in Exact, with the same bits
Delayed      Adam of step t runs during step t+1; its weights are uploaded after each block's
             backward of step t+1: W(t+1) = W(t) - update of the gradient at W(t-1)

`StepSpec.update_policy` adds another mode.

In the first three modes no weight on the device changes before `step()`: code between backward and
step() sees the weights of a resident run, and a wrong guess uploads nothing twice. No update runs
inside the first backward, which shows whether blocks deliver their gradients once.

[Note: Matrices]
Some rules (Muon) need full matrices, and arithmetic that is fast only on the device. A bucket of
matrices is updated by three operations. `DIRECTION`, on the host, updates the moments and replaces
the gradient by the matrix to orthogonalize. `ORTHOGONALIZE`, on the device, processes one matrix
after the other: copied up, in place, copied down. `ADAM`, on the host, applies decay, updates the
masters and writes the new working weights. The first two run one block ahead of the third, so that
the device works on one block while the host works on another. All three wait until step() knows the
norm: `DIRECTION` overwrites the gradient, so that a wrong guess could not be repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offloadtrain.config.errors import OffloadTrainError
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


class UpdateError(OffloadTrainError):
    """An update inside backward cannot be undone and should not have run."""


class Decision(NamedTuple):
    """The decision about a step: whether to update, and with which coefficients.

    Attributes:
        step: number of this optimizer step, 1-based, even if it is skipped.
        coef: the clip coefficient, 1.0 for none.
        scale: the divisor of the gradients, which arrive as the sum over ranks: the loss scale
            times the number of ranks.
        hyperparameters: their values in step(), compared with those of updates inside backward;
            None if there are no such updates.
    """

    step: int
    skipped: bool = False
    coef: float = 1.0
    scale: float = 1.0
    hyperparameters: object = None

    @property
    def update(self) -> Update:
        return Update(self.step, self.coef / self.scale, out_of_place=False)


@dataclass(frozen=True, slots=True)
class Speculation:
    """The result of the updates that ran inside backward.

    Attributes:
        buckets: number of buckets updated inside backward.
        right: whether the guess was right; None without speculation.
        mostly_wrong: guesses about most of the last steps were, or would have been, wrong.
    """

    buckets: int = 0
    right: bool | None = None
    mostly_wrong: bool = False


class UpdatePath:
    """Launches the two halves of an update, Adam and upload, on request of an update mode."""

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
        # copy of gradients to the host; the first copy to the device waits for it.
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
        # ortho, during compute and the host's work: the copy to the device waits for the host. One
        # matrix is on the device at a time, so this lane's order separates two.
        if moves:
            self._order.launch(
                Launch(Kind.MATRIX_UP, Lane.ORTHO, name, (on_host,), (on_device,), lo, hi),
                fresh=on_device,
            )
        both = (on_device, workspace)
        self._order.launch(Launch(Kind.ORTHOGONALIZE, Lane.ORTHO, name, (), both, lo, hi))
        if moves:
            # Adam waits for it.
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
        # Host, during backward, or during the uploads and the forward after step(). It waits for
        # the last copy of gradients; in place, also for loads of weights from this state. The
        # upload waits for it. On the device it may write the weights themselves: it waits for
        # backward, and forward waits for it.
        self._order.launch(
            Launch(Kind.ADAM, bucket.lane, bucket.name, reads, writes, update=update),
            fresh=_in_turn(staged),
        )
        self._gradients.used(bucket.gradient)
        self._keep_weight(bucket, staged)
        if bucket.state_files:
            self._disk.write(bucket)
        return staged

    def _keep_weight(self, bucket: BucketRefs, staged: Ref) -> None:
        """Copy a new weight out of a state that may leave the host before the upload, and write it
        to its file if loads read it from the disk."""
        if bucket.source_kind is Memory.WEIGHT_FILE:
            file = bucket.sources[bucket.version - 1]  # the other one, if there are two
            # disk_write, during the update of the next bucket. It waits for Adam, and for loads of
            # the file's previous contents; the next load waits for it.
            self.launch(Kind.WRITE_WEIGHTS, Lane.DISK_WRITE, bucket, staged, file)
        if bucket.spec.format.holds_weight and bucket.has(Memory.PENDING):
            # Host, after its Adam: waits for the last upload, or for loads in flight, of the
            # previous weights.
            self.launch(Kind.PUBLISH, Lane.HOST, bucket, bucket.state()[0], staged)

    def read_ahead(self, order: Iterable[BlockRefs]) -> None:
        """Fill the slots with the first state of the next update, which has this order."""
        on_disk = [bucket for _, buckets in order for bucket in buckets if bucket.state_files]
        # disk_read, during the next forward and backward: waits for the writes of this update.
        for bucket in on_disk[: self._disk.count]:
            self._disk.read(bucket)

    def swap(self, bucket: BucketRefs) -> None:
        """Make the copy written by an out-of-place update the state."""
        # Copies no byte: operations launched so far keep their views, later ones use the other
        # copy.
        bucket.copy = 1 - bucket.copy
        self._order.operations.append(Swap(bucket.name))

    def upload(self, block: str, buckets: Iterable[tuple[BucketRefs, Ref]]) -> None:
        """Transfer a block's new weights to the memory that compute or its loads read. Graphs over
        the old weights become stale."""
        renewed = False
        # `buckets` may be lazy: each upload is launched before the next bucket's Adam, which may
        # reuse its ring slot and then waits for it.
        for bucket, staged in buckets:
            self._upload(bucket, staged)
            renewed = renewed or not bucket.updates_other_version
        if renewed:
            self._order.operations.append(Renew(block))
            # A slot still holds the old weights: the next use must load the new ones.
            if self._streaming.slots:
                self._streaming.drop(block)

    def enter_version(self, blocks: Iterable[BlockRefs], by: int) -> None:
        """Let parameters be the version of the weights that compute reads from here on; `by`: see
        `Renew`."""
        for block, buckets in (entry for entry in blocks if entry[1]):
            if self._streaming.loads(block):
                # A slot holds the version that was loaded: the next use loads the other.
                self._streaming.drop(block)
            else:
                self._order.operations.append(Enter(block, buckets[0].version))
            self._order.operations.append(Renew(block, by))

    def switch_version(self, bucket: BucketRefs) -> None:
        """Compute, or its loads, read the other of two versions of the weights from here on."""
        bucket.version = 1 - bucket.version
        if bucket.sources:
            self._order.operations.append(Flip(bucket.name))

    def publish_weights(self, bucket: BucketRefs) -> None:
        """Compute, or its loads, read the new weights from here on."""
        before, bucket.version = bucket.version, bucket.newest_version
        bucket.updates_other_version = False
        if bucket.version != before and bucket.sources:
            self._order.operations.append(Flip(bucket.name))

    def emit(self, blocks: Sequence[BlockRefs]) -> None:
        """Upload the present masters, after they were set or loaded."""
        event = self.end_backward(blocks)
        # The caller set masters on the device on compute, which no launch declares: the
        # cast on another lane would read them too early.
        if any(bucket.lane is Lane.UPDATE for _, buckets in blocks for bucket in buckets):
            self._order.wait(Lane.UPDATE, event, "masters are set")
        for block, buckets in blocks:
            # No launch declares the allocation of shards on compute either, which may be new.
            shards = [b.upload_target for b in buckets if b.source_kind is Memory.DEVICE_SHARD]
            self._order.was_read(shards, event)
            self.upload(block, ((bucket, self._cast(bucket)) for bucket in buckets))
            # A block without trained buckets uploads nothing, but its frozen weights may be new.
            self._streaming.drop(block)

    def defer(self, blocks: Sequence[BlockRefs]) -> dict[str, list[tuple[BucketRefs, Ref]]]:
        """Round the masters and leave the result on the host: the caller has set other weights in
        the memory that compute or loads read. Return block → memory of the pending weights."""
        self.renew_weights_in_use(blocks)
        return {block: [(bucket, self._cast(bucket)) for bucket in some] for block, some in blocks}

    def renew_weights_in_use(self, blocks: Sequence[BlockRefs]) -> None:
        """The caller has written the weights that compute or loads read."""
        # The caller wrote on compute, which no launch declares: collectives wait for it.
        self.end_backward(blocks)
        for block, buckets in blocks:
            for bucket in buckets:
                self._gather(bucket)
            self._order.operations.append(Renew(block))
            # A slot still holds the previous weights.
            self._streaming.drop(block)

    def end_backward(self, blocks: Iterable[BlockRefs]) -> Event:
        """Compute has read these weights for the last time before their upload."""
        # The user's backward is no launch: this event represents its reads. Uploads wait for it, or
        # they would overwrite weights that backward reads. Streamed blocks: see `Streaming.drop`.
        event = self._order.record(Lane.COMPUTE, "backward")
        buckets = (bucket for _, buckets in blocks for bucket in buckets)
        self._order.was_read([b.newest for b in buckets if not b.sources], event)
        return event

    def _upload(self, bucket: BucketRefs, staged: Ref) -> None:
        match bucket.weight_route:
            case WeightRoute.FILE:
                # Written after its Adam. Loads launched so far read the previous version, or, with
                # a single version, the last written weights.
                if len(bucket.sources) > 1:
                    self.switch_version(bucket)
            case WeightRoute.IN_TURN:
                # Loads read the staged weights themselves and wait for Adam.
                if not bucket.updates_other_version:
                    self.publish_weights(bucket)
            case WeightRoute.SNAPSHOT:
                # Host, after its Adam: waits for loads in flight of the old snapshot.
                snapshot = bucket.ref(Memory.SNAPSHOT)
                self.launch(Kind.PUBLISH, Lane.HOST, bucket, staged, snapshot)
            case WeightRoute.ON_DEVICE:
                # update, during compute: waits for backward's last read of the old weights.
                if staged != bucket.upload_target:
                    self.launch(Kind.COPY, Lane.UPDATE, bucket, staged, bucket.upload_target)
                self._gather(bucket)
            case WeightRoute.UPLOAD:
                # h2d, during Adam of the next bucket and forward of the previous blocks: forward
                # waits only for its own block. The next copy of gradients waits until the staged
                # weights are read.
                self.launch(Kind.WEIGHTS_UP, Lane.H2D, bucket, staged, bucket.upload_target)
                self._gather(bucket)

    def _gather(self, bucket: BucketRefs) -> None:
        """Launch the all-gather of a bucket's shards, if each rank stores the full weights."""
        if bucket.spec.ranks > 1 and not bucket.sources:
            # comm, during the upload of the next bucket: waits for its own upload; compute
            # waits for it instead of the upload.
            self._order.launch(
                Launch(Kind.ALL_GATHER, Lane.COMM, bucket.name, writes=(bucket.newest,))
            )

    def _staged(self, bucket: BucketRefs, *, other: bool = False) -> Ref:
        """Return the memory for new weights until their upload: the state itself, memory reserved
        for them, the gradient's memory, a slot of a ring, or their final memory."""
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
            # Host, during the upload of the previous bucket, which waits only for its own cast.
            self._order.launch(
                Launch(Kind.CAST, bucket.lane, bucket.name, (bucket.state()[0],), (staged,)),
                fresh=_in_turn(staged),
            )
        self._keep_weight(bucket, staged)
        return staged

    def launch(self, kind: Kind, lane: Lane, bucket: BucketRefs, read: Ref, written: Ref) -> None:
        # Comments at the callers say when it runs and what waits for it.
        self._order.launch(Launch(kind, lane, bucket.name, (read,), (written,)))


def _in_turn(staged: Ref) -> Ref | None:
    """Return a ring slot, whose old contents are undefined; None for other memory."""
    return staged if staged.memory in (Memory.HOST_STAGING, Memory.NEW_WEIGHTS) else None


class Exact:
    """Adam when the norm is known."""

    waits_for_norm = True
    """True if the gradient can still be clipped after backward."""
    updates_in_backward = False
    """True if Adam may run before the norm is known."""
    follows_backward = False
    """True if `grads_complete` launches operations."""
    waiting: Collection[str] = ()
    """Blocks updated and not uploaded between two steps."""

    def __init__(self, updates: UpdatePath) -> None:
        self._updates = updates
        self.waiting_for_graphs: list[str] = []
        """Blocks whose new weights are uploaded once no graph needs the old ones: see
        `Program.graph_freed`. Always the same list object."""
        self.version = 0
        """The version of the weights that compute reads, if there are two."""
        self._staged: dict[BucketRefs, Ref] = {}
        """Updated bucket without upload → memory of its new weights."""

    def grads_complete(self, block: BlockRefs, early: Decision) -> None:
        """Inside backward: the block's gradient of the step is complete and being copied to the
        host.

        `early`: the decision if nothing is clipped or skipped.
        """

    def grads_repeated(self, block: BlockRefs) -> None:
        """A gradient arrived for a block whose gradient was complete."""

    def gradients_changed(self) -> None:
        """The caller has changed gradients of the step."""

    def graph_freed(self, block: str) -> None:
        """No graph needs the weights of a block that is `waiting_for_graphs`."""

    def apply(self, order: Sequence[BlockRefs], decision: Decision) -> Speculation:
        """In step(): launch the rest of the update, and the uploads in forward order."""
        if not decision.skipped:
            self._apply(order, decision)
            self._updates.read_ahead(order)
        return Speculation()

    def drop(self) -> None:
        """Drop the gradients of a step that is not decided."""

    def before_masters_change(self) -> None:
        """Prepare for masters that the caller sets, possibly between backward and step().

        Raises:
            UpdateError: Adam has updated the old ones and cannot run again.
        """

    def flush(self) -> None:
        """Between steps: upload pending weights, so that the device has the newest weights."""

    def reset(self) -> None:
        """Forget earlier updates: the complete state was set or loaded."""

    def speculate(self, *, enabled: bool) -> bool:
        """In mode "speculative", between steps: allow guesses, or update as Exact does, with the
        same bits. Returns whether the next step guesses."""
        return False

    def take_over(self, previous: Exact) -> None:
        """Adopt the setting of `speculate` from the mode of the previous layout."""

    def switch_version(self, *, to_previous: bool) -> None:
        """With two versions of the weights: let compute read the previous one or the newest."""
        raise UpdateError("there is one version of the weights")

    def detach_weights(self, order: Sequence[BlockRefs]) -> None:
        """Prepare for weights that the caller sets separately from the state."""

    def defer(self, order: Sequence[BlockRefs]) -> None:
        """In mode "delayed": let loaded masters stay pending, as they were when they were saved."""
        raise UpdateError("new weights wait in update mode 'delayed' only")

    def verify(self) -> None:
        """At the end of step(): raise an error that would have interrupted the step earlier.

        Raises:
            UpdateError: updates inside backward used other hyperparameters than step().
        """

    def _apply(self, order: Sequence[BlockRefs], decision: Decision) -> None:
        # Recorded before the first upload, so that uploads wait for this backward and not for the
        # next forward, which runs during them.
        self._updates.end_backward(order)
        # Forward order: the next forward begins after the first block's upload, while Adam of the
        # later blocks still runs.
        for name, buckets in self._ahead(order, decision):
            self._updates.upload(name, self._updated(buckets, decision))

    def _ahead(self, order: Sequence[BlockRefs], decision: Decision) -> Iterator[BlockRefs]:
        """Yield each block once its update and that of the next block have begun: the device
        orthogonalizes matrices of one block while the host updates the other."""
        for number, block in enumerate(order):
            for _, buckets in order[number + 1 if number else 0 : number + 2]:
                for bucket in buckets:
                    self._updates.begin(bucket, decision.update)
            yield block

    def _updated(
        self, buckets: Iterable[BucketRefs], decision: Decision
    ) -> Iterator[tuple[BucketRefs, Ref]]:
        for bucket in buckets:
            staged = self._staged.pop(bucket, None)
            yield bucket, staged or self._updates.adam(bucket, decision.update)


class Early(Exact):
    """Adam inside backward, in place, for steps that cannot be skipped or clipped."""

    waits_for_norm = False
    updates_in_backward = follows_backward = True

    def __init__(self, updates: UpdatePath) -> None:
        super().__init__(updates)
        self._used: object = None
        self._outdated = False
        self._lost = False

    def grads_complete(self, block: BlockRefs, early: Decision) -> None:
        self._require_intact()
        self._used = self._used or early.hyperparameters
        # Adam runs during backward of the next blocks. Its weights wait on the host until step():
        # an evaluation before it must see the old weights on the device.
        # Matrices and experts are updated in step().
        for bucket in block[1]:
            if not (bucket.spec.matrices or bucket.spec.experts):
                self._staged[bucket] = self._updates.adam(bucket, early.update)

    def grads_repeated(self, block: BlockRefs) -> None:
        if any(bucket in self._staged for bucket in block[1]):
            self._lost = True
            raise UpdateError(
                f"block '{block[0]}' received another gradient after its update ran: with "
                "skip_nonfinite = False and no clip_norm, Adam runs inside backward, and a step "
                "has exactly grad_accum_steps backward passes. Sum the losses before backward(), "
                "or set skip_nonfinite = True"
            )

    def gradients_changed(self) -> None:
        raise UpdateError("gradients were changed after Adam has run inside backward")

    def apply(self, order: Sequence[BlockRefs], decision: Decision) -> Speculation:
        self._require_intact()
        used, self._used = self._used, None
        early = len(self._staged)
        # Raised by `verify` once the step is complete: Adam in place cannot be undone.
        self._outdated = bool(used) and used != decision.hyperparameters
        self._apply(order, decision)
        return Speculation(buckets=early)

    def verify(self) -> None:
        if self._outdated:
            self._outdated = False
            raise UpdateError(
                "hyperparameters changed between backward and step(), but Adam ran inside backward "
                "with the old ones (the step is done). Set them before backward, or set "
                "skip_nonfinite = True"
            )

    def drop(self) -> None:
        self._used = None
        self._lost = self._lost or bool(self._staged)

    def before_masters_change(self) -> None:
        # After a dropped step, the load of a checkpoint repairs the state; it sets masters.
        if self._staged and not self._lost:
            raise UpdateError(
                "weights or moments are set between backward and step(), after Adam has run inside "
                "backward: set them before backward or after step(), state by reset_state(), or "
                "set skip_nonfinite = True"
            )

    def reset(self) -> None:
        self._staged.clear()
        self._used = None
        self._lost = False

    def _require_intact(self) -> None:
        if self._lost:
            raise UpdateError(
                "a step was dropped after Adam of some blocks ran inside its backward: the state "
                "is between two steps. Load a checkpoint, or set skip_nonfinite = True, which "
                "never updates before the step is certain"
            )


class SpeculationPolicy:
    """Speculates as long as at least half of the recent guesses were, or would have been, right.

    A right guess hides as much Adam as a wrong guess wastes, so speculation pays above one half.
    """

    WINDOW = 8

    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=self.WINDOW)
        self.is_enabled = True

    def should_speculate(self) -> bool:
        return self.is_enabled and 2 * sum(self._recent) >= len(self._recent)

    def is_mostly_wrong(self) -> bool:
        return self.is_enabled and len(self._recent) == self.WINDOW and not self.should_speculate()

    def add_outcome(self, right: bool) -> None:
        self._recent.append(right)


class Speculative(Exact):
    """Adam inside backward into the second copy of the state, for buckets that have one."""

    updates_in_backward = follows_backward = True

    def __init__(self, updates: UpdatePath) -> None:
        super().__init__(updates)
        self._policy = SpeculationPolicy()
        self._used: object = None

    def speculate(self, *, enabled: bool) -> bool:
        self._policy.is_enabled = enabled
        return self._policy.should_speculate()

    def take_over(self, previous: Exact) -> None:
        if isinstance(previous, Speculative):
            self._policy.is_enabled = previous._policy.is_enabled

    def grads_complete(self, block: BlockRefs, early: Decision) -> None:
        if not self._policy.should_speculate():
            return
        self._used = self._used or early.hyperparameters
        update = Update(early.step, early.update.grad_scale, out_of_place=True)
        # During backward of the next blocks, into the second copy: state and gradient do not
        # change, in case the update must be repeated.
        for bucket in block[1]:
            if bucket.has_second_copy:
                self._staged[bucket] = self._updates.adam(bucket, update)

    def grads_repeated(self, block: BlockRefs) -> None:
        for bucket in block[1]:
            self._staged.pop(bucket, None)

    def gradients_changed(self) -> None:
        # The guess was made for the unchanged gradients.
        self.drop()

    def apply(self, order: Sequence[BlockRefs], decision: Decision) -> Speculation:
        unclipped = not decision.skipped and decision.coef == 1.0
        self._policy.add_outcome(unclipped)
        right = unclipped and (not self._used or self._used == decision.hyperparameters)
        guessed = len(self._staged)
        # Right: the second copy becomes the state, and only uploads remain. Wrong: it is discarded,
        # and every bucket is updated below, after these updates on the host lane.
        if right:
            for bucket in self._staged:
                self._updates.swap(bucket)
        else:
            self._staged.clear()
        self._used = None
        super().apply(order, decision)
        return Speculation(
            guessed, right if guessed else None, mostly_wrong=self._policy.is_mostly_wrong()
        )

    def drop(self) -> None:
        self._used = None
        self._staged.clear()

    def before_masters_change(self) -> None:
        # The guess updated the old masters. The step updates the new ones, from the state and the
        # gradient, which are unchanged.
        self.drop()


class Delayed(Exact):
    """Adam during the next step: one step of staleness, after `warmup_steps` exact steps.

    On a single rank, weights are uploaded as soon as no graph needs the old ones. That depends on
    when the user frees a graph. Ranks must gather weights in the same order, so several ranks
    upload them at the next step().
    """

    follows_backward = True

    def __init__(self, updates: UpdatePath, warmup_steps: int, *, alone: bool) -> None:
        super().__init__(updates)
        self._warmup_steps = warmup_steps
        self._is_single = alone
        self.waiting: dict[str, list[tuple[BucketRefs, Ref]]] = {}  # last block of forward first
        self._begun = False
        """Some blocks have their new weights while backward goes on."""

    def grads_complete(self, block: BlockRefs, early: Decision) -> None:
        if block[0] in self.waiting and self._is_single:
            self.waiting_for_graphs.append(block[0])

    def graph_freed(self, block: str) -> None:
        self.waiting_for_graphs.remove(block)
        self._begun = True
        # h2d, during backward of the next blocks. Compute reads this block again in the next
        # forward.
        self._upload([block])

    def apply(self, order: Sequence[BlockRefs], decision: Decision) -> Speculation:
        self.flush()
        if decision.step <= self._warmup_steps:
            return super().apply(order, decision)
        # Adam runs during the next forward and backward. Last block first: the next backward's
        # copies to the host reuse the gradients' memory in that order, and wait until Adam has read
        # it.
        if not decision.skipped:
            for name, buckets in self._ahead([*reversed(order)], decision):
                self.waiting[name] = list(self._updated(buckets, decision))
        return Speculation()

    def drop(self) -> None:
        """Upload the new weights of all blocks if some blocks have theirs already."""
        self.waiting_for_graphs.clear()
        if self._begun:
            self.flush()

    def defer(self, order: Sequence[BlockRefs]) -> None:
        # Last block first, as in `apply`.
        self.waiting = dict(reversed(self._updates.defer(order).items()))

    def flush(self) -> None:
        self.waiting_for_graphs.clear()
        self._begun = False
        # Forward order: the next forward waits for the first block's upload first.
        self._upload(list(reversed(self.waiting)))

    def _upload(self, blocks: Sequence[str]) -> None:
        """Upload the updated weights of these blocks, whose old weights no graph needs."""
        ended = [(name, [bucket for bucket, _ in self.waiting[name]]) for name in blocks]
        # The uploads wait until compute has read the old weights.
        self._updates.end_backward(ended)
        for name in blocks:
            self._updates.upload(name, self.waiting.pop(name))
