"""Update modes: when Adam of a bucket runs, and when its weights go back to the device.

[Note: Update modes]
    Exact        Adam runs when the norm is known, block after block in forward order. Each block
                 is uploaded during the next block's Adam and the next forward
    Early        if no global value is needed (no clipping, loss scaling or skipping), Adam of a
                 bucket runs inside backward, as soon as its gradient is on the host
    Speculative  Adam runs inside backward on the guess "no clipping, no overflow" and writes the
                 second copy of the state. If the guess is right, that copy becomes the state;
                 otherwise it is discarded and the update runs as in Exact, with the same bits
    Delayed      Adam of step t runs during step t+1; its weights go up after each block's
                 backward of step t+1: W(t+1) = W(t) - update of the gradient at W(t-1)

`StepSpec.update_policy` adds another mode.

In the first three modes no weight on the device changes before `step()`: code between backward and
step() sees the weights of a resident run, and a wrong guess uploads nothing twice. No update runs
inside the first backward, which shows whether blocks deliver their gradients once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.step.program.operations import Ref, Update
from offloadtrain.step.program.places import BlockRefs, BucketRefs
from offloadtrain.step.program.updates import UpdatePath


class UpdateError(OffloadTrainError):
    """An update ran inside backward that cannot be undone and should not have."""


class Decision(NamedTuple):
    """The decision about a step: whether to update, and with which coefficients.

    Attributes:
        step: the number of this optimizer step, 1-based, even if it is skipped.
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
        buckets: the number of buckets updated inside backward.
        right: whether the guess was right; None without speculation.
        mostly_wrong: guesses about most of the last steps were, or would have been, wrong.
    """

    buckets: int = 0
    right: bool | None = None
    mostly_wrong: bool = False


class Exact:
    """Adam when the norm is known."""

    waits_for_norm = True
    """The gradient can still be clipped after backward."""
    updates_in_backward = False
    """Adam may run before the norm is known."""
    follows_backward = False
    """`grads_complete` launches operations."""
    waiting: Collection[str] = ()
    """Blocks updated and not uploaded between two steps."""

    def __init__(self, updates: UpdatePath) -> None:
        self._updates = updates
        self.waiting_for_graphs: list[str] = []
        """Blocks whose new weights are uploaded once no graph needs the old ones: see
        `Program.graph_freed`. Always the same list."""
        self.version = 0
        """The version of the weights that compute reads, if there are two."""
        self._staged: dict[BucketRefs, Ref] = {}
        """Bucket that was updated and not uploaded → where its new weights wait."""

    def grads_complete(self, block: BlockRefs, early: Decision) -> None:
        """Inside backward: the block's gradient of the step is complete and on its way to the host.

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
            self._updates.is_over(order)
        return Speculation()

    def drop(self) -> None:
        """Drop the gradients of a step that is not decided."""

    def before_masters_change(self) -> None:
        """Prepare for masters that the caller sets, possibly between backward and step().

        Raises:
            UpdateError: Adam has updated the old ones and cannot run again.
        """

    def flush(self) -> None:
        """Between steps: upload waiting weights, so that the device has the newest ones."""

    def reset(self) -> None:
        """Forget earlier updates: the whole state was set or loaded."""

    def speculate(self, *, enabled: bool) -> bool:
        """In mode "speculative", between steps: allow guesses, or update as Exact does, with the
        same bits. Returns whether the next step guesses."""
        return False

    def take_over(self, other: Exact) -> None:
        """Go on as `speculate` has set the mode of the layout before this one."""

    def switch_version(self, *, to_previous: bool) -> None:
        """With two versions of the weights: let compute read the previous one or the newest."""
        raise UpdateError("there is one version of the weights")

    def detach_weights(self, order: Sequence[BlockRefs]) -> None:
        """Prepare for weights that the caller sets apart from the state."""

    def defer(self, order: Sequence[BlockRefs]) -> None:
        """In mode "delayed": let loaded masters wait as they did when they were saved."""
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
        for number, (block, following) in enumerate(zip_longest(order, order[1:])):
            for _, buckets in [*([block] if number == 0 else []), *filter(None, [following])]:
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
        # an evaluation before it must see the old ones on the device.
        # Matrices and experts are updated in step().
        for bucket in block[1]:
            if not bucket.waits_for_step:
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
        # Raised by `verify` once the step is done: Adam in place cannot be undone.
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
        # A step that was dropped is mended by the load of a checkpoint, which sets masters.
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

    A right guess hides as much Adam as a wrong one wastes, so speculation pays above one half.
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

    def take_over(self, other: Exact) -> None:
        if isinstance(other, Speculative):
            self._policy.is_enabled = other._policy.is_enabled

    def grads_complete(self, block: BlockRefs, early: Decision) -> None:
        if not self._policy.should_speculate():
            return
        self._used = self._used or early.hyperparameters
        update = Update(early.step, early.update.grad_scale, out_of_place=True)
        # During backward of the next blocks, into the second copy: state and gradient stay as they
        # are, in case the update must be repeated.
        for bucket in block[1]:
            if bucket.has_second_copy:
                self._staged[bucket] = self._updates.adam(bucket, update)

    def grads_repeated(self, block: BlockRefs) -> None:
        for bucket in block[1]:
            self._staged.pop(bucket, None)

    def gradients_changed(self) -> None:
        # The guess was made for the gradients as they were.
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
    """Adam during the next step: one step of staleness, after `warmup_steps` exact ones.

    On a single rank, weights go up as soon as no graph needs the old ones. That depends on when the
    user frees a graph. Ranks must gather weights in one order, so several ranks upload them at the
    next step().
    """

    follows_backward = True

    def __init__(self, updates: UpdatePath, warmup_steps: int, *, alone: bool) -> None:
        super().__init__(updates)
        self._warmup_steps = warmup_steps
        self._is_single = alone
        self.waiting: dict[str, list[tuple[BucketRefs, Ref]]] = {}  # the forward's last one first
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
        # copies down reuse the gradients' memory in that order, and wait until Adam has read it.
        if not decision.skipped:
            for name, buckets in self._ahead([*reversed(order)], decision):
                self.waiting[name] = list(self._updated(buckets, decision))
        return Speculation()

    def drop(self) -> None:
        """Give all blocks their new weights, as some may have theirs already."""
        self.waiting_for_graphs.clear()
        if self._begun:
            self.flush()

    def defer(self, order: Sequence[BlockRefs]) -> None:
        # Last block first, as `apply` leaves them.
        self.waiting = dict(reversed(self._updates.defer(order).items()))

    def flush(self) -> None:
        self.waiting_for_graphs.clear()
        self._begun = False
        # Forward order: the next forward waits for the first block's upload first.
        self._upload(list(reversed(self.waiting)))

    def _upload(self, blocks: Sequence[str]) -> None:
        """Upload the updated weights of these blocks, which no graph needs the old ones of."""
        ended = [(name, [bucket for bucket, _ in self.waiting[name]]) for name in blocks]
        # The uploads wait until compute has read the old weights.
        self._updates.end_backward(ended)
        for name in blocks:
            self._updates.upload(name, self.waiting.pop(name))
