"""The gradients of a step: the path of each block's gradients from autograd to the tier of its
state, and the access of user code to them before `step()`.

[Note: Micro-steps]
A micro-step is the backward of one microbatch. Autograd reports when a parameter's gradient is
ready, not when backward begins or ends. `optimizer.backward(loss)` knows both. With a plain
`loss.backward()` the first delivery opens the micro-step, or in stage 3 a gather before it, and the
next forward of the model or `step()` ends it. If another microbatch is due, the forward of a block
that has delivered also ends it: a loss may be computed without calling the model
(`model.loss(batch)`). If backwards run without a forward in between, `optimizer.end_micro_step()`
must be called. A gradient that was not delivered by then is zero. A block whose parameters have all
delivered is sent at once. If a parameter delivers again in the same micro-step (reentrant
recompute), the later gradient is added to the earlier one, and from then on the block is sent only
at the end of its micro-steps.

[Note: Whose turn]
All ranks must launch their reduce-scatters in the same order, independent of what is ready first on
each. In the first micro-step that is the order of registration, last block first; later, the order
of rank 0's first backward. A block that is ready early waits. A block without a gradient on this
rank sends zeros at the end. After the first micro-step ranks also agree on the blocks that deliver
twice.

[Note: Before a gather]
In ZeRO stage 3 backward also gathers weights, on the lane of the reduce-scatters, and every rank
must launch both in the same order. A block is never complete on a rank whose tokens reach only some
of its experts. So before each gather, the blocks that backward has passed are sent, complete or
not. Autograd runs nodes in the reverse of the order in which forward made them: a block whose first
forward began after that of the block to be gathered gets no more gradients. Ranks on which it
is complete have sent it after the previous gather. `InFlight` stores the clocks of forwards
whose backward has not run.

[Note: Gradients of the user]
Backward moves gradients from `.grad` to the memory that Adam will read: on the
host, or on the device if the state or the sums are there. Until `step()` that memory *is* the
user's gradient: `.grad` returns a `GradientView` of it. Making a view moves no bytes and does not
wait. The first torch function that reads it waits until the lanes are idle. Adam reads
what code has written into it, so `step()` measures the norms of used gradients again, and
copies their sums on the device to the host again.

From `step()` on, other operations use the memory. Views that user code has stored then get their
own memory, with the values that they had.

Gradients that user code assigns to `.grad` without a backward (`torch.autograd.grad`, gradients per
sample, gradient surgery) stay there, and `step()` sends them as it sends those of a backward.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.autograd.hooks import is_reached
from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, Delivered, Slot
from offloadtrain.engine.interpreter import Functions, Interpreter
from offloadtrain.engine.parameters import (
    WITHOUT_VALUES,
    gradient_of,
    past_the_class,
    shares_memory,
    take_gradients,
)
from offloadtrain.runtime.process_group import Ranks
from offloadtrain.runtime.tensor_parts import LocalPart
from offloadtrain.step.program.program import Program


class InFlight:
    """Records when each block was read in the forwards that the present backward belongs to.

    Outside of pipelines these are all forwards since the last micro-step: one backward may cover
    several. In a pipeline the forwards of later microbatches run before this backward. Backwards
    run in the order of the forwards, so the clocks of each forward are stored until its backward.
    """

    def __init__(self, blocks: Sequence[Block], *, in_order: bool) -> None:
        """`in_order`: backwards run in the order of their forwards, oldest first."""
        self._blocks, self._in_order = blocks, in_order
        self._earlier: deque[dict[Block, tuple[int, int]]] = deque()
        """For each forward except the last: block → its first and its last clock."""
        self._foreign_task = -1
        """Graph task of the last backward that delivers nothing to this model."""
        for block in blocks:
            block.clock.in_order = in_order

    def forward_begins(self) -> None:
        """A forward of the model begins outside of backward."""
        if not self._in_order or not torch.is_grad_enabled():
            return
        # If the last forward is pending: there may be none, or its backward may have run.
        if any(block.clock.first for block in self._blocks):
            self._earlier.append(
                {block: (block.clock.first, block.clock.last) for block in self._blocks}
            )
            for block in self._blocks:
                block.clock.first = 0

    def clocks(self, block: Block) -> tuple[int, int]:
        """Return when the block was first and last read; the first is 0 if it was not read."""
        return self._earlier[0][block] if self._earlier else (block.clock.first, block.clock.last)

    def backward_ends(self) -> None:
        """The backward of the oldest pending forward is over."""
        if self._earlier:
            self._earlier.popleft()
            return
        for block in self._blocks:
            block.clock.first = 0

    def drop(self) -> None:
        """No backward will follow."""
        self._earlier.clear()
        self.backward_ends()

    def will_deliver(self, trained: Sequence[Block]) -> bool:
        """Return True if the present backward is a plain backward of this model: it reaches
        parameters that a forward has read. A backward of another model through this one's frozen
        weights does not."""
        task = torch._C._current_graph_task_id()
        if task == self._foreign_task:
            return False
        read = (block for block in reversed(trained) if block.clock.first)
        params = (slot.param for block in read for bucket in block.buckets for slot in bucket.slots)
        if any(map(is_reached, params)):
            return True
        self._foreign_task = task
        return False


_T = TypeVar("_T")


class ReduceOrder(Generic[_T]):
    """The order in which several ranks send the gradients of their blocks; a block that is ready
    before its turn waits.

    Attributes:
        order: order of all blocks that have a turn.
        is_agreed: the order is equal on all ranks. Before, each rank follows the order of
            registration; they agree at the end of the first micro-step.
        ready_blocks: blocks in the order in which they became ready in this pass.
    """

    def __init__(self, order: Sequence[_T]) -> None:
        self.order = order
        self.is_agreed = False
        self._next = 0
        self.ready_blocks: dict[_T, None] = {}

    def ready(self, block: _T) -> list[_T]:
        """Return the blocks to send, in order, now that `block` is ready."""
        self.ready_blocks[block] = None
        # A ready block waits until all blocks before it are sent: ranks match collectives by their
        # order, and a different order would sum gradients of different blocks.
        due = list(takewhile(lambda b: b in self.ready_blocks, self.remaining))
        self._next += len(due)
        return due

    @property
    def remaining(self) -> Sequence[_T]:
        """The blocks not sent in this pass, in order; the first is next."""
        return self.order[self._next :]

    def restart(self) -> None:
        """A pass has ended."""
        self._next = 0
        self.ready_blocks = {}


class GradientError(OffloadTrainError):
    """A gradient cannot be used, or arrived at a time when it cannot be used."""


@dataclass(slots=True)
class _Delivery:
    """The deliveries of a block in the present micro-step.

    Attributes:
        expected: number of its trained parameters, each of which delivers a gradient.
        is_sent: its gradients were sent.
        is_sent_late: it delivers more than once, and is sent when the micro-step ends.
    """

    expected: int
    arrived: int = 0
    is_sent: bool = False
    is_sent_late: bool = False


class Gradients:
    """Takes gradients from autograd and sends each block's to the tier of its state."""

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
        # A single rank sends every block as soon as it is ready, and gathers nothing in backward.
        self._turns = None if ranks.is_single else ReduceOrder(self._trained[::-1])
        self._in_flight = None if ranks.is_single else InFlight(blocks, in_order=in_order)
        self.micro_steps = 0
        """Number of completed micro-steps since the last optimizer step."""
        self.open = False
        """True while a micro-step is in progress."""
        self.emptied: set[nn.Parameter] = set()
        """Parameters whose `.grad` a hook has set to None in this backward."""
        self.in_transit = False
        """Gradients were sent since the caller set this to False."""
        self.in_explicit_backward = False
        """`optimizer.backward` runs; its micro-step may not have delivered anything yet."""

    def deliver(self, block: Block, slot: Slot) -> list[Block] | None:
        """Autograd has put a gradient into `slot.param.grad`.

        Returns:
            The blocks whose gradient of the step is now complete; None if the gradients of the
            block were sent before this one arrived.

        Raises:
            GradientError: there are too many backwards, or the gradient is sparse or has another
                shape.
        """
        if not self.open:
            self._begin()
        if block.compiled:
            block.graphs.end()
        grad, delivery = gradient_of(slot.param), self._deliveries[block]
        # A user's autograd function may return None for a parameter: it has no gradient, or has
        # delivered it in a nested backward.
        if grad is None and slot.param.requires_grad and slot.param not in self.emptied:
            if delivery.is_sent:
                return []
        elif grad is None or grad.layout is not torch.strided or grad.shape != slot.global_shape:
            raise _bad_gradient(slot, grad)
        delivery.arrived += 1
        # The block was sent: this gradient stays in `.grad` until the micro-step ends.
        if delivery.is_sent:
            if self._turns is not None and self._turns.is_agreed:
                raise GradientError(
                    f"block '{block.name}' received a second gradient in one backward, which it "
                    f"did not in the first one: with {self._ranks.size} ranks the order of their "
                    "sums is fixed by then. Use recompute with use_reentrant=False, or let the "
                    "first backward take every path of the model"
                )
            delivery.is_sent_late = True
            return None
        # Sent as soon as it is complete, so that gather, copy and norm run concurrently with the
        # rest of backward.
        if delivery.arrived < delivery.expected or delivery.is_sent_late:
            return []
        due = [block] if self._turns is None else self._turns.ready(block)
        for ready_block in due:
            self._send(ready_block)
        return due if self._in_last else []

    def begin_root_forward(self) -> None:
        """A forward of the model begins outside of backward."""
        self.end_micro_step()
        if self._in_flight is not None:
            self._in_flight.forward_begins()

    def backward_reached(self, clock: int, again: Block | None) -> None:
        """Backward is about to use a block whose forward began at `clock`: send the blocks that it
        has passed, see [Note: Before a gather].

        Args:
            again: that block, if its forward is about to be recomputed; blocks without a gradient
                may be recomputed next.
        """
        turns, in_flight = self._turns, self._in_flight
        assert turns is not None and in_flight is not None, "a single rank gathers nothing"
        clock = clock if again is None else in_flight.clocks(again)[1]
        while turns.remaining:
            block = turns.remaining[0]
            # A block that no forward of this rank has entered stays on the device: every rank
            # gathers the others.
            first, _ = in_flight.clocks(block)
            over = first > clock if first else not block.source.gathers
            if not over or (again is not None and not self._deliveries[block].arrived):
                return
            if not self.open:
                if not (self.in_explicit_backward or in_flight.will_deliver(self._trained)):
                    return
                self._begin()
            for ready in turns.ready(block):
                self._send(ready)

    @property
    def _in_last(self) -> bool:
        """True if the present micro-step is the last of the step."""
        return self.micro_steps + 1 == self._grad_accum_steps

    def forward_begins(self, blocks: Sequence[Block]) -> None:
        """A forward outside of backward reads these blocks. If one of them has delivered, it is the
        forward of the next microbatch."""
        if self.open and not self._in_last:
            if any(self._deliveries[block].arrived for block in blocks):
                self.end_micro_step()

    def end_micro_step(self) -> None:
        """End the micro-step: gradients not delivered by now are zero. No-op if none is open."""
        if not self.open:
            return
        # The other ranks reduce these blocks: this rank must launch the same collectives.
        for block in self._trained[::-1] if self._turns is None else self._turns.order:
            if not self._deliveries[block].is_sent:
                self._send(block)
        if self._turns is None or self._turns.is_agreed:
            for block in self._trained:
                if self._deliveries[block].is_sent_late:
                    self._send(block)
        else:
            self._agree(self._turns)
        if self._in_flight is not None:
            self._in_flight.backward_ends()
        self._end_backward()
        self.micro_steps += 1

    def take_assigned(self) -> None:
        """Send the gradients that user code has assigned to `.grad`, as a micro-step if there was
        none.

        Raises:
            GradientError: a gradient is sparse.
        """
        if not self.micro_steps and not self.open:
            if not any(self._holds_gradients(block) for block in self._trained):
                return
            self._begin()
        self.end_micro_step()
        for block in filter(self._holds_gradients, self._trained):
            self._send(block)

    def _holds_gradients(self, block: Block) -> bool:
        for slot in (slot for bucket in block.buckets for slot in bucket.slots):
            grad = gradient_of(slot.param)
            if grad is not None and grad.layout is not torch.strided:
                raise _bad_gradient(slot, grad)
            if grad is not None:
                return True
        return False

    def drop(self, *, in_flight: bool = True) -> None:
        """Drop every gradient since the last step; `in_flight`: no backward will follow."""
        # Gradients that were not sent return to the allocator, in the order of compute.
        self._functions.delivered = {}
        for bucket in (bucket for block in self._trained for bucket in block.buckets):
            take_gradients(bucket.params)
        if in_flight and self._in_flight is not None:
            self._in_flight.drop()
        self._end_backward()
        self.micro_steps = 0

    def _begin(self) -> None:
        if self.micro_steps >= self._grad_accum_steps:
            raise GradientError(
                f"{self.micro_steps + 1} backward passes before step(), but grad_accum_steps = "
                f"{self._grad_accum_steps}. Call step() first, or offload with grad_accum_steps = "
                f"{self.micro_steps + 1}."
            )
        self.open = True

    def _agree(self, turns: ReduceOrder[Block]) -> None:
        """At the end of the first micro-step: all ranks adopt rank 0's order, and a block that has
        delivered twice on any rank is sent late on all of them."""
        count = len(self._trained)
        place = {block: float(number) for number, block in enumerate(turns.ready_blocks)}
        places = [place.get(block, float(count)) for block in self._trained]
        flags = [float(self._deliveries[block].is_sent_late) for block in self._trained]
        # Waits for this rank's reduce-scatters. Once per run: it exposes the first backward's.
        self._interpreter.run(self._program.wait_for_first_sums)
        of_ranks = self._ranks.everyone.all_gather_host([*places, *flags])
        first, late = of_ranks[0, :count].tolist(), of_ranks[:, count:].amax(0).tolist()
        for block, is_late in zip(self._trained, late, strict=True):
            if is_late:
                self._deliveries[block].is_sent_late = True
                self._send(block)
        order = sorted(range(count), key=lambda number: (first[number], -number))
        turns.order = [self._trained[number] for number in order if not late[number]]
        turns.is_agreed = True

    def _end_backward(self) -> None:
        """No backward is in progress."""
        # Graphs that are still alive hold handles: their backward spans end here, or their reads
        # would extend into step(), which uploads new weights.
        for block, delivery in self._deliveries.items():
            if block.graphs.spans:
                block.graphs.end()
            delivery.arrived, delivery.is_sent = 0, False
        if self._turns is not None:
            self._turns.restart()
        self.emptied.clear()
        self.open = False

    def _send(self, block: Block) -> None:
        """Send the block's gradients from `.grad` to the memory that Adam will read, and free them.
        With several ranks every rank sends; zeros if it has no gradient."""
        complete: dict[str, bool] = {}
        delivered: dict[str, Delivered] = {}
        for bucket in block.buckets:
            # Stored until the gather's launch, which frees them: it runs on compute, so that
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
        what = "a hook has set it to None" if grad is None else f"it is {grad.layout}"
        return GradientError(
            f"the gradient of parameter '{slot.name}' cannot be used, as {what}. Use "
            "sparse=False in embeddings, and hooks that leave .grad in place"
        )
    return GradientError(
        f"parameter '{slot.name}' has the shape {tuple(grad.shape)} now and had {slot.shape} "
        "at offload(), which fixes the layout of host memory: close() the optimizer, resize "
        "the model (resize_token_embeddings, …), and offload it again"
    )


