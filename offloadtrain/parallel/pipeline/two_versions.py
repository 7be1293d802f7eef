"""Update mode "delayed" with two versions of the weights.

[Note: Two versions]
A pipeline without flushes (PipeDream-2BW) begins the forwards of step t+1 before the backwards of
step t have ended. The weights of step t, W(t), are then needed with those of step t+1, which are
W(t) - update of the gradient at W(t-1): the recurrence of Delayed. So there are two versions on the
device. Adam of step t-1 ends while step t computes, and its weights go up at once, into the version
that step t-1 has used: its last backward is over when its norm is known. Only what parameters are
views of changes later, when the first forward of step t+1 begins (`flush`). Graphs in flight keep
the memory that they were built with. The last stage has no microbatch in flight then and needs one
version, as Delayed does. A backward of step t after that forward may run forwards again
(recompute): `switch_version` gives it the version that they have read.

Of a streamed block both versions are where its loads read them, on the host or as shards on the
device, and a slot holds one of them at a time: what is in a slot when compute turns to the other
version is dropped, and the next use loads that one. So a graph in flight keeps no memory of the
weights that it was built with; its backward, for which compute has turned back, loads them again.
On the host the versions are the two memories that Delayed has as well. Adam writes new weights into
the one that no load reads, after the last load of what it held. A state that holds the weights
itself is one of the two: before Adam changes it in place, the weights in use are copied to the
other (`keep`), and loads read them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offloadtrain.step.layout.buffers import Memory
from offloadtrain.step.program.operations import Kind, Lane
from offloadtrain.step.program.places import BlockRefs, BucketRefs
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.updates import Decision, Exact, Speculation, UpdatePath


class TwoVersions(Exact):
    """Delayed, with memory of their own for new weights on the device: [Note: Two versions]."""

    def __init__(self, updates: UpdatePath) -> None:
        super().__init__(updates)
        self._hidden: Sequence[BlockRefs] = ()
        """Blocks whose new weights are on the device, in the version that nothing reads yet."""
        self._shown: Sequence[BlockRefs] = ()
        """Blocks whose newest weights took the place of others in the last flush that had any."""

    def apply(self, order: Sequence[BlockRefs], decision: Decision) -> Speculation:
        if not decision.skipped:
            for bucket in (bucket for _, buckets in order for bucket in buckets):
                # All of them before the first update: a load waits for its block's copy only.
                self._keep(bucket)
                bucket.updates_other_version = True
            # These uploads wait for compute so far, the last readers of the version before among
            # it, and run concurrently with what compute is given from here on.
            self._apply(order, decision)
            self._updates.read_ahead(order)
            self._hidden = order
        return Speculation()

    def detach_weights(self, order: Sequence[BlockRefs]) -> None:
        for bucket in (bucket for _, buckets in order for bucket in buckets):
            self._keep(bucket)

    def defer(self, order: Sequence[BlockRefs]) -> None:
        self._updates.renew_weights_in_use(order)
        for bucket in (bucket for _, buckets in order for bucket in buckets):
            bucket.updates_other_version = True
        self._updates.emit(order)
        self._hidden = order

    def flush(self) -> None:
        if not self._hidden:  # the step was skipped
            return
        self._shown, self._hidden = self._hidden, ()
        for bucket in (bucket for _, buckets in self._shown for bucket in buckets):
            self._updates.publish_weights(bucket)
        # The next use waits for the uploads; graphs keep the version that they were built with.
        self._updates.enter_version(self._shown, 1)
        self.version += 1

    def switch_version(self, *, to_previous: bool) -> None:
        for bucket in (bucket for _, buckets in self._shown for bucket in buckets):
            self._updates.switch_version(bucket)
        # No upload is on its way to either version: the step whose backwards read the one before is
        # not decided. Compute has waited for both.
        by = -1 if to_previous else 1
        self._updates.enter_version(self._shown, by)
        self.version += by

    def _keep(self, bucket: BucketRefs) -> None:
        """The state is about to change: loads read a snapshot of the weights in use from now on."""
        # Of two versions, loads read the one in the state, which the next update overwrites.
        if bucket.loads_in_turn and bucket.load_source.memory is Memory.STATE:
            # Host, during forward: waits for loads in flight of the version before; the next loads
            # of the block wait for it.
            snapshot = bucket.ref(Memory.SNAPSHOT)
            self._updates.launch(Kind.PUBLISH, Lane.HOST, bucket, bucket.load_source, snapshot)
            self._updates.switch_version(bucket)


def close_sums(program: Program) -> None:
    """Keep the measured gradients for a later decision; new ones belong to the next step, which
    writes to the other sum where there are two."""
    program.end_step()
    for bucket in program.spec.buckets:
        gradient = program.buckets[bucket.name].gradient
        gradient.decided = gradient.adding
        if gradient.file is None and len(gradient.versions) > 1:
            gradient.adding = gradient.versions[1 - gradient.adding.copy]


def rows_without_flush(stage: int, stages: int) -> dict[str, Any]:
    """Return the fields of `StepSpec` that a stage sets where steps follow each other without a
    flush: all but the last one have two versions of their working weights, all but the first two
    sums of their gradients ([Note: Without a flush] in `parallel.pipeline.steps`)."""
    is_last = stage == stages - 1
    return {
        "weight_versions": 1 if is_last else 2,
        "gradient_sums": 1 if stage == 0 else 2,
        "update_policy": None if is_last else TwoVersions,
    }
