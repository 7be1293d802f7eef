"""Update mode "delayed" with two versions of the weights.

[Note: Two versions]
A pipeline without flushes (PipeDream-2BW) begins the forwards of step t+1 before the backwards of
step t have ended. It then needs the weights of step t, W(t), as well as those of step t+1, which
are W(t) - update of the gradient at W(t-1): the recurrence of Delayed. So there are two versions on
the device. Adam of step t-1 ends while step t computes, and its weights are uploaded at once, into
the version that step t-1 has used: its last backward has ended when its norm is known. Parameters
become views of the new version later, when the first forward of step t+1 begins (`flush`). Graphs
in flight keep the memory that they were built with. The last stage has no microbatch in flight then
and needs one version, as in Delayed. A backward of step t after that forward may run forwards again
(recompute): `switch_version` restores the version that they have read.

For a streamed block, both versions are where its loads read them, on the host or as shards on the
device, and a slot contains one of them at a time. When compute switches to the other version, the
content of the slot is dropped, and the next use loads the right version. So a graph in flight keeps
no memory of the weights that it was built with; its backward, before which compute has switched
back, loads them again. On the host the versions are the two memories that Delayed also has. Adam
writes new weights into the memory that no load reads, after the last load of its old content. A
state that contains the weights itself is one of the two memories: before Adam changes it in place,
the weights in use are copied to the other (`keep`), and loads read that copy.
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
    """Delayed, with separate memory for new weights on the device: [Note: Two versions]."""

    def __init__(self, updates: UpdatePath) -> None:
        super().__init__(updates)
        self._hidden: Sequence[BlockRefs] = ()
        """Blocks whose new weights are on the device, in the version that is not in use yet."""
        self._shown: Sequence[BlockRefs] = ()
        """Blocks whose parameters switched to new weights in the last flush that had any."""

    def apply(self, order: Sequence[BlockRefs], decision: Decision) -> Speculation:
        if not decision.skipped:
            for bucket in (bucket for _, buckets in order for bucket in buckets):
                # All copies before the first update: a load waits only for its own block's copy.
                self._keep(bucket)
                bucket.updates_other_version = True
            # These uploads wait for the compute submitted so far, which includes the last readers
            # of the previous version, and run concurrently with compute submitted later.
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
        # No upload to either version is in flight: the step whose backwards read the previous
        # version is not decided yet. Compute has waited for both.
        by = -1 if to_previous else 1
        self._updates.enter_version(self._shown, by)
        self.version += by

    def _keep(self, bucket: BucketRefs) -> None:
        """Copy the weights in use before the state changes; loads read the snapshot from now on."""
        # Only if loads read the version in the state, which the next update overwrites.
        if bucket.loads_in_turn and bucket.load_source.memory is Memory.STATE:
            # Host, during forward: waits for loads in flight of the previous version; the next
            # loads of the block wait for it.
            snapshot = bucket.ref(Memory.SNAPSHOT)
            self._updates.launch(Kind.PUBLISH, Lane.HOST, bucket, bucket.load_source, snapshot)
            self._updates.switch_version(bucket)


def close_sums(program: Program) -> None:
    """Set the measured gradients aside for a later decision. New gradients belong to the next step,
    and are added to the other sum if there are two."""
    program.end_step()
    for bucket in program.spec.buckets:
        gradient = program.buckets[bucket.name].gradient
        gradient.decided = gradient.adding
        if gradient.file is None and len(gradient.versions) > 1:
            gradient.adding = gradient.versions[1 - gradient.adding.copy]


def rows_without_flush(stage: int, stages: int) -> dict[str, Any]:
    """Return the fields of `StepSpec` for a stage without flushes between steps. All stages except
    the last have two versions of their working weights; all except the first have two sums of their
    gradients ([Note: Without a flush] in `parallel.pipeline.steps`)."""
    is_last = stage == stages - 1
    return {
        "weight_versions": 1 if is_last else 2,
        "gradient_sums": 1 if stage == 0 else 2,
        "update_policy": None if is_last else TwoVersions,
    }