class GradientAccessError(OffloadTrainError, AttributeError):
    """`.grad` cannot show this gradient. `hasattr` and `getattr` with a default treat it as
    absent."""


class GradientView(Tensor):
    """A view of a gradient in the memory that Adam will read.

    Its device is that of this memory. A function with tensors of another device receives
    a copy on that device, which is copied back if the function has written into it.
    """

    access: GradientAccess

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in WITHOUT_VALUES:
            with past_the_class():
                return func(*args, **kwargs)
        views: list[GradientView] = []
        plain: list[Tensor] = []
        moved: list[tuple[Tensor, Tensor, int]] = []
        with past_the_class():
            leaves = tree_leaves((args, kwargs))
            devices = (
                x.device for x in leaves if isinstance(x, Tensor) and type(x) is not GradientView
            )
            # Device of the other tensors, if it is not the host.
            device = next((device for device in devices if device.type != "cpu"), None)

            def readable(view: GradientView) -> Tensor:
                view.access.begin_use()
                views.append(view)
                plain.append(tensor := view.as_subclass(Tensor))
                if device is None or device == tensor.device:
                    return tensor
                copied = tensor.to(device)
                moved.append((tensor, copied, copied._version))
                return copied

            args, kwargs = tree_map_only(GradientView, readable, (args, kwargs))
        result = func(*args, **kwargs)
        if func in _TO_NUMPY:
            # An array view would show the next step's gradients, and writes would go unnoticed.
            array = result.copy()
            array.flags.writeable = False
            return array
        for tensor, copied, version in moved:
            if copied._version != version:
                tensor.copy_(copied)
            if result is copied:  # in-place function
                result = tensor

        def view_again(value: Tensor) -> Tensor:
            pairs = zip(views, plain, strict=True)
            of = next((view for view, x in pairs if shares_memory(value, x)), None)
            return value if of is None else of.access.view(value)

        # Every tensor of this memory is tracked, as all of them lose it when the step ends.
        return tree_map_only(Tensor, view_again, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


_TO_NUMPY: set[Any] = {Tensor.numpy, Tensor.__array__}


class ClippedTogether(Tensor):
    """Represents the gradients of all parameters in `torch.nn.utils.clip_grad_norm_`: a single
    element, their norm. The factor by which torch multiplies it becomes the clip coefficient."""

    on_factor: Callable[[float], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.mul_, torch._foreach_mul_):
            tree_leaves(args[0])[0].on_factor(float(args[1]))
        with past_the_class():
            return func(*args, **kwargs or {})


class GradientAccess:
    """Returns views of the gradients of an engine's step, and tracks which of them may have
    changed."""

    def __init__(self, program: Program, begin_access: Callable[[], None]) -> None:
        """`begin_access`: waits until the gradients have arrived in their memory, as the user may
        read them; a bound method whose object is referenced weakly."""
        self._program, self._begin_access_ref = program, weakref.WeakMethod(begin_access)
        self._views: dict[Slot, GradientView] = {}
        self._handed_out: set[str] = set()
        """Names of the buckets of `_views`."""
        self.has_assigned = False
        """User code has assigned gradients to `.grad` that step() has to send."""
        self.clipped_to = math.inf
        """The smallest norm that this step's gradients were clipped to."""
        self.emptied: set[Slot] = set()
        """Parameters whose gradient was set to None in this step."""
        self._is_used = False
        """A function has read or written a view since the last measurement."""
        self._alive = WeakIdKeyDictionary()
        """Every live view."""

    def has_left(self, bucket: Bucket) -> bool:
        """Return True if gradients of the step have left the `.grad` of this bucket's
        parameters."""
        return bucket.is_trained and self._program.buckets[bucket.name].gradient.touched

    def shows(self, bucket: Bucket) -> bool:
        """Return True if `of` can view the gradients: neither in shards nor on the disk."""
        gradient = self._program.buckets[bucket.name].gradient
        return self._program.spec.is_single and gradient.file is None

    def of(self, bucket: Bucket, slot: Slot) -> GradientView:
        """Return the view of a parameter's gradient, which has left `.grad`."""
        if slot not in self._views:
            with torch.inference_mode(False), torch.enable_grad():
                self._views[slot] = self.view(slot.view(self._flat(bucket)))
            self._handed_out.add(bucket.name)
        return self._views[slot]

    def copy(self, bucket: Bucket, slot: Slot, ranks: int) -> Tensor:
        """Return a copy on the host of a parameter's measured gradient, the mean over `ranks`. A
        collective of the ranks that share it."""
        gradient = self._program.buckets[bucket.name].gradient
        shard = bucket.memory[(gradient.file or gradient.adding).key].flat
        lo, hi = bucket.piece(slot)
        start = slot.offset + lo - bucket.lo if lo < hi else 0
        mean = shard[start : start + hi - lo] / ranks
        return bucket.assembled(slot, mean.to("cpu", torch.float32))

    def view(self, tensor: Tensor) -> GradientView:
        """Make a view of a tensor in the memory of gradients."""
        # In any mode of the caller: autograd rejects writes into views made under no_grad.
        with torch.inference_mode(False), torch.enable_grad(), past_the_class():
            view: GradientView = tensor.detach().as_subclass(GradientView)
        view.access = self
        self._alive[view] = None
        return view

    def multiply(self, bucket: Bucket, factor: float) -> None:
        """Multiply a bucket's gradients, which have left `.grad`, in place."""
        self._flat(bucket).mul_(factor)
        self._handed_out.add(bucket.name)

    def _flat(self, bucket: Bucket) -> Tensor:
        summed = self._program.buckets[bucket.name].gradient.summed
        return bucket.memory[summed.key].flat

    def begin_use(self) -> None:
        """A function is about to read or write views."""
        if (begin_access := self._begin_access_ref()) is not None:
            begin_access()
        self._is_used = True

    def take_changed(self) -> set[str]:
        """Return the buckets whose gradients may have changed since the last call."""
        used, self._is_used = self._is_used, False
        return self._handed_out if used else set()

    def end_step(self) -> None:
        """The memory is about to be reused: stored views get their own memory."""
        self._handed_out, self.clipped_to = set(), math.inf
        self.emptied.clear()
        if self._views:
            self._views.clear()
            with torch.no_grad(), past_the_class():
                for view in list(self._alive):
                    view.data = view.detach().clone()
                    view.__class__ = Tensor
            self._alive.clear()
