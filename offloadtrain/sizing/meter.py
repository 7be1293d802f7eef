"""Counts what operations on fake tensors hold and compute, by the block that they are a part of."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import log2
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> float:
    return float(sdpa_flop_count(q.shape, k.shape, v.shape))


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> float:
    return float(sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape))


_FLOPS: dict[Any, Any] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Operation → its FLOPs; torch's own table lacks attention on the CPU."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation runs.

    Attributes:
        block: the block whose forward or backward is running; empty outside of all.
        backward: in a backward; the forward that a recompute runs again is a part of it.
    """

    block: str = ""
    backward: bool = False


GRADIENTS = Place("gradients of weights", backward=True)
"""Stands for the place of gradients from their delivery until the engine takes them."""


@dataclass(slots=True)
class Count:
    """What the operations of a place compute and move: see `plan.microbatch.Work`.

    Attributes:
        width_flops: the sum of FLOPs times log2 of the geometric mean of the sides of a product's
            weight.
    """

    flops: float = 0.0
    nbytes: int = 0
    launches: int = 0
    width_flops: float = 0.0

    def add(self, other: Count) -> None:
        self.flops += other.flops
        self.nbytes += other.nbytes
        self.launches += other.launches
        self.width_flops += other.width_flops


@dataclass(slots=True)
class Segment:
    """What happens between two changes of the place.

    Attributes:
        work: what its operations computed and moved.
        input_sizes: bytes of each block input that would go to the host.
        peak: the most that all tensors held when one was made; 0: none was.
        at_peak: that moment's place → bytes of its tensors.
    """

    place: Place
    work: Count = field(default_factory=Count)
    input_sizes: list[int] = field(default_factory=list)
    peak: int = 0
    at_peak: dict[Place, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
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
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments = [Segment(Place())]
        self._live = 0
        self._held: dict[int, _Held] = {}
        self._by_place: Counter[Place] = Counter()

    @property
    def place(self) -> Place:
        """Where the next operations run; set by whoever knows."""
        return self.segments[-1].place

    @place.setter
    def place(self, place: Place) -> None:
        self.segments.append(Segment(place))

    def moved_to(self, tensor: Tensor, place: Place) -> None:
        """Count a tensor that is alive at another place from here on."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is not None:
            self._by_place[held.place] -= held.nbytes
            self._by_place[place] += held.nbytes
            held.place = place

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # Most operations are these; each takes as long as all that follows.
        if func.is_view or func.namespace == "prim":
            return out
        given = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        known = {one.untyped_storage()._cdata for one in given}
        made = list(_tensors(out))
        new = [one for one in made if one.untyped_storage()._cdata not in known]
        for one in new:
            self._hold(one)
        if new or func._schema.is_mutable:
            self._count(func, args, kwargs, out, sum(_nbytes(one) for one in (*given, *made)))
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._held or not nbytes or tensor.device.type == "meta":
            return
        self._held[key] = _Held(nbytes, self.place, weakref.ref(storage, partial(self._free, key)))
        self._by_place[self.place] += nbytes
        self._live += nbytes
        segment = self.segments[-1]
        if self._live > segment.peak:
            segment.peak, segment.at_peak = self._live, dict(self._by_place)

    def _free(self, key: int, _: weakref.ref[Any]) -> None:
        held = self._held.pop(key)
        self._by_place[held.place] -= held.nbytes
        self._live -= held.nbytes

    def _count(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, nbytes: int
    ) -> None:
        work = self.segments[-1].work
        work.launches += 1
        of = _FLOPS.get(func._overloadpacket)
        if of is None:
            work.nbytes += nbytes
        else:
            flops = float(of(*args, **kwargs, out_val=out))
            work.flops += flops
            work.width_flops += flops * log2(max(_width(args), 1.0))


def _width(args: tuple[Any, ...]) -> float:
    """Return the geometric mean of the sides of the last operand: of a product, its weight's."""
    sides = [one.shape for one in _tensors(args) if one.dim() >= 2]
    if not sides:
        return 1.0
    return float((sides[-1][-1] * sides[-1][-2]) ** 0.5)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among an operation's values, which are flat but for lists of tensors."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
