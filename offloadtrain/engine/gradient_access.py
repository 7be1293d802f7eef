"""Gradients between backward and `step()`: what code reads from `.grad`, and changes there.

[Note: Gradients of the user]
Backward takes gradients from `.grad` and brings them to the memory that Adam will read: on the
host, or on the device if the state or the sums are there. Until `step()` that memory *is* the
gradient of the user: `.grad` returns a `GradientView` of it. Making a view moves no bytes and waits
for nothing. The first function of torch that reads it waits until the lanes are empty. Adam reads
what code has written into it, so `step()` measures the norms of gradients that were used again, and
copies their sums on the device to the host again.

From `step()` on other operations use the memory. Views that code has stored get memory of their own
then, with the values that they had.

Gradients that code puts into `.grad` where backward has delivered none (`torch.autograd.grad`,
gradients per sample, surgery) stay there, and `step()` sends them as it sends those of a backward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.parameters import WITHOUT_VALUES, past_the_class, shares_memory
from offloadtrain.step.program.program import Program


class GradientAccessError(OffloadTrainError, AttributeError):
    """`.grad` cannot show this gradient. `hasattr` and `getattr` with a default see none."""


class GradientView(Tensor):
    """A view of a gradient in the memory that Adam will read.

    Its device is that of this memory. In a function with tensors of another device it takes part as
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
            # Of tensors that are no views of gradients, if it is not the host.
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
            # A view would show the next step's gradients, and nobody would notice writes.
            array = result.copy()
            array.flags.writeable = False
            return array
        for tensor, copied, version in moved:
            if copied._version != version:
                tensor.copy_(copied)
            if result is copied:  # the function writes in place
                result = tensor

        def view_again(value: Tensor) -> Tensor:
            pairs = zip(views, plain, strict=True)
            of = next((view for view, x in pairs if shares_memory(value, x)), None)
            return value if of is None else of.access.view(value)

        # Every tensor of this memory is known, as all of them lose it with the step.
        return tree_map_only(Tensor, view_again, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


_TO_NUMPY: set[Any] = {Tensor.numpy, Tensor.__array__}


class ClippedTogether(Tensor):
    """Stands for the gradients of all parameters in `torch.nn.utils.clip_grad_norm_`: one element,
    their norm. The factor that torch multiplies it by is the clip coefficient of the step."""

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
    """Hands the gradients of one engine's step out, and knows which of them may have changed."""

    def __init__(self, program: Program, settle: Callable[[], None]) -> None:
        """`settle`: waits until the gradients are in their memory, as the user may read them; a
        method of an object that is not kept alive."""
        self._program, self._settle_ref = program, weakref.WeakMethod(settle)
        self._views: dict[Slot, GradientView] = {}
        self._handed_out: set[str] = set()
        """Names of the buckets of `_views`."""
        self.has_assigned = False
        """Code has put gradients into `.grad` that step() has to send."""
        self.clipped_to = math.inf
        """The smallest norm that this step's gradients were clipped to."""
        self.emptied: set[Slot] = set()
        """Parameters whose gradient was set to None in this step."""
        self._is_used = False
        """A function has read or written a view since the last measurement."""
        self._alive = WeakIdKeyDictionary()
        """Every view that somebody refers to."""

    def has_left(self, bucket: Bucket) -> bool:
        """Tell whether gradients of the step have left the `.grad` of this bucket's parameters."""
        return bucket.is_trained and self._program.buckets[bucket.name].gradient.touched

    def shows(self, bucket: Bucket) -> bool:
        """Tell whether `of` can view gradients: neither in shards nor on the disk."""
        gradient = self._program.buckets[bucket.name].gradient
        return self._program.spec.is_single and gradient.file is None

    def of(self, bucket: Bucket, slot: Slot) -> GradientView:
        """Return the view of a parameter's gradient, which has left."""
        if slot not in self._views:
            with torch.inference_mode(False), torch.enable_grad():
                self._views[slot] = self.view(slot.view(self._flat(bucket)))
            self._handed_out.add(bucket.name)
        return self._views[slot]

    def copy(self, bucket: Bucket, slot: Slot, ranks: int) -> Tensor:
        """Copy a parameter's gradient, the mean over `ranks`, to the host, where it is measured. A
        collective of the ranks that share it."""
        gradient = self._program.buckets[bucket.name].gradient
        shard = bucket.memory[(gradient.file or gradient.adding).key].flat
        (lo, hi), sharers = bucket.piece(slot), bucket.sharers
        start = slot.offset + lo - bucket.lo if lo < hi else 0
        values = torch.empty(slot.numel, dtype=torch.float32, device="cpu")
        values[lo:hi] = shard[start : start + hi - lo] / ranks
        if not sharers.is_single:
            sharers.assemble(values, bucket.pieces(slot))
        return slot.shaped(values)

    def view(self, tensor: Tensor) -> GradientView:
        """Make a view of a tensor that lies in the memory of gradients."""
        # Whatever mode the caller is in: autograd refuses writes into views made without gradients.
        with torch.inference_mode(False), torch.enable_grad(), past_the_class():
            view: GradientView = tensor.detach().as_subclass(GradientView)
        view.access = self
        self._alive[view] = None
        return view

    def multiply(self, bucket: Bucket, factor: float) -> None:
        """Multiply the gradients of a bucket, which have left, in their memory."""
        self._flat(bucket).mul_(factor)
        self._handed_out.add(bucket.name)

    def _flat(self, bucket: Bucket) -> Tensor:
        summed = self._program.buckets[bucket.name].gradient.summed
        return bucket.memory[summed.key].flat

    def begin_use(self) -> None:
        """A function is about to read or write views."""
        if (settle := self._settle_ref()) is not None:
            settle()
        self._is_used = True

    def take_changed(self) -> set[str]:
        """Return the buckets whose gradients may have changed since the last call."""
        used, self._is_used = self._is_used, False
        return self._handed_out if used else set()

    def end_step(self) -> None:
        """The memory is about to be used again: stored views get memory of their own."""
        self._handed_out, self.clipped_to = set(), math.inf
        self.emptied.clear()
        if self._views:
            self._views.clear()
            with torch.no_grad(), past_the_class():
                for view in list(self._alive):
                    view.data = view.detach().clone()
                    view.__class__ = Tensor
            self._alive.clear()
