"""Gradients as autograd delivers them: the completion of each block, and its way down.

[Note: Micro-steps]
A micro-step is one microbatch's backward. Autograd tells when a parameter's gradient is there, not
when backward begins or ends. `optimizer.backward(loss)` knows both. With a plain `loss.backward()`
the first delivery opens the micro-step, or in stage 3 a gather before it, and the next forward of
the model or `step()` ends it. Where another microbatch is due, the forward of a block that has
delivered ends it, too: a loss may be computed past the model's own call (`model.loss(batch)`).
Where backwards follow each other without a forward in between, `optimizer.end_micro_step()` must. A
gradient not delivered by then is zero. A block whose parameters have all delivered is sent at once.
If one of them delivers again in the same micro-step (reentrant recompute), the later gradient is
added to the earlier one, and from then on the block is sent only at the end of its micro-steps.

[Note: Whose turn]
Several ranks must launch their reduce-scatters in one order, whatever each of them is ready for
first. In the first micro-step that is the order of registration, last block first; later, the order
of rank 0's first backward. A block that is ready early waits. One without a gradient on this rank
sends zeros at the end. After the first micro-step ranks also agree on the blocks that deliver
twice.

[Note: Before a gather]
In ZeRO stage 3 backward gathers weights, too, on the same lane: reduce-scatters must stand between
the same all-gathers on every rank. A block is never complete on a rank whose tokens reach some of
its experts only. So in front of every gather a block is sent as it is once backward has passed it:
autograd runs nodes in the reverse of the order in which they were made, so nothing is to come for a
block whose first forward began later than that of the block which backward has come to. On the
ranks where it is complete it has been sent since the gather before. `InFlight` keeps the forwards
whose backward is to come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import takewhile
from typing import Generic, TypeVar

import torch
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.autograd.hooks import is_reached
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Delivered, Slot
from offloadtrain.engine.interpreter import Functions, Interpreter
from offloadtrain.engine.parameters import gradient_of, take_gradients
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.runtime.tensor_parts import LocalPart
from offloadtrain.step.program.program import Program


class InFlight:
    """Tells when blocks were read in the forward whose backward runs.

    As a rule that is any forward since the last micro-step, as one backward may be of several. In a
    pipeline microbatches are forward before the backward of earlier ones, in order: each has clocks
    of its own, since a block's first forward of all says nothing of the others.
    """

    def __init__(self, blocks: Sequence[Block], *, in_order: bool) -> None:
        """`in_order`: each backward is that of the oldest forward without one."""
        self._blocks, self._in_order = blocks, in_order
        self._earlier: deque[dict[Block, tuple[int, int]]] = deque()
        """Of every forward but the last one: block → its first and its last clock."""
        self._foreign_task = -1
        """A backward that delivers nothing to this model."""
        for block in blocks:
            block.clock.in_order = in_order

    def forward_begins(self) -> None:
        """A forward of the model begins that is not part of a backward."""
        if not self._in_order or not torch.is_grad_enabled():
            return
        # If there is one: the first of all follows none, and another may have had its backward.
        if any(block.clock.first for block in self._blocks):
            self._earlier.append(
                {block: (block.clock.first, block.clock.last) for block in self._blocks}
            )
        self._forget()

    def clocks(self, block: Block) -> tuple[int, int]:
        """Return when the block was first and last read; (0, …): not at all."""
        return self._earlier[0][block] if self._earlier else (block.clock.first, block.clock.last)

    def backward_ends(self) -> None:
        if self._earlier:
            self._earlier.popleft()
        else:
            self._forget()

    def drop(self) -> None:
        """No backward is to come."""
        self._earlier.clear()
        self._forget()

    def will_deliver(self, trained: Sequence[Block]) -> bool:
        """Tell whether the backward in progress is a plain one of this model: it reaches parameters
        that a forward has read. One of another model through this one's frozen weights does not."""
        task = torch._C._current_graph_task_id()
        if task == self._foreign_task:
            return False
        read = (block for block in reversed(trained) if block.clock.first)
        params = (slot.param for block in read for bucket in block.buckets for slot in bucket.slots)
        if any(map(is_reached, params)):
            return True
        self._foreign_task = task
        return False

    def _forget(self) -> None:
        for block in self._blocks:
            block.clock.first = 0


