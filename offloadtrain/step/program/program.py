"""The program of a step: events in, operations out.

[Note: The program]
No branch of a step depends on timing, only on the behaviour of the user's code: which block runs,
which gradients arrive, what the norm is. So the scheduler is a state machine without I/O. The
engine reports events and runs the returned operations in their order, on streams and threads. The
plan reports the events of a typical step and gives each operation a duration. The prover checks the
memory that the operations access. There is no second description of a step.

  forward      `use` waits for each block's weights, and loads those of the next blocks
  backward     `grads_ready` sends a block's gradients to the host, which adds and measures them
  step()       `norm` waits for the sums of squares (the only `HostWait` of a step);
               `norm_known` launches the rest of Adam, and the upload of each block in forward
               order
  forward      of the next step begins after the first block's upload
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from offloadtrain.step.layout.buffer_table import buffer_table
from offloadtrain.step.layout.buffers import Memory
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.activations import ActivationPath
from offloadtrain.step.program.disk import DiskPath, SavePath
from offloadtrain.step.program.gradients import GradientPath
from offloadtrain.step.program.operations import Dependencies, Kind, Lane, Launch, Operations, Ring
from offloadtrain.step.program.places import BucketRefs
from offloadtrain.step.program.streaming import Streaming
from offloadtrain.step.program.updates import (
    Decision,
    Delayed,
    Early,
    Exact,
    Speculation,
    Speculative,
    UpdatePath,
)


class Program:
    """The step of one rank. Every event returns the operations that it requires.

    Attributes:
        table: the buffers of the operations.
        speculation: the result of the updates inside the last backward.
        streaming: the slots of streamed blocks, and the access order that prefetches follow.
        buckets: by name, including frozen ones.
        mode: the update mode, which decides when updates run and which uploads are postponed.
    """

    def __init__(self, spec: StepSpec, rank: int = 0, part: int = 0) -> None:
        """`part`: index of this rank among `spec.input_parts`."""
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
        # One ring for both directions: gradients to the host, weights to the device.
        host_ring = Ring(Memory.HOST_STAGING, table.slots(Memory.HOST_STAGING))
        self._disk = DiskPath(table, self._order)
        self._gradients = GradientPath(spec, table, self._order, host_ring)
        self._updates = UpdatePath(
            table, self._order, host_ring, self.streaming, self._disk, self._gradients.slots
        )
        self._activations = ActivationPath(spec, part, self._order)
        self._saves = SavePath(spec, self._order, self.buckets, self._disk)
        self.mode = _mode_of(spec, self._updates)

    def begin_pass(self, pinned: Collection[str] = ()) -> Operations:
        """A forward of the model is about to begin, or the step is over; `pinned`: see `use`."""
        self._activations.last = None  # no input was saved before the first of the next forward
        if self.streaming.slots:
            self.streaming.restart(pinned)
        return self._order.take()

    def use(self, block: str, pinned: Collection[str] = (), *, expected: bool = True) -> Operations:
        """Compute is about to read the weights of a block.

        Args:
            expected: see `Streaming.use`.
            pinned: streamed blocks that keep their slots, as running forwards or backwards read
                them.

        Raises:
            StreamError: all slots are taken by pinned blocks.
        """
        if self.streaming.loads(block):
            self.streaming.use(block, pinned, expected=expected)
        else:
            resident = [bucket.working for bucket in self._trained[block]]
            # Compute waits only for this block's upload or all-gather. Those of later blocks, and
            # their Adam, run during its forward.
            self._order.needs(Lane.COMPUTE, resident, f"use of {block}")
        return self._order.take()

    def computes(
        self, kind: Kind, block: str, *, reads: bool = True, owner: str = ""
    ) -> Operations:
        """Launch the user's work, if the program is driven without a model.

        Args:
            reads: the work reads the block's weights.
            owner: see `Reading`; "": the block.
        """
        buckets = self._buckets_of.get(block, ()) if reads else ()
        # Compute, like the user's kernels in a real run: uploads wait for these reads.
        refs = tuple(bucket.working for bucket in buckets)
        self._order.launch(Launch(kind, Lane.COMPUTE, owner or block, refs), late=True)
        return self._order.take()

    def activation_saved(self, number: int, numel: int, dtype: str) -> Operations:
        """Autograd has saved a block's input for its recompute: copy it to the host.

        Args:
            number: a new number, which identifies the input from now on.
        """
        self._activations.save(number, numel, dtype)
        return self._order.take()

    def activation_needed(self, number: int) -> Operations:
        """Backward is about to recompute the block: after these operations compute may read its
        input."""
        self._activations.need(number)
        return self._order.take()

    def activation_dropped(self, number: int) -> Operations:
        """The graph of the input was freed."""
        self._activations.drop(number)
        return self._order.take()

    def drop_slot(self, block: str) -> Operations:
        """Free the slot of a streamed block."""
        self.streaming.drop(block)
        return self._order.take()

    def grads_ready(self, block: str, delivered: Mapping[str, bool], *, last: bool) -> Operations:
        """Send gradients of a block to the host.

        Args:
            delivered: bucket with a gradient → True if all of its parameters have one. Several
                ranks send every bucket, with zeros for missing gradients.
            last: this is the last micro-step of the step.
        """
        for bucket in self._trained[block]:
            if bucket.name in delivered or not self._is_single:
                complete = delivered.get(bucket.name, False) or not self._is_single
                self._gradients.send(bucket.gradient, complete=complete, last=last)
        return self._order.take()

    def grads_complete(self, block: str, early: Decision) -> Operations:
        """The block's gradient of the step is complete: it may be updated."""
        self.mode.grads_complete((block, self._trained[block]), early)
        return self._order.take()

    def grads_repeated(self, block: str) -> None:
        """Another gradient arrived for a block whose gradient was complete.

        Raises:
            UpdateError: it was updated in place.
        """
        self.mode.grads_repeated((block, self._trained[block]))

    def gradients_changed(self, buckets: Collection[str]) -> None:
        """The caller may have changed the gradients of these buckets, while the lanes were idle.

        Raises:
            UpdateError: some were updated in place.
        """
        self.mode.gradients_changed()
        for name in buckets:
            # On the tier where it is complete first: it is measured and copied to the host again.
            gradient = self.buckets[name].gradient
            gradient.arrived, gradient.measured_on = False, None

    def graph_freed(self, block: str) -> Operations:
        """No graph needs the old weights of a block of `mode.waiting_for_graphs` any more."""
        self.mode.graph_freed(block)
        return self._order.take()

    def wait_for_first_sums(self) -> Operations:
        """Make the launching thread wait for the collectives so far."""
        # Once per run: ranks next agree on their reduce order, in another process group. As for
        # the exchange of norms, no rank enters it with reduce-scatters in flight.
        sums = self._order.record(Lane.COMM, "the first backward")
        self._order.host_wait(sums, "the first gradients' sums")
        return self._order.take()

    def norm(self) -> Operations:
        """All gradients of the step have arrived: complete their sums of squares, which the
        launching thread can read after these operations."""
        trained = (bucket.gradient for buckets in self._trained.values() for bucket in buckets)
        self._gradients.complete(trained)
        return self._order.take()

    def norm_known(self, forward_order: Sequence[str], decision: Decision) -> Operations:
        """In step(): launch the rest of the update and the uploads; set `speculation`."""
        order = [(name, self._trained[name]) for name in forward_order]
        self.speculation = self.mode.apply(order, decision)
        return self._order.take()

    def end_step(self) -> None:
        """Clear the gradients' status: the step was applied or dropped."""
        for buckets in self._trained.values():
            for bucket in buckets:
                bucket.gradient.end_step()
        self._gradients.slots.end_step()

    def drop(self) -> Operations:
        """Drop the gradients of a step that is not decided."""
        self.end_step()
        self.mode.drop()
        return self._order.take()

    def flush(self) -> Operations:
        """Between steps: upload pending weights, so that parameters have the newest weights."""
        self.mode.flush()
        return self._order.take()

    def switch_version(self, *, to_previous: bool) -> Operations:
        """Let parameters be the previous version of the weights, for a backward whose forward has
        read it, or the newest version again after that backward."""
        self.mode.switch_version(to_previous=to_previous)
        return self._order.take()

    def save(self) -> Operations:
        """Between steps: write the state after the updates so far; in mode "delayed" also the
        weights that forward uses."""
        self._saves.save()
        return self._order.take()

    def average(self) -> Operations:
        """Between steps: read the masters after the updates so far, for a moving average."""
        self._saves.average()
        return self._order.take()

    def wait_for_averages(self) -> Operations:
        """Make the launching thread wait for the averages so far."""
        # Next, the caller reads or writes averages. Waits for these lanes only: copies and loads go
        # on.
        for lane in (Lane.HOST, Lane.WRITE):
            self._order.host_wait(self._order.record(lane, "average"), "the averages")
        return self._order.take()

    def wait_for_writes(self) -> Operations:
        """Make the launching thread wait for the writes so far."""
        # The caller renames the checkpoint's folder next: every byte of it must be in its file.
        # Only the write lane: Adam and uploads of later steps go on.
        event = self._order.record(Lane.WRITE, "checkpoint")
        self._order.host_wait(event, "the checkpoint's writes")
        return self._order.take()

    def synchronized(self) -> None:
        """The launching thread has seen every lane idle: it may change the state."""
        self._order.synchronized()
        self._disk.forget()

    def reset(self) -> None:
        """Start again with idle lanes, after operations other than updates were lost: nothing is
        in flight, and no streamed block has a slot."""
        self._order.reset()
        self._disk.forget()
        self._gradients.slots.reset()
        self.streaming.reset()
        self._activations.reset()

    def upload_masters(self) -> Operations:
        """Upload the present masters, after the state was set or loaded."""
        self.mode.flush()
        self.mode.reset()
        self._updates.emit([*self._trained.items()])
        return self._order.take()

    def detach_weights(self) -> Operations:
        """In mode "delayed", after `flush`: the caller will set the state and, separately, the
        weights that forward uses."""
        self.mode.detach_weights([*self._trained.items()])
        return self._order.take()

    def resume_delay(self) -> Operations:
        """In mode "delayed", after `flush`: the caller has loaded the state, and older weights for
        forward. The masters are uploaded after the next backward."""
        self.mode.reset()
        self.mode.defer([*self._trained.items()])
        return self._order.take()


def _mode_of(spec: StepSpec, updates: UpdatePath) -> Exact:
    """Make the update mode of the options."""
    if spec.update_policy is not None:
        mode: Exact = spec.update_policy(updates)
        return mode
    if spec.config.update == "delayed":
        return Delayed(updates, spec.config.warmup_steps, alone=spec.is_single)
    if spec.config.update == "speculative":
        return Speculative(updates)
    return (Early if spec.updates_early else Exact)(updates)
