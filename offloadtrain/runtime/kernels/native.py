"""The native extension, called with raw addresses: ten times cheaper than DLPack tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offloadtrain.runtime.kernels.scalars import AdamScalars
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

    def adam(
        self,
        state: State,
        out: State,
        grad: Tensor,
        working: Tensor | None,
        layout: Layout | None,
        s: AdamScalars,
    ) -> None:
        before = tuple(tensor.data_ptr() for tensor in state)
        after = before if out is state else tuple(tensor.data_ptr() for tensor in out)
        scalars = (
            s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.step, s.decoupled, s.grad_scale
        )  # fmt: skip
        numel = grad.numel()
        if isinstance(state, Fp32State):
            target = (0, 0) if working is None else _described(working)
            self._module.adam_fp32(before, after, _described(grad), *target, numel, scalars)
            return
        assert layout is not None
        slots, seed = (layout.address, layout.count), s.seed & 0xFFFFFFFFFFFFFFFF
        if isinstance(state, Split16State):
            self._module.adam_split16(before, after, _described(grad), numel, slots, seed, scalars)
        elif isinstance(state, Int8State):
            code = _CODES[state.weight.dtype]
            self._module.adam_int8(
                before, after, _described(grad), code, numel, slots, seed, scalars
            )

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
        addresses = tuple(tensor.data_ptr() for tensor in state)
        self._module.traffic(addresses, grad.data_ptr(), working.data_ptr(), grad.numel())

    def first_touch(self, memory: Tensor) -> None:
        self._module.first_touch(memory.data_ptr(), memory.numel(), memory.element_size())


def _described(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), _CODES[tensor.dtype]
