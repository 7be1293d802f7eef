"""Gradients as autograd delivers them: which block is whole, and when it sends them down.

[Note: Micro-steps]
A micro-step is one microbatch's backward. Autograd tells when a parameter's gradient is there, not
when backward begins or ends. `optimizer.backward(loss)` knows both. With a plain `loss.backward()`
the first delivery opens the micro-step and the next forward of the model, or `step()`, ends it;
where backwards follow each other without a forward in between, `optimizer.end_micro_step()` has to.
What a block has not delivered by then is zero. A block whose parameters have all delivered leaves
at once; if one of them delivers again in the same micro-step (reentrant recompute), the block's
later gradient is added to the earlier one, and from then on the block leaves only at the end of
its micro-steps.

[Note: Whose turn]
Several ranks must launch their reduce-scatters in one order, whatever each of them is ready for
first. In the first micro-step that is the order of registration, last block first; then what rank 0
saw in its first backward. A block that is ready early waits; one that no gradient has reached on
this rank sends zeros at the end. Which blocks deliver twice is agreed on after the first micro-step
too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Slot
from offloadtrain.engine.functions import Functions
from offloadtrain.engine.interpreter import Interpreter
from offloadtrain.runtime.lanes import Buffer
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.step.prefetch_policy import ReduceOrder
from offloadtrain.step.program import Program


class GradientError(OffloadTrainError):
    """A gradient arrived that cannot be used, or at a moment when it cannot."""


class GradStatus(Enum):
    """What one delivered gradient means for the block's gradient of the step."""

    PART = auto()
    """More is to come."""
    COMPLETE = auto()
    """It is whole, launched to the host, and measured there."""
    AGAIN = auto()
    """It was taken for complete in this backward, and was not."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The gradient of a step, as every rank knows it.

    Attributes:
        squares: the sum of all squares, fp64; of the sum over ranks, with the loss scale.
        nonfinite: names of the parameters whose own sums are not finite.
        told: (ranks, n) fp64, what each said beside it.
    """

    squares: float
    nonfinite: tuple[str, ...]
    told: Tensor


@dataclass(slots=True)
class _Delivery:
    """Of one block in the micro-step in progress."""

    arrived: int = 0
    left: bool = False
    leaves_late: bool = False


