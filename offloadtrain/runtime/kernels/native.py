"""The native extension, called with raw addresses: ten times cheaper than DLPack tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offloadtrain.runtime.kernels.scalars import BlendScalars, Scalars, coefficients_of
from offloadtrain.runtime.kernels.state import Fp32State, Int8State, Layout, Split16State, State

_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class Native:
    """The loaded extension."""

    def __init__(self) -> None:
        self._module: Any = importlib.import_module("offloadtrain._native")
        self.isas: list[str] = self._module.isas()

    def use_isa(self, isa: str) -> None:
        self._module.use_isa(isa)

    def set_threads(self, count: int, cpus: Sequence[int]) -> None:
        self._module.set_threads(count, list(cpus))

    def update(
        self,
        state: State,
        out: State,
        grad: Tensor,
        working: Tensor | None,
        layout: Layout | None,
        s: Scalars,
    ) -> None:
        before = _addresses(state)
        after = before if out is state else _addresses(out)
        scalars, numel = (s.rule, coefficients_of(s)), grad.numel()
        if isinstance(state, Fp32State):
            target = (0, 0) if working is None else _described(working)
            self._module.update_fp32(before, after, _described(grad), *target, numel, scalars)
            return
        assert layout is not None
        where = (numel, (layout.address, layout.count), (s.seed & 0xFFFFFFFFFFFFFFFF, s.step))
        if isinstance(state, Split16State):
            self._module.update_split16(before, after, _described(grad), *where, scalars)
        elif isinstance(state, Int8State):
            code = _CODES[state.weight.dtype]
            self._module.update_int8(before, after, _described(grad), code, *where, scalars)

    def accumulate(self, total: Tensor, grad: Tensor, first: bool) -> None:
        self._module.accumulate(total.data_ptr(), _described(grad), total.numel(), first)

    def accumulate_squares(
        self, total: Tensor, grad: Tensor, layout: Layout, first: bool, squares: Tensor
    ) -> None:
        slots = (layout.address, layout.count)
        self._module.accumulate_squares(
            total.data_ptr(), _described(grad), slots, first, squares.data_ptr()
        )

    def cast(self, source: Tensor, target: Tensor) -> None:
        self._module.cast(source.data_ptr(), *_described(target), source.numel())

    def copy_flat(self, source: Tensor, target: Tensor) -> None:
        self._module.copy(source.data_ptr(), target.data_ptr(), source.nbytes)

    def zero_flat(self, memory: Tensor) -> None:
        self._module.zero(memory.data_ptr(), memory.nbytes)

    def sum_squares(self, flat: Tensor, layout: Layout, squares: Tensor) -> None:
        slots = (layout.address, layout.count)
        self._module.sum_squares(_described(flat), slots, squares.data_ptr())

    def sum_squares_each(self, tensors: Sequence[tuple[int, Tensor]], squares: Tensor) -> None:
        where = [(values.data_ptr(), values.numel(), id) for id, values in tensors]
        self._module.sum_squares_each(where, _CODES[tensors[0][1].dtype], squares.data_ptr())

    def capture(self, calls: Callable[[], object]) -> Any:
        """Return the native calls of `calls`, captured on this thread instead of executed."""
        captured = self._module.Calls()
        captured.begin()
        try:
            calls()
        finally:
            captured.end()
        return captured

    def make_queue(self) -> Any:
        return self._module.Queue()

    def make_flag(self) -> Any:
        return self._module.Flag()

    def traffic(self, state: Fp32State, grad: Tensor, working: Tensor) -> None:
        self._module.traffic(_addresses(state), grad.data_ptr(), working.data_ptr(), grad.numel())

    def set_master(self, state: State, master: Tensor) -> None:
        source, (weight, rest), numel = master.data_ptr(), state[:2], master.numel()
        if isinstance(state, Split16State):
            self._module.encode_split16(source, weight.data_ptr(), rest.data_ptr(), numel)
        elif isinstance(state, Int8State):
            self._module.encode_int8(source, _described(weight), rest.data_ptr(), numel)

    def read_master(self, state: State, master: Tensor) -> None:
        target, (weight, rest), numel = master.data_ptr(), state[:2], master.numel()
        if isinstance(state, Split16State):
            self._module.decode_split16(weight.data_ptr(), rest.data_ptr(), target, numel)
        elif isinstance(state, Int8State):
            self._module.decode_int8(_described(weight), rest.data_ptr(), target, numel)

    def blend(
        self, state: State, grad: Tensor, target: Tensor, layout: Layout, s: BlendScalars
    ) -> None:
        kind = "fp32" if isinstance(state, Fp32State) else "split16"
        c = s.coefficients()
        getattr(self._module, f"blend_{kind}")(
            state[-1].data_ptr(),
            _described(grad),
            target.data_ptr(),
            grad.numel(),
            (layout.address, layout.count),
            (s.seed & 0xFFFFFFFFFFFFFFFF, s.step),
            (list(c[:3]), *c[3:]),
        )

    def subtract(
        self,
        state: State,
        update: Tensor,
        working: Tensor | None,
        layout: Layout,
        decay: float,
        rates: Sequence[float],
    ) -> None:
        slots, decays = (layout.address, layout.count), (decay, list(rates))
        source, numel = update.data_ptr(), update.numel()
        if isinstance(state, Fp32State):
            target = (0, 0) if working is None else _described(working)
            master = state.master.data_ptr()
            self._module.subtract_fp32(master, source, target, numel, slots, decays)
        elif isinstance(state, Split16State):
            halves = (state.weight.data_ptr(), state.low.data_ptr())
            self._module.subtract_split16(*halves, source, numel, slots, decays)

    def first_touch(self, memory: Tensor) -> None:
        self._module.first_touch(memory.data_ptr(), memory.numel(), memory.element_size())


def _addresses(state: State) -> tuple[int, ...]:
    """In the order of the native structs, which have two moments: 0 for what is not there."""
    addresses = [tensor.data_ptr() for tensor in state]
    if isinstance(state, Int8State) and len(addresses) < 6:
        addresses[len(addresses) // 2 + 1 : len(addresses) // 2 + 1] = [0] * (
            3 - len(addresses) // 2
        )
    return (*addresses, *[0] * (6 - len(addresses)))


def _described(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), _CODES[tensor.dtype]
