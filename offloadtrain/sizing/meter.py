"""Count the memory and the work of operations on fake tensors, by block.

[Note: Sums in place]
If a tensor is used twice, autograd adds its gradients, in place if nothing else refers to the first
gradient. Python always refers to fake tensors, so the trace contains an addition that makes a third
tensor, and the first one is freed after it. The memory in use is therefore measured only then.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offloadtrain.engine.autograd.forward_hooks import in_backward
from offloadtrain.runtime.grouped_products import GROUPED_PRODUCTS
from offloadtrain.sizing.ctc import CTC, CTC_BACKWARD, ctc_loss, ctc_loss_backward
from offloadtrain.sizing.known_values import with_values
from offloadtrain.sizing.operation_work import Count, Operation, count_operation

_OWN: dict[Any, Callable[..., Any]] = {
    CTC: ctc_loss,
    CTC_BACKWARD: ctc_loss_backward,
    **GROUPED_PRODUCTS,
}
"""Operations that torch does not describe for fake tensors."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation runs.

    Attributes:
        block: the block whose forward or backward is running; empty outside of all blocks.
        backward: True in backward, including the forward that recompute runs again.
    """

    block: str = ""
    backward: bool = False


GRADIENTS = Place("gradients of weights", backward=True)
"""The place of gradients from their delivery until the engine takes them."""


@dataclass(slots=True)
class Segment:
    """The operations between two changes of the place.

    Attributes:
        work: FLOPs and bytes of its operations.
        input_sizes: bytes of each block input that would be copied to the host.
        peak: peak bytes of all tensors after an operation that made one; 0: no operation did.
        at_peak: place → bytes of its tensors at the peak.
    """

    place: Place
    work: Count = field(default_factory=Count)
    input_sizes: list[int] = field(default_factory=list)
    peak: int = 0
    at_peak: dict[Place, int] = field(default_factory=dict)


@dataclass(slots=True)
class _LiveStorage:
    """A storage that is alive."""

    nbytes: int
    place: Place
    gone: weakref.ref[Any]


class Meter(TorchDispatchMode):
    """Active around forward and backward.

    A storage counts from the operation that makes it until its last tensor is gone: the order of
    autograd's frees is that of a real run, as the graph is a real one.

    Attributes:
        segments: of all that ran, in order.
        weights: storages of the weights; the caller keeps them alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments = [Segment(Place())]
        self.weights: frozenset[int] = frozenset()
        self._live = 0
        self._live_storages: dict[int, _LiveStorage] = {}
        self._by_place: Counter[Place] = Counter()
        self._added = False
        """The last operation was an addition in backward; see [Note: Sums in place]."""

    @property
    def place(self) -> Place:
        """The place of the next operations; set by `InertLanes`."""
        return self.segments[-1].place

    @place.setter
    def place(self, place: Place) -> None:
        self._look()
        self.segments.append(Segment(place))

    @property
    def holds_something(self) -> bool:
        """A tensor that was made is alive."""
        return bool(self._live_storages)

    def moved_to(self, tensor: Tensor, place: Place) -> None:
        """Count a tensor that is alive at another place from here on."""
        storage = self._live_storages.get(tensor.untyped_storage()._cdata)
        if storage is not None:
            self._by_place[storage.place] -= storage.nbytes
            self._by_place[place] += storage.nbytes
            storage.place = place

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._added:
            self._look()
        compute = partial(_OWN.get(func, func), *args, **kwargs)
        out = with_values(compute, func, args, kwargs)
        # Most operations are these; each takes as long as all that follows.
        if func.is_view or func.namespace == "prim":
            return out
        inputs = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        outputs = list(_tensors(out))
        new = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
        for tensor in new:
            self._hold(tensor)
        # Backward runs without gradients, a forward that it runs again with them.
        differentiates = not torch.is_grad_enabled() and in_backward()
        self._added = differentiates and func is torch.ops.aten.add.Tensor
        if not self._added:
            self._look()
        if new or func._schema.is_mutable:
            again = self.place.backward and torch.is_grad_enabled()
            op = Operation(func, args, inputs, outputs, again)
            count_operation(self.segments[-1].work, op, self.weights)
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._live_storages or not nbytes or tensor.device.type == "meta":
            return
        self._live_storages[key] = _LiveStorage(
            nbytes, self.place, weakref.ref(storage, partial(self._free, key))
        )
        self._by_place[self.place] += nbytes
        self._live += nbytes

    def _look(self) -> None:
        """Update the peak of the segment."""
        self._added, segment = False, self.segments[-1]
        if self._live > segment.peak:
            segment.peak, segment.at_peak = self._live, dict(self._by_place)

    def _free(self, key: int, _: weakref.ref[Any]) -> None:
        storage = self._live_storages.pop(key)
        self._by_place[storage.place] -= storage.nbytes
        self._live -= storage.nbytes


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among the values of an operation, also those in lists."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
