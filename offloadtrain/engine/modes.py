"""Update modes: when Adam of a bucket runs, and when its weights go back to the device.

[Note: Update modes]
    Exact        Adam when the norm is known: block after block in forward order, each block's
                 upload beside the next block's Adam and the next forward
    Early        nothing global must be known (no clipping, no loss scaling, no skipping): Adam of
                 a bucket runs as soon as its gradient is on the host, inside backward
    Speculative  Adam runs inside backward on the guess "no clipping, no overflow", into the other
                 copy of the state. A right guess makes the other copy the state; a wrong one
                 forgets it and updates as Exact does. The bits are those of Exact in any case
    Delayed      Adam of step t runs during step t+1; its weights go up behind each block's
                 backward of step t+1: W(t+1) = W(t) - update of the gradient at W(t-1)

In the first three no weight on the device changes before `step()`, so that nothing a user runs
between backward and step sees other weights than in a resident run, and a wrong guess uploads
nothing twice. No update runs inside the first backward: it shows which blocks deliver as expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket
from offloadtrain.engine.ring import Lease
from offloadtrain.engine.update import Updates
from offloadtrain.errors import OffloadTrainError
from offloadtrain.transfer import Event, Lane, Lanes


class UpdateError(OffloadTrainError):
    """An update ran inside backward that cannot be undone and should not have."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the norm of a step has decided.

    Attributes:
        step: which optimizer step this is, 1-based; where it is skipped, which one it would be.
        coef: the clip coefficient, 1.0 for none.
        scale: the loss scale that the gradients carry.
        ranks: whose mean the gradient is; the sum over them arrives.
    """

    step: int
    skipped: bool
    coef: float
    scale: float
    ranks: int

    @property
    def grad_scale(self) -> float:
        return self.coef / (self.scale * self.ranks)


@dataclass(frozen=True, slots=True)
class Guess:
    """How an update that ran inside backward has turned out.

    Attributes:
        buckets: updated inside backward.
        right: None where nothing was guessed.
    """

    buckets: int = 0
    right: bool | None = None


class Exact:
    """Adam when the norm is known."""

    waits_for_norm = True
    """Whether the gradient can still be clipped after backward."""

    def __init__(self, lanes: Lanes, updates: Updates) -> None:
        self._lanes = lanes
        self._updates = updates
        self._staged: dict[Bucket, Lease] = {}
        """Updated already, and not uploaded."""

    def completed(self, block: Block, *, step: int, scale: float) -> None:
        """Inside backward: the step's gradient of the block is whole, and launched to the host.

        `scale`: what the gradient has to be divided by.
        """

    def spoiled(self, block: Block) -> None:
        """A gradient arrived for a block whose gradient was complete."""

    def settle(self) -> None:
        """Inside backward, now and then: a moment to look what can be done."""

    def apply(self, order: Sequence[Block], decision: Decision) -> Guess:
        """In step(): launch what is left of the update and the uploads, in forward order."""
        if not decision.skipped:
            self._apply(order, decision)
        return Guess()

    def drop(self) -> None:
        """The gradients of the step are dropped before it was decided."""

    def flush(self) -> None:
        """Between steps: upload what waits, so that the device has the newest weights."""

    def renewed(self) -> None:
        """The whole state was set or loaded: what went before it does not matter any more."""

    def verify(self) -> None:
        """At the end of step(): raise what would have left the step half done before."""

    def _apply(self, order: Sequence[Block], decision: Decision) -> None:
        read = self._lanes.record(Lane.COMPUTE)
        for block in order:
            for bucket in block.buckets:
                staged = self._staged.pop(bucket, None) or self._updates.adam(
                    bucket, step=decision.step, grad_scale=decision.grad_scale
                )
                self._updates.upload(bucket, staged, read)
            self._updates.uploaded(block)


class Early(Exact):
    """Adam inside backward, in place: for steps that nothing can stop."""

    waits_for_norm = False

    def __init__(self, lanes: Lanes, updates: Updates) -> None:
        super().__init__(lanes, updates)
        self._used: list[dict[str, Any]] = []
        self._outdated = False
        self._lost = False

    def completed(self, block: Block, *, step: int, scale: float) -> None:
        self._require_whole()
        self._used = self._used or self._updates.hyperparameters()
        for bucket in block.buckets:
            self._staged[bucket] = self._updates.adam(bucket, step=step, grad_scale=1.0 / scale)

    def spoiled(self, block: Block) -> None:
        if any(bucket in self._staged for bucket in block.buckets):
            self._lost = True
            raise UpdateError(
                f"block '{block.name}' received another gradient after its update ran: with "
                "skip_nonfinite = False and no clip_norm, Adam runs inside backward, and a step "
                "has exactly grad_accum_steps backward passes. Sum the losses before backward(), "
                "or set skip_nonfinite = True"
            )

    def apply(self, order: Sequence[Block], decision: Decision) -> Guess:
        self._require_whole()
        used, self._used = self._used, []
        early = len(self._staged)
        self._outdated = bool(used) and used != self._updates.hyperparameters()
        self._apply(order, decision)
        return Guess(buckets=early)

    def verify(self) -> None:
        if self._outdated:
            self._outdated = False
            raise UpdateError(
                "hyperparameters changed between backward and step(), but Adam ran inside backward "
                "with the old ones (the step is done). Set them before backward, or set "
                "skip_nonfinite = True"
            )

    def drop(self) -> None:
        self._used = []
        self._lost = self._lost or bool(self._staged)

    def renewed(self) -> None:
        self._staged.clear()
        self._used = []
        self._lost = False

    def _require_whole(self) -> None:
        if self._lost:
            raise UpdateError(
                "a step was dropped after Adam of some blocks ran inside its backward: the state "
                "is between two steps. Load a checkpoint, or set skip_nonfinite = True, which "
                "never updates before the step is certain"
            )


class Odds:
    """Whether to guess again: as long as half of the last guesses were, or would have been, right.

    A right guess hides the Adam that a wrong one wastes, so that half is where it begins to pay.
    """

    WINDOW = 8

    def __init__(self) -> None:
        self._seen: deque[bool] = deque(maxlen=self.WINDOW)

    def good(self) -> bool:
        return 2 * sum(self._seen) >= len(self._seen)

    def saw(self, right: bool) -> None:
        self._seen.append(right)


class Speculative(Exact):
    """Adam inside backward into the other copy of the state, where a bucket has one."""

    def __init__(self, lanes: Lanes, updates: Updates) -> None:
        super().__init__(lanes, updates)
        self._odds = Odds()
        self._used: list[dict[str, Any]] = []

    def completed(self, block: Block, *, step: int, scale: float) -> None:
        if not self._odds.good():
            return
        self._used = self._used or self._updates.hyperparameters()
        for bucket in block.buckets:
            if bucket.other:
                self._staged[bucket] = self._updates.adam(
                    bucket, step=step, grad_scale=1.0 / scale, beside=True
                )

    def spoiled(self, block: Block) -> None:
        for bucket in block.buckets:
            self._staged.pop(bucket, None)

    def apply(self, order: Sequence[Block], decision: Decision) -> Guess:
        unclipped = not decision.skipped and decision.coef == 1.0
        self._odds.saw(unclipped)
        right = unclipped and (not self._used or self._used == self._updates.hyperparameters())
        guessed = len(self._staged)
        if right:
            for bucket in self._staged:
                bucket.flip()
        else:
            self._staged.clear()
        self._used = []
        super().apply(order, decision)
        return Guess(guessed, right if guessed else None)

    def drop(self) -> None:
        self._used = []
        self._staged.clear()


class Delayed(Exact):
    """Adam during the next step: one step of staleness, after `warmup_steps` exact ones.

    Alone, weights go up as soon as no graph needs the old ones. When that is depends on who lets go
    of a graph when, and ranks must gather weights in one order: so among ranks they go up at the
    next step().
    """

    def __init__(
        self, lanes: Lanes, updates: Updates, warmup_steps: int, *, alone: bool = True
    ) -> None:
        super().__init__(lanes, updates)
        self._warmup_steps = warmup_steps
        self._alone = alone
        self._waiting: dict[Block, list[tuple[Bucket, Lease]]] = {}
        self._behind: list[Block] = []
        """Complete in this backward, with an update of the last step that waits."""
        self._begun = False
        """Some blocks have their new weights, and the backward goes on."""

    def completed(self, block: Block, *, step: int, scale: float) -> None:
        if block in self._waiting and self._alone:
            self._behind.append(block)
        self.settle()

    def settle(self) -> None:
        """Upload to the blocks whose weights no graph needs any more."""
        quiet = [block for block in self._behind if block.quiet]
        for block in quiet:
            self._behind.remove(block)
            self._begun = True
            self._upload(block, self._lanes.record(Lane.COMPUTE))

    def apply(self, order: Sequence[Block], decision: Decision) -> Guess:
        self.flush()
        if decision.step <= self._warmup_steps:
            return super().apply(order, decision)
        if not decision.skipped:
            for block in reversed(order):  # as the next backward needs their gradients' memory
                self._waiting[block] = [
                    (bucket, self._update(bucket, decision)) for bucket in block.buckets
                ]
        return Guess()

    def drop(self) -> None:
        """Some blocks may have their new weights already: give all of them theirs."""
        if self._begun:
            self.flush()

    def flush(self) -> None:
        self._behind.clear()
        self._begun = False
        read = self._lanes.record(Lane.COMPUTE)
        for block in reversed(list(self._waiting)):  # in forward order
            self._upload(block, read)

    def _update(self, bucket: Bucket, decision: Decision) -> Lease:
        return self._updates.adam(bucket, step=decision.step, grad_scale=decision.grad_scale)

    def _upload(self, block: Block, read: Event) -> None:
        for bucket, staged in self._waiting.pop(block):
            self._updates.upload(bucket, staged, read)
        self._updates.uploaded(block)