_T = TypeVar("_T")


class ReduceOrder(Generic[_T]):
    """The order in which blocks send their gradients. Several ranks have one order for all of them,
    and a block that is ready before its turn waits.

    Attributes:
        ready_blocks: blocks in the order in which they became ready in this pass.
    """

    def __init__(self, order: Sequence[_T], *, free: bool) -> None:
        """`free`: every block is sent as soon as it is ready."""
        self._order = list(order)
        self._free = free
        self._next = 0
        self.ready_blocks: dict[_T, None] = {}

    def ready(self, block: _T) -> list[_T]:
        """Return the blocks to send, in order, now that `block` is ready."""
        self.ready_blocks[block] = None
        if self._free:
            return [block]
        # A ready block is held back until all before it are sent: ranks match collectives by their
        # order, and another one would sum gradients of different blocks.
        due = list(takewhile(lambda b: b in self.ready_blocks, self._order[self._next :]))
        self._next += len(due)
        return due

    @property
    def awaited(self) -> _T | None:
        """The block whose turn it is, which is not ready; None if all were sent, or every block is
        sent as soon as it is ready."""
        return None if self._free or self._next == len(self._order) else self._order[self._next]

    def remaining(self) -> list[_T]:
        """Return the blocks that were not sent in this pass, in order."""
        if self._free:
            return [block for block in self._order if block not in self.ready_blocks]
        return self._order[self._next :]

    def restart(self) -> None:
        """A pass has ended."""
        self._next = 0
        self.ready_blocks = {}

    def agree(self, order: Sequence[_T]) -> None:
        """Set the order, from the next pass on."""
        self._order = list(order)


class GradientError(OffloadTrainError):
    """A gradient arrived that cannot be used, or at a moment when it cannot."""


class GradStatus(Enum):
    """The status of the block's gradient of the step, after one delivery."""

    PART = auto()
    """More is to come."""
    COMPLETE = auto()
    """It is whole; its copy to the host and its norm there are launched."""
    AGAIN = auto()
    """It was sent as complete in this backward, and was not."""


@dataclass(slots=True)
class _Delivery:
    """The deliveries of one block in the micro-step in progress.

    Attributes:
        expected: the number of its trained parameters, each of which delivers a gradient.
        is_sent: its gradients were sent.
        is_sent_late: it delivers more than once, and is sent when the micro-step ends.
    """

    expected: int
    arrived: int = 0
    is_sent: bool = False
    is_sent_late: bool = False


