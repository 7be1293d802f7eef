"""Counts the memory and the work of operations on fake tensors, by block.

Work is FLOPs of matrix products by the sides of their weights, FLOPs of attention, and bytes of
all other operations.

[Note: Sums in place]
If a tensor is used twice, autograd adds its gradients, in place if nothing else refers to the first
gradient. Python always refers to fake tensors, so the trace contains an addition that makes a third
tensor, after which the first is freed. The memory in use is therefore measured after that.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from offloadtrain.engine.autograd.forward_hooks import in_backward
from offloadtrain.plan.costs.device_time import STRIDED
from offloadtrain.plan.costs.microbatch import AttentionKind, Work
from offloadtrain.plan.tracing.values import (
    CTC,
    CTC_BACKWARD,
    ctc_loss,
    ctc_loss_backward,
    with_values,
)
from offloadtrain.runtime.grouped_products import GROUPED_PRODUCTS

_ATEN = torch.ops.aten

_META = torch.device("meta")

_PRODUCTS = {_ATEN.mm: 0, _ATEN.addmm: 1, _ATEN.bmm: 0, _ATEN.baddbmm: 1, _ATEN._grouped_mm: 0}
"""Matrix products → index of their first operand."""

_BATCHED = frozenset({_ATEN.bmm, _ATEN.baddbmm})

_CONVOLUTIONS = {_ATEN.convolution: 1, _ATEN._convolution: 1, _ATEN.convolution_backward: 2}
"""Convolutions → index of their weight."""

_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: 4,
    _ATEN._scaled_dot_product_flash_attention: 4,
    _ATEN._scaled_dot_product_efficient_attention: 6,
}
_ATTENTION_BACKWARD = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: 7,
    _ATEN._scaled_dot_product_flash_attention_backward: 11,
    _ATEN._scaled_dot_product_efficient_attention_backward: 11,
}
"""Fused attention → index of `is_causal`; in backward the gradient comes before the queries."""

_READS = {
    _ATEN.embedding: 1,
    _ATEN.index: 1,
    _ATEN.index_select: 1,
    _ATEN.gather: 1,
    _ATEN.nll_loss_forward: 1,
    _ATEN.nll_loss_backward: 0,
}
"""Operations that read only parts of their operands → bytes read per byte written."""

_TOUCHES = frozenset(
    {_ATEN.index_put_, _ATEN.scatter_, _ATEN.scatter_add_, _ATEN.index_add_, _ATEN.index_copy_}
)
"""Operations that change some elements of their first operand, as many as the others have."""

_OVERWRITES = frozenset({_ATEN.copy_, _ATEN.fill_, _ATEN.zero_})
"""Operations that do not read their first operand."""

_MAKES_NOTHING = frozenset(
    {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided}
)
"""Operations that allocate memory without setting values."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A call of a torch operation.

    Attributes:
        args: positional arguments.
        inputs, outputs: its tensors.
        again: it belongs to a recomputed forward.
    """

    func: Any
    args: tuple[Any, ...]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    again: bool = False


def count_operation(work: Work, op: Operation, weights: Set[int]) -> None:
    """Add an operation to `work`. `weights`: storages of the model's weights."""
    kind = op.func._overloadpacket
    if kind in _MAKES_NOTHING:
        return
    work.launches += 1
    if kind in _PRODUCTS:
        _count_product(work, op, kind, weights)
    elif kind in _CONVOLUTIONS:
        _count_convolution(work, op, kind)
    elif kind in _ATTENTION or kind in _ATTENTION_BACKWARD:
        _count_attention(work, op, kind)
    else:
        work.nbytes += _moved(op, kind)


def _count_product(work: Work, op: Operation, kind: Any, weights: Set[int]) -> None:
    first = _PRODUCTS[kind]
    a, b = op.args[first], op.args[first + 1]
    batch = a.shape[0] if a.dim() == b.dim() == 3 else 1
    weight = next((tensor for tensor in (b, a) if tensor.untyped_storage()._cdata in weights), None)
    if weight is not None:
        sides = weight.shape[-2:]
    elif kind in _BATCHED:  # attention with explicit scores: its reads and writes count as well
        sides = sorted((*a.shape[-2:], b.shape[-1]))[:2]
        work.nbytes += sum(map(_nbytes, (*op.inputs, *op.outputs)))
    else:  # the gradient of a weight
        sides = op.outputs[0].shape[-2:]
    flops = 2.0 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1]
    work.products[sqrt(prod(sides))] += flops
    work.recomputed += op.again * flops


def _count_convolution(work: Work, op: Operation, kind: Any) -> None:
    weight = op.args[_CONVOLUTIONS[kind]]
    backward = kind is _ATEN.convolution_backward
    inputs = op.args[1] if backward else op.args[0]
    outputs = op.args[0] if backward else op.outputs[0]
    transposed = op.args[7 if backward else 6]
    places = inputs if transposed else outputs
    times = sum(op.args[10][:2]) if backward else 1  # gradients of inputs and of weights
    flops = 2.0 * times * places.shape[0] * prod(places.shape[2:]) * weight.numel()
    outward, inward = weight.shape[0], prod(weight.shape[1:])
    work.products[sqrt(outward * inward)] += flops
    work.recomputed += op.again * flops
    if inward * 2 <= inputs.shape[1]:  # a grouped convolution: few FLOPs per channel
        work.nbytes += sum(map(_nbytes, (*op.inputs, *op.outputs)))


