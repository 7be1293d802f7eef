"""Finish on the host, after the device has failed, the updates that were decided.

[Note: Salvage]
A step is decided when its norm is known: by then all of its gradients are on the host, and what is
left is Adam, bucket by bucket, on the host. The device is not needed for it. So after a failure the
state on the host is that of a whole step, or can be made so:

    before the decision   the updates of the step before are finished; the step itself is given up
    after the decision   its own updates are finished as well
    neither               only where Adam has run in place inside backward (`updates_early`), before
                          all gradients were there: that state is between two steps; or where
                          matrices of a decided step were not orthogonalized, which the device does

The journal holds each launch of Adam until the host lane is known to have run it. What was launched
and did not run is run with the same operands and hyperparameters by the thread that salvages. What
was decided and not launched is run after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.runtime.lanes import HostProgress
from offloadtrain.step.program.operations import Kind, Launch, Operation, Swap

Call = Callable[[], object]


class SalvageError(OffloadTrainError):
    """The state on the host is not that of a whole step, and cannot be made so."""


@dataclass(slots=True)
class _Adam:
    """One launch of Adam.

    Attributes:
        number: its place among the operations of the host lane, 1-based.
        run: calls it with its operands.
        decided: the state takes it: in place, its step is decided; out of place, the copies of the
            state are swapped.
    """

    bucket: str
    number: int
    run: Call
    in_place: bool
    decided: bool

    def is_over(self, ended: int) -> bool:
        """Tell whether it has run, and nothing can make a difference any more."""
        return self.number <= ended and (self.decided or not self.in_place)


class UpdateJournal:
    """The launches of Adam that the host lane may not have run yet, in their order."""

    def __init__(self) -> None:
        self._open: deque[_Adam] = deque()
        self._left: Sequence[Operation] = ()
        self._of_matrices: set[str] = set()
        """Buckets whose Adam needs what the device has computed."""

    def needs_device(self, bucket: str) -> None:
        """The bucket's Adam comes after the device's part of its update."""
        self._of_matrices.add(bucket)

    def launches(self, op: Launch, run: Call, progress: HostProgress, *, decided: bool) -> None:
        """Adam is about to be launched on the host lane.

        Args:
            decided: its step is.
        """
        assert op.update is not None
        # In order: what is after one that has not run has not run either.
        while self._open and self._open[0].is_over(progress.ended):
            self._open.popleft()
        in_place = not op.update.out_of_place
        number = progress.launched + 1
        self._open.append(_Adam(op.owner, number, run, in_place, decided and in_place))

    def decide(self) -> None:
        """The step is decided: what has run in place inside its backward counts."""
        for update in self._open:
            update.decided = update.decided or update.in_place

    def swapped(self, bucket: str) -> None:
        """The last update into the other copy of the bucket's state becomes its state."""
        for update in reversed(self._open):
            if update.bucket == bucket and not update.in_place:
                update.decided = True
                return

    def forget(self) -> None:
        """The lanes are empty, and the whole state was set anew."""
        self._open.clear()

    def cut(self, left: Sequence[Operation]) -> None:
        """These operations of a decided step will not be launched."""
        self._left = left

    def finish(
        self, progress: HostProgress, call_of: Callable[[Launch], Call], swap: Callable[[str], None]
    ) -> None:
        """Run the updates that were decided and have not run. The host lane has stopped for good.

        Args:
            call_of: makes the call of a launch.
            swap: makes the other copy of a bucket's state the state.

        Raises:
            SalvageError: nothing was run.
        """
        self._check(progress)
        remaining: list[Call] = []
        for op in self._left:
            if isinstance(op, Swap):
                self.swapped(op.bucket)
                swap(op.bucket)
            elif isinstance(op, Launch) and op.kind is Kind.ADAM:
                remaining.append(call_of(op))
        missing = [
            update.run for update in self._open if update.decided and update.number > progress.ended
        ]
        for run in (*missing, *remaining):
            run()
        self._open.clear()
        self._left = ()

    def _check(self, progress: HostProgress) -> None:
        in_place = [update for update in self._open if update.in_place]
        early = [
            update for update in in_place if not update.decided and update.number <= progress.begun
        ]
        if early:
            raise SalvageError(
                f"Adam of {len(early)} buckets ran inside a backward that did not end: the state "
                "is between two steps. With offload.skip_nonfinite = true no update runs before "
                "all gradients of its step are on the host"
            )
        pending = [
            update.bucket
            for update in in_place
            if update.decided and update.number > progress.ended
        ]
        kinds = (Kind.DIRECTION, Kind.ADAM)
        left = [op for op in self._left if isinstance(op, Launch) and op.kind in kinds]
        pending += [op.owner for op in left]
        self._of_matrices.update(op.owner for op in left if op.kind is Kind.DIRECTION)
        if lost := self._of_matrices.intersection(pending):
            raise SalvageError(
                f"the update of {len(lost)} buckets of matrices was decided, and the device has "
                "not orthogonalized them: the state is between two steps. Go on from a checkpoint"
            )
        torn = [update for update in in_place if progress.ended < update.number <= progress.begun]
        if torn:
            raise SalvageError(
                f"Adam of '{torn[0].bucket}' itself failed, in the midst of the state"
            )