class Gradients:
    """Takes gradients from autograd and leaves their sums and norms on the host."""

    def __init__(
        self,
        blocks: Sequence[Block],
        program: Program,
        interpreter: Interpreter,
        functions: Functions,
        *,
        ranks: Ranks,
        norms: Buffer,
    ) -> None:
        """`norms`: host fp64, (number of parameters,), each parameter's sum of squares, of what
        is in this rank's shards."""
        self._blocks = blocks
        self._program = program
        self._interpreter = interpreter
        self._functions = functions
        self._ranks = ranks
        self._norms = norms
        self._grad_accum_steps = program.spec.config.grad_accum_steps
        self._deliveries = {block: _Delivery() for block in blocks}
        self._trained = [block for block in blocks if block.buckets]
        slots = [slot for block in blocks for bucket in block.buckets for slot in bucket.slots]
        self._names = {slot.index: slot.name for slot in slots}
        self._number = {block: number for number, block in enumerate(self._trained)}
        last_first = range(len(self._trained) - 1, -1, -1)
        self._turns = ReduceOrder(last_first, free=ranks.is_single)
        self._agreed = ranks.is_single
        self.micro_steps = 0
        """Whole micro-steps since the last optimizer step."""
        self.open = False
        """A micro-step has begun and not ended."""

    def deliver(self, block: Block, slot: Slot) -> tuple[GradStatus, list[Block]]:
        """Autograd has put a gradient into `slot.param.grad`.

        Returns:
            What that means, and the blocks whose gradient of the step is now complete.

        Raises:
            GradientError: if it is one backward too many, or a sparse one.
        """
        if not self.open:
            self._begin()
        _check_gradient(slot)
        delivery = self._deliveries[block]
        delivery.arrived += 1
        if delivery.left:
            self._check_twice(block)
            delivery.leaves_late = True
            return GradStatus.AGAIN, []
        if delivery.arrived < block.expected or delivery.leaves_late:
            return GradStatus.PART, []
        due = [self._trained[number] for number in self._turns.ready(self._number[block])]
        for one in due:
            self._take(one)
        return (GradStatus.COMPLETE, due) if due and self._in_last else (GradStatus.PART, [])

    @property
    def _in_last(self) -> bool:
        """Whether the micro-step in progress is the last of the step."""
        return self.micro_steps + 1 == self._grad_accum_steps

    def end_micro_step(self) -> None:
        """What was not delivered by now is zero. Ignored if no micro-step is open."""
        if not self.open:
            return
        for number in self._turns.rest():
            self._take(self._trained[number])
        if self._agreed:
            for block in self._late():
                self._take(block)
        else:
            self._agree()
        for block in self._blocks:
            block.end_backward()
        self._reset_deliveries()
        self.open = False
        self.micro_steps += 1

    def drop(self) -> None:
        """Forget every gradient since the last step."""
        self._functions.delivered = {}
        for block in self._blocks:
            block.end_backward()
            for slot in (slot for bucket in block.buckets for slot in bucket.slots):
                slot.param.grad = None
        self._reset_deliveries()
        self.open = False
        self.micro_steps = 0

    def measure(self, beside: Sequence[float] = ()) -> Measured:
        """All gradients of the step; waits for the last norm, and for every rank's.

        Each parameter's sum runs over fixed segments (see `kernels`); ranks are added in order,
        then parameters in the order of `model.named_parameters()`, so that blocks, buckets and
        groups change no bit.

        Args:
            beside: what every rank tells the others in the same exchange.
        """
        self._interpreter.run(self._program.norm())
        squares = self._norms.flat.cpu()
        told_beside = torch.tensor(beside, dtype=squares.dtype, device="cpu")
        told = self._ranks.all_gather_host(torch.cat([squares, told_beside]))
        total, nonfinite = 0.0, []
        for index, values in enumerate(told[:, : squares.numel()].T.tolist()):
            of_parameter = 0.0
            for value in values:
                of_parameter += value
            if not math.isfinite(of_parameter):
                nonfinite.append(self._names[index])
            total += of_parameter
        return Measured(total, tuple(nonfinite), told[:, squares.numel() :])

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

    def _late(self) -> list[Block]:
        """Who may have something left after its turn."""
        return [block for block in self._trained if self._deliveries[block].leaves_late]

    def _agree(self) -> None:
        """At the end of the first micro-step: rank 0's order is everybody's, and a block that has
        delivered twice on any rank leaves late on all of them."""
        self._agreed, count = True, len(self._trained)
        place = {number: position for position, number in enumerate(self._turns.seen)}
        places = [float(place.get(number, count)) for number in range(count)]
        flags = [float(self._deliveries[block].leaves_late) for block in self._trained]
        self._interpreter.run(self._program.first_sums())
        of_ranks = self._ranks.all_gather_host([*places, *flags])
        first, late = of_ranks[0, :count].tolist(), of_ranks[:, count:].amax(0).tolist()
        for block, is_late in zip(self._trained, late, strict=True):
            if is_late:
                self._deliveries[block].leaves_late = True
                self._take(block)
        order = sorted(range(count), key=lambda number: (first[number], -number))
        self._turns.agree([number for number in order if not late[number]])

    def _reset_deliveries(self) -> None:
        for delivery in self._deliveries.values():
            delivery.arrived, delivery.left = 0, False
        self._turns.restart()

    def _take(self, block: Block) -> None:
        """Send what the block's parameters hold down, and let go of it on the device. Among ranks
        everybody sends, zeros where nothing is held."""
        held, self._functions.delivered = {}, {}
        for bucket in block.buckets:
            pairs = [(slot, grad) for slot in bucket.slots if (grad := slot.param.grad) is not None]
            for slot, _ in pairs:
                slot.param.grad = None
            if pairs:
                held[bucket.name] = len(pairs) == len(bucket.slots)
                self._functions.delivered[bucket.name] = pairs
        ready = self._program.grads_ready(block.name, held, last=self._in_last)
        self._interpreter.run(ready)
        self._deliveries[block].left = True


def _check_gradient(slot: Slot) -> None:
    grad = slot.param.grad
    if grad is None or grad.layout is not torch.strided:
        found = "none" if grad is None else f"a {grad.layout} one"
        raise GradientError(
            f"parameter '{slot.name}' delivered {found} instead of a dense gradient. Use "
            "sparse=False in embeddings, and hooks that leave .grad in place."
        )
    if grad.shape != slot.shape:
        raise GradientError(
            f"parameter '{slot.name}' has the shape {tuple(grad.shape)} now and had {slot.shape} "
            "at offload(), which fixes the layout of host memory: close() the optimizer, resize "
            "the model (resize_token_embeddings, …), and offload it again"
        )