def _count_attention(work: Work, op: Operation, kind: Any) -> None:
    if kind in _ATTENTION:
        place, (q, k, v) = _ATTENTION[kind], op.args[:3]
        flops: float = sdpa_flop_count(q.shape, k.shape, v.shape)
    else:
        place, (grad, q, k, v) = _ATTENTION_BACKWARD[kind], op.args[:4]
        flops = sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    causal = len(op.args) > place and bool(op.args[place])
    kind_of = AttentionKind(q.shape[-3] * q.shape[-1], k.shape[-2], causal)
    work.attention[kind_of] += flops
    work.recomputed += op.again * flops


def _moved(op: Operation, kind: Any) -> float:
    """Return the bytes that an operation reads and writes."""
    if kind in _TOUCHES:
        return 3 * sum(map(_nbytes, op.inputs[1:]))
    if kind in _OVERWRITES:
        return sum(map(_nbytes, op.inputs))
    made = sum(map(_nbytes, op.outputs))
    if (share := _READS.get(kind)) is not None:
        return made + share * made
    slower = STRIDED if any(map(_is_strided, op.inputs)) else 1
    return slower * (made + sum(map(_nbytes, op.inputs)))


def _is_strided(tensor: Tensor) -> bool:
    """Return True if there are gaps between a tensor's elements, as in halves of heads."""
    spans = ((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() < 1 + sum(spans)


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; of an expanded tensor, those of its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


_OWN: dict[Any, Callable[..., Any]] = {
    CTC: ctc_loss,
    CTC_BACKWARD: ctc_loss_backward,
    **GROUPED_PRODUCTS,
}
"""Implementations of operations that torch does not define for fake tensors."""


@dataclass(frozen=True, slots=True)
class Place:
    """Location of an operation in the step.

    Attributes:
        block: the block whose forward or backward is running; empty outside of all blocks.
        backward: True in backward, including the forward that recompute runs again.
    """

    block: str = ""
    backward: bool = False


GRADIENTS = Place("gradients of weights", backward=True)
"""The place of gradients from their accumulation until the engine takes them."""


@dataclass(slots=True)
class Segment:
    """The operations between two changes of the place.

    Attributes:
        work: FLOPs and bytes of its operations.
        input_sizes: bytes of each block input that would be copied to the host.
        peak: peak bytes of all tensors after an operation that made a tensor; 0: there was none.
        at_peak: place → bytes of its tensors at the peak.
        operations: number of operations in a block's forward, without views.
    """

    place: Place
    work: Work = field(default_factory=Work)
    input_sizes: list[int] = field(default_factory=list)
    peak: int = 0
    at_peak: dict[Place, int] = field(default_factory=dict)
    operations: int = 0


MOST_OPERATIONS = 2048
"""Limit on operations in a layer's forward: a longer trace takes minutes. A layer has about 50; a
loop over tokens, such as a scan in plain Python, has a few per token."""


class TooManyOperationsError(Exception):
    """The forward of a layer has more than `MOST_OPERATIONS`."""


@dataclass(slots=True)
class _LiveStorage:
    """A storage that is alive."""

    nbytes: int
    place: Place
    gone: weakref.ref[Any]


class Meter(TorchDispatchMode):
    """A dispatch mode that measures a forward and backward run under it.

    A storage counts from the operation that makes it until its last tensor is gone. Autograd frees
    tensors in the order of a real run, since the graph is a real one.

    Attributes:
        segments: segments of the step, in order.
        weights: storages of the weights; the caller keeps them alive.
    """

    def __init__(self, *, knows_values: bool = True) -> None:
        """`knows_values`: tensors may carry known values: [Note: Known values] in `values`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._knows_values = knows_values
        self.segments = [Segment(Place())]
        self.weights: frozenset[int] = frozenset()
        self._live = 0
        self._live_storages: dict[int, _LiveStorage] = {}
        self._by_place: Counter[Place] = Counter()
        self._added = False
        """The last operation was an addition in backward; see [Note: Sums in place]."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: do not wrap for torch's compiler, which the wrapper would import."""
        return False

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
        """True if a tensor made under this mode is alive."""
        return bool(self._live_storages)

    def moved_to(self, tensor: Tensor, place: Place) -> None:
        """Count a live tensor at another place from now on."""
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
        out = with_values(compute, func, args, kwargs) if self._knows_values else compute()
        if func is _ATEN.empty_like.default and kwargs.get("device") == _META:
            return out  # the engine's description of a tensor
        # Fast path for views and the like, which are most operations.
        if func.is_view or func.namespace == "prim":
            return out
        self.segments[-1].operations += bool(self.place.block) and not self.place.backward
        # Not raised in the operations above: torch calls some in places where errors are fatal.
        if self.segments[-1].operations > MOST_OPERATIONS:
            raise TooManyOperationsError
        inputs = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        outputs = list(_tensors(out))
        new = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
        for tensor in new:
            self._hold(tensor)
        # Backward runs without gradients enabled, a recomputed forward with them.
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
        if key in self._live_storages or not nbytes:
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
    """Yield the tensors among the values of an operation, including those in lists."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
