"""The program of a step: events in, operations out.

[Note: The program]
A step has no branch that depends on timing, only on what the user's code does: which block runs
when, which gradients arrive, what the norm is. So the scheduler is a state machine without I/O. The
engine reports events and runs the operations that it answers, in their order, on streams and
threads. The plan reports the events of a typical step and gives each operation a duration. The
prover checks the memory that they touch. There is no second description of a step.

    forward      `use` waits for each block's weights, and loads what comes next
    backward     `grads_ready` sends a block's gradients down; the host adds and measures them
    step()       `norm` waits for the sums of squares (the only wait of the launching thread);
                 `norm_known` launches what the update mode has not yet launched of Adam, and the
                 upload of each block in forward order
    forward      of the next step begins behind the first block's upload
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from offloadtrain.step.layout.buffer_table import buffer_table
from offloadtrain.step.layout.buffers import Memory
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.activations import ActivationPath
from offloadtrain.step.program.dependencies import Dependencies
from offloadtrain.step.program.disk import DiskPath, SavePath
from offloadtrain.step.program.gradients import GradientPath
from offloadtrain.step.program.modes import (
    Decision,
    Delayed,
    Early,
    Exact,
    Speculation,
    Speculative,
)
from offloadtrain.step.program.operations import Kind, Lane, Launch, Operations, Ring
from offloadtrain.step.program.places import BlockRefs, BucketRefs
from offloadtrain.step.program.streaming import Streaming
from offloadtrain.step.program.updates import UpdatePath


class Program:
    """One rank's step. Every event returns the operations that it makes necessary.

    Attributes:
        table: the buffers that operations name.
        speculation: the result of the updates inside the last backward.
        streaming: the slots of streamed blocks, and the access order that loads ahead follow.
        buckets: by name, frozen ones included.
        mode: the update mode, which says when updates run and which uploads wait.
    """

    def __init__(self, spec: StepSpec, rank: int = 0, part: int = 0) -> None:
        """`part`: the number of this rank among `spec.input_parts`."""
        self.spec = spec
        self.table = table = buffer_table(spec)
        self._is_single = spec.is_single
        self.speculation = Speculation()
        self._order = Dependencies()
        self.buckets = {
            b.name: BucketRefs(b, spec, table, rank)
            for block in spec.blocks
            for b in block.all_buckets
        }
        self._trained: dict[str, Sequence[BucketRefs]] = {
            block.name: [self.buckets[b.name] for b in block.buckets] for block in spec.blocks
        }
        self._buckets_of: dict[str, Sequence[BucketRefs]] = {
            block.name: [self.buckets[b.name] for b in block.all_buckets] for block in spec.blocks
        }
        self.streaming = Streaming(spec, table, self._order, self._buckets_of)
        # One ring for both ways: gradients on their way down, weights on their way up.
        host_ring = Ring(Memory.HOST_STAGING, table.slots(Memory.HOST_STAGING))
        self._disk = DiskPath(table, self._order)
        self._gradients = GradientPath(spec, table, self._order, host_ring)
        self._updates = UpdatePath(
            table, self._order, host_ring, self.streaming, self._disk, self._gradients.slots
        )
        self._activations = ActivationPath(spec, part, self._order)
        self._saves = SavePath(spec, self._order, self.buckets, self._disk)
        self.mode = _mode_of(spec, self._updates)

    def pass_begins(self, pinned: Collection[str] = ()) -> Operations:
        """A forward of the model is about to begin, or the step is over. `pinned`: see `use`."""
        self._activations.restart()
        self.streaming.restart(pinned)
        return self._order.take()

    def use(self, block: str, pinned: Collection[str] = ()) -> Operations:
        """Compute is about to read the weights of a block.

        Args:
            pinned: streamed blocks that forwards or backwards in progress read: they keep their
                slots.

        Raises:
            StreamError: all slots are taken by pinned blocks.
        """
        if self.streaming.loads(block):
            self.streaming.use(block, pinned)
        else:
            resident = [bucket.working for bucket in self._trained[block]]
            # Compute waits for this block's upload, or all-gather, only: those of later blocks, and
            # their Adam, run beside its forward.
            self._order.needs(Lane.COMPUTE, resident, f"use of {block}")
        return self._order.take()

    def computes(
        self, kind: Kind, block: str, *, reads: bool = True, owner: str = ""
    ) -> Operations:
        """Launch the user's own work, where a program is driven without a model.

        Args:
            reads: of the block's weights.
            owner: see `Reading`; "": the block.
        """
        buckets = self._buckets_of.get(block, ()) if reads else ()
        # Compute, where a real run has the user's kernels: uploads wait for these reads.
        refs = tuple(bucket.working for bucket in buckets)
        self._order.launch(Launch(kind, Lane.COMPUTE, owner or block, refs), late=True)
        return self._order.take()

    def activation_saved(self, number: int, numel: int, dtype: str) -> Operations:
        """Autograd has saved a block's input for its recompute; it goes to the host.

        Args:
            number: a new number, which names the input from here on.
        """
        self._activations.save(number, numel, dtype)
        return self._order.take()

    def activation_needed(self, number: int) -> Operations:
        """Backward is about to run the block again. After these operations compute may read its
        input."""
        self._activations.need(number)
        return self._order.take()

    def activation_dropped(self, number: int) -> Operations:
        """The graph of the input is gone."""
        self._activations.drop(number)
        return self._order.take()

    def drop_slot(self, block: str) -> Operations:
        """A streamed block gives up its slot now."""
        self.streaming.drop(block)
        return self._order.take()

    def grads_ready(self, block: str, delivered: Mapping[str, bool], *, last: bool) -> Operations:
        """Gradients of a block go down.

        Args:
            delivered: bucket with any gradient → True if all of its parameters hold one. Among
                ranks every bucket goes down, with zeros where nothing is held.
            last: this is the last micro-step of the step.
        """
        for bucket in self._trained[block]:
            if bucket.name in delivered or not self._is_single:
                complete = delivered.get(bucket.name, False) or not self._is_single
                self._gradients.send(bucket.gradient, complete=complete, last=last)
        return self._order.take()

    def grads_complete(self, block: str, early: Decision) -> Operations:
        """The step's gradient of the block is whole, and on its way: it may be updated."""
        self.mode.grads_complete(self._block(block), early)
        return self._order.take()

    def grads_again(self, block: str) -> None:
        """A gradient arrived for a block whose gradient was taken for complete.

        Raises:
            UpdateError: it was updated in place.
        """
        self.mode.grads_again(self._block(block))

    def graph_freed(self, block: str) -> Operations:
        """No graph needs the old weights of a block that is `behind`."""
        self.mode.graph_freed(block)
        return self._order.take()

    def first_sums(self) -> Operations:
        """The launching thread waits for the collectives so far."""
        # Once per run: ranks agree on their reduce order next, in another process group. As before
        # the exchange of norms, no rank enters it with reduce-scatters in flight.
        sums = self._order.record(Lane.COMM, "the first backward")
        self._order.host_wait(sums, "the first gradients' sums")
        return self._order.take()

    def norm(self) -> Operations:
        """All gradients of the step have arrived: complete their sums of squares. The launching
        thread can read them when these operations are done."""
        trained = (bucket.gradient for buckets in self._trained.values() for bucket in buckets)
        self._gradients.complete(trained)
        return self._order.take()

    def norm_known(self, forward_order: Sequence[str], decision: Decision) -> Operations:
        """In step(): launch the rest of the update, and the uploads; sets `speculation`."""
        order = [self._block(name) for name in forward_order]
        self.speculation = self.mode.apply(order, decision)
        return self._order.take()

    def step_ends(self) -> None:
        """The gradients are used up, or given up."""
        for buckets in self._trained.values():
            for bucket in buckets:
                bucket.gradient.end_step()
        self._gradients.slots.step_ends()

    def sum_ends(self) -> None:
        """The gradients are measured and wait for the decision; later ones are the next step's."""
        self.step_ends()
        for buckets in self._trained.values():
            for bucket in buckets:
                bucket.gradient.close_sum()

    def verify(self) -> None:
        """Raises UpdateError for hyperparameters that changed after updates inside backward."""
        self.mode.verify()

    def drop(self) -> Operations:
        """The gradients of the step are given up before it was decided."""
        self.step_ends()
        self.mode.drop()
        return self._order.take()

    def before_masters_change(self) -> None:
        """The caller is about to set masters: updates made from the old ones are given up.

        Raises:
            UpdateError: where they cannot be.
        """
        self.mode.before_masters_change()

    def flush(self) -> Operations:
        """Between steps: upload weights that wait, so that the newest ones are in their places."""
        self.mode.flush()
        return self._order.take()

    def turn(self, *, back: bool) -> Operations:
        """A backward begins whose forward has read the version before the newest one (`back`): what
        it runs again reads that one; or such a backward is over."""
        self.mode.turn(back=back)
        return self._order.take()

    def save(self) -> Operations:
        """Between steps: write the state as it is after the updates so far; in mode "delayed" the
        weights that forward uses, too."""
        self._saves.save()
        return self._order.take()

    def written(self) -> Operations:
        """The launching thread waits for the writes so far."""
        # The caller renames the checkpoint's folder next: every byte of it must be in its file. The
        # write lane alone: Adam and uploads of later steps go on.
        event = self._order.record(Lane.WRITE, "checkpoint")
        self._order.host_wait(event, "the checkpoint's writes")
        return self._order.take()

    def synchronized(self) -> None:
        """The launching thread has seen every lane empty. It may change the state from here on."""
        self._order.synchronized()
        self._disk.forget()

    def reset(self) -> None:
        """Operations other than updates were lost; the lanes are empty. Afterwards nothing is on
        its way and no streamed block has a slot."""
        self._order.reset()
        self._disk.forget()
        self._gradients.slots.reset()
        self.streaming.reset()
        self._activations.reset()

    def masters_set(self) -> Operations:
        """The state was set or loaded: the masters go up as they are."""
        self.mode.flush()
        self.mode.reset()
        self._updates.emit([self._block(name) for name in self._trained])
        return self._order.take()

    def part(self) -> Operations:
        """In mode "delayed", behind `flush`: the caller will set state and, apart from it, the
        weights that forward uses."""
        self.mode.part([self._block(name) for name in self._trained])
        return self._order.take()

    def delay_set(self) -> Operations:
        """In mode "delayed", behind `flush`: the state was loaded, and older weights where forward
        uses them. The masters go up behind the next backward."""
        self.mode.reset()
        self.mode.hold([self._block(name) for name in self._trained])
        return self._order.take()

    def _block(self, name: str) -> BlockRefs:
        return name, self._trained[name]


def _mode_of(spec: StepSpec, updates: UpdatePath) -> Exact:
    """Make the update mode that the options name."""
    if spec.update_policy is not None:
        mode: Exact = spec.update_policy(updates)
        return mode
    if spec.config.update == "delayed":
        return Delayed(updates, spec.config.warmup_steps, alone=spec.is_single)
    if spec.config.update == "speculative":
        return Speculative(updates)
    return (Early if spec.updates_early else Exact)(updates)