class Gradients:
    """Takes gradients from autograd and sends each block's to where its state is."""

    def __init__(
        self,
        blocks: Sequence[Block],
        program: Program,
        interpreter: Interpreter,
        functions: Functions,
        ranks: Ranks,
        *,
        in_order: bool,
    ) -> None:
        """`in_order`: see `InFlight`."""
        self._blocks = blocks
        self._program = program
        self._interpreter = interpreter
        self._functions = functions
        self._ranks = ranks
        self._grad_accum_steps = program.spec.config.grad_accum_steps
        self._deliveries = {
            block: _Delivery(sum(len(bucket.slots) for bucket in block.buckets)) for block in blocks
        }
        self._trained = [block for block in blocks if block.buckets]
        self._turns = ReduceOrder(self._trained[::-1], free=ranks.is_single)
        self._agreed = ranks.is_single
        self._in_flight = InFlight(blocks, in_order=in_order)
        self.micro_steps = 0
        """Whole micro-steps since the last optimizer step."""
        self.open = False
        """A micro-step has begun and not ended."""
        self.in_transit = False
        """Gradients were sent since the caller set this to False."""
        self.in_explicit_backward = False
        """`optimizer.backward` runs, whose micro-step may not have delivered anything yet."""

    def deliver(self, block: Block, slot: Slot) -> tuple[GradStatus, list[Block]]:
        """Autograd has put a gradient into `slot.param.grad`.

        Returns:
            The block's status, and the blocks whose gradient of the step is now complete.

        Raises:
            GradientError: for one backward too many, or a sparse gradient or one of another shape.
        """
        if not self.open:
            self._begin()
        if block.compiled:
            block.graphs.end()
        grad = gradient_of(slot.param)
        if grad is None or grad.layout is not torch.strided or grad.shape != slot.global_shape:
            raise _bad_gradient(slot, grad)
        delivery = self._deliveries[block]
        delivery.arrived += 1
        # The block's gradients have left: this one stays in `.grad` until the micro-step ends.
        if delivery.is_sent:
            self._check_twice(block)
            delivery.is_sent_late = True
            return GradStatus.AGAIN, []
        # Sent as soon as it is complete, so that gather, copy and norm run concurrently with the
        # rest of backward.
        if delivery.arrived < delivery.expected or delivery.is_sent_late:
            return GradStatus.PART, []
        due = self._turns.ready(block)
        for ready_block in due:
            self._take(ready_block)
        return (GradStatus.COMPLETE, due) if due and self._in_last else (GradStatus.PART, [])

    def begin_root_forward(self) -> None:
        """A forward of the model begins that is not part of a backward."""
        self.end_micro_step()
        self._in_flight.forward_begins()

    def backward_reached(self, clock: int, again: Block | None) -> None:
        """Backward is about to use a block whose forward began at `clock`: send what it has passed,
        see [Note: Before a gather].

        Args:
            again: that block, if its forward is about to run again; that of blocks without a
                gradient may be next.
        """
        clock = clock if again is None else self._in_flight.clocks(again)[1]
        while (block := self._turns.awaited) is not None:
            # A block that no forward of this rank has entered stays on the device: every rank
            # gathers the others.
            first, _ = self._in_flight.clocks(block)
            over = first > clock if first else not block.source.gathers
            if not over or (again is not None and not self._deliveries[block].arrived):
                return
            if not self.open:
                if not (self.in_explicit_backward or self._in_flight.will_deliver(self._trained)):
                    return
                self._begin()
            for ready in self._turns.ready(block):
                self._take(ready)

    @property
    def _in_last(self) -> bool:
        """True if the micro-step in progress is the last of the step."""
        return self.micro_steps + 1 == self._grad_accum_steps

    def forward_begins(self, blocks: Sequence[Block]) -> None:
        """A forward outside of any backward reads these blocks. If one has delivered, it is that of
        the next microbatch."""
        if self.open and not self._in_last:
            if any(self._deliveries[block].arrived for block in blocks):
                self.end_micro_step()

    def end_micro_step(self) -> None:
        """End the micro-step: gradients not delivered by now are zero. Ignored if none is open."""
        if not self.open:
            return
        # The other ranks reduce these blocks: this one must launch the same collectives.
        for block in self._turns.remaining():
            self._take(block)
        if self._agreed:
            for block in self._trained:
                if self._deliveries[block].is_sent_late:
                    self._take(block)
        else:
            self._agree()
        # Graphs that are still alive hold handles: their backward spans end here, or their reads
        # would reach into step(), which uploads new weights.
        for block in self._blocks:
            if block.graphs.spans:
                block.graphs.end()
        self._reset_deliveries()
        self._in_flight.backward_ends()
        self.open = False
        self.micro_steps += 1

    def take_assigned(self) -> None:
        """Send the gradients that code has put into `.grad`, as a micro-step if there was none.

        Raises:
            GradientError: for a sparse one.
        """
        if not self.micro_steps and not self.open:
            if not any(self._holds_gradients(block) for block in self._trained):
                return
            self._begin()
        self.end_micro_step()
        for block in filter(self._holds_gradients, self._trained):
            self._take(block)

    def _holds_gradients(self, block: Block) -> bool:
        for slot in (slot for bucket in block.buckets for slot in bucket.slots):
            grad = gradient_of(slot.param)
            if grad is not None and grad.layout is not torch.strided:
                raise _bad_gradient(slot, grad)
            if grad is not None:
                return True
        return False

    def drop(self, *, in_flight: bool = True) -> None:
        """Forget every gradient since the last step; `in_flight`: no backward is to come."""
        # Gradients not sent down go back to the allocator, in the order of compute.
        self._functions.delivered = {}
        for block in self._blocks:
            if block.graphs.spans:
                block.graphs.end()
            for bucket in block.buckets:
                take_gradients(bucket.params)
        self._reset_deliveries()
        if in_flight:
            self._in_flight.drop()
        self.open = False
        self.micro_steps = 0

    def _begin(self) -> None:
        if self.micro_steps >= self._grad_accum_steps:
            raise GradientError(
                f"{self.micro_steps + 1} backward passes before step(), but grad_accum_steps = "
                f"{self._grad_accum_steps}. Call step() first, or offload with grad_accum_steps = "
                f"{self.micro_steps + 1}."
            )
        self.open = True

    def _check_twice(self, block: Block) -> None:
        if self._agreed and not self._ranks.is_single:
            raise GradientError(
                f"block '{block.name}' received a second gradient in one backward, which it did "
                f"not in the first one: with {self._ranks.size} ranks the order of their sums is "
                "fixed by then. Use recompute with use_reentrant=False, or let the first backward "
                "take every path of the model"
            )

    def _agree(self) -> None:
        """At the end of the first micro-step: all ranks take rank 0's order, and a block that has
        delivered twice on any rank is sent late on all of them."""
        self._agreed, count = True, len(self._trained)
        place = {block: float(number) for number, block in enumerate(self._turns.ready_blocks)}
        places = [place.get(block, float(count)) for block in self._trained]
        flags = [float(self._deliveries[block].is_sent_late) for block in self._trained]
        # Waits for this rank's reduce-scatters. Once per run: it exposes the first backward's.
        self._interpreter.run(self._program.wait_for_first_sums)
        of_ranks = self._ranks.everyone.all_gather_host([*places, *flags])
        first, late = of_ranks[0, :count].tolist(), of_ranks[:, count:].amax(0).tolist()
        for block, is_late in zip(self._trained, late, strict=True):
            if is_late:
                self._deliveries[block].is_sent_late = True
                self._take(block)
        order = sorted(range(count), key=lambda number: (first[number], -number))
        self._turns.agree([self._trained[number] for number in order if not late[number]])

    def _reset_deliveries(self) -> None:
        for delivery in self._deliveries.values():
            delivery.arrived, delivery.is_sent = 0, False
        self._turns.restart()

    def _take(self, block: Block) -> None:
        """Send the gradients that the block's parameters hold down, and free them on the device.
        Among ranks every rank sends, zeros where nothing is held."""
        complete: dict[str, bool] = {}
        delivered: dict[str, Delivered] = {}
        for bucket in block.buckets:
            # From `.grad` to the gather's launch, which frees them: it runs on compute, so that
            # the allocator reuses their memory after it, for the next block's gradients.
            gradients = []
            for slot, grad in zip(bucket.slots, take_gradients(bucket.params), strict=True):
                if grad is not None:
                    if isinstance(slot.local, LocalPart):
                        grad = slot.local.of_gradient(grad)
                    gradients.append((slot, grad))
            if gradients:
                complete[bucket.spec.name] = len(gradients) == len(bucket.slots)
                delivered[bucket.spec.name] = gradients
        self._functions.delivered = delivered
        ready = self._program.grads_ready
        self._interpreter.run(ready, block.name, complete, last=self._in_last)
        self._deliveries[block].is_sent = self.in_transit = True


def _bad_gradient(slot: Slot, grad: Tensor | None) -> GradientError:
    if not slot.param.requires_grad:
        return GradientError(
            f"parameter '{slot.name}' was frozen between a forward and its backward: freeze and "
            "unfreeze after step() or zero_grad(), before the next forward"
        )
    if grad is None or grad.layout is not torch.strided:
        kind = "none" if grad is None else f"a {grad.layout} one"
        return GradientError(
            f"parameter '{slot.name}' delivered {kind} instead of a dense gradient. Use "
            "sparse=False in embeddings, and hooks that leave .grad in place."
        )
    return GradientError(
        f"parameter '{slot.name}' has the shape {tuple(grad.shape)} now and had {slot.shape} "
        "at offload(), which fixes the layout of host memory: close() the optimizer, resize "
        "the model (resize_token_embeddings, …), and offload it again"
    )
