"""The Numba kernels of a rule for matrices; see `kernels.matrices`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offloadtrain.runtime.kernels.numba_numbers import (
    compiled,
    fma,
    join,
    load_bf16,
    random_bits,
    split,
    store_bf16,
    store_bf16_randomly,
)
from offloadtrain.runtime.kernels.numba_operands import (
    GRAIN,
    SLAB,
    halves,
    load,
    operand_of,
    runs,
    store,
    threads,
)
from offloadtrain.runtime.kernels.scalars import BlendScalars, fp32, random_key
from offloadtrain.runtime.kernels.state import Fp32State, Layout, State


@compiled
def _blend(average: Any, grad: Any, c: Any) -> None:
    """The gradient becomes the direction."""
    scale, weight, ahead, towards_grad, towards_average, nesterov = c
    zero = np.float32(0.0)
    for i in range(average.size):
        g = grad[i] * scale
        old = average[i]
        m = fma(weight, g - old, g if towards_grad != zero else old)
        u = fma(ahead, m - g, m if towards_average != zero else g)
        average[i] = m
        grad[i] = u if nesterov != zero else m


@compiled
def _blend_fp32(average: Any, grad: Any, target: Any, c: Any, lo: int, hi: int) -> None:
    buffer = np.empty(SLAB, np.float32)
    for start in range(lo, hi, SLAB):
        end = min(start + SLAB, hi)
        slab = buffer[: end - start]
        load(grad[0], grad[1], grad[2], start, end, slab)
        _blend(average[start:end], slab, c)
        store_bf16(slab, target[start:end])


@compiled
def _blend_split16(
    average: Any,
    grad: Any,
    target: Any,
    c: Any,
    first: Any,
    second: Any,
    element: Any,
    lo: int,
    hi: int,
) -> None:
    floats = np.empty((2, SLAB), np.float32)
    integers = np.empty(SLAB, np.uint32)
    for start in range(lo, hi, SLAB):
        end = min(start + SLAB, hi)
        g, m, random = floats[0, : end - start], floats[1, : end - start], integers[: end - start]
        load(grad[0], grad[1], grad[2], start, end, g)
        load_bf16(average[start:end], m)
        random_bits(first, second, np.uint32(element + np.uint32(start - lo)), random)
        _blend(m, g, c)
        store_bf16_randomly(m, random, np.uint32(0), average[start:end])
        store_bf16(g, target[start:end])


@compiled
def _subtract(master: Any, update: Any, decay: Any, rate: Any) -> None:
    for i in range(master.size):
        master[i] = fma(update[i], rate, master[i] * decay)


@compiled
def _subtract_fp32(
    master: Any, update: Any, working: Any, decay: Any, rate: Any, lo: int, hi: int
) -> None:
    buffer = np.empty(SLAB, np.float32)
    for start in range(lo, hi, SLAB):
        end = min(start + SLAB, hi)
        slab = buffer[: end - start]
        load_bf16(update[start:end], slab)
        _subtract(master[start:end], slab, decay, rate)
        store(working[0], working[1], working[2], start, end, master[start:end])


@compiled
def _subtract_split16(
    weight: Any, low: Any, update: Any, decay: Any, rate: Any, lo: int, hi: int
) -> None:
    floats = np.empty((2, SLAB), np.float32)
    for start in range(lo, hi, SLAB):
        end = min(start + SLAB, hi)
        p, u = floats[0, : end - start], floats[1, : end - start]
        load_bf16(update[start:end], u)
        join(weight[start:end], low[start:end], p)
        _subtract(p, u, decay, rate)
        split(p, weight[start:end], low[start:end])


@compiled
def _join(weight: Any, low: Any, master: Any, lo: int, hi: int) -> None:
    join(weight[lo:hi], low[lo:hi], master[lo:hi])


def _waves(numel: int, in_place: bool) -> Iterator[tuple[int, int]]:
    """Ranges in which nothing is overwritten that is yet to be read: [Note: Waves] in
    native/matrix_calls.h. What the first one reads needs a copy."""
    lo, hi = 0, min(numel, GRAIN) if in_place else numel
    while lo < numel:
        yield lo, hi
        lo, hi = hi, min(2 * hi, numel)


def blend(
    state: State, grad: Tensor, target: Tensor, layout: Layout, scalars: BlendScalars
) -> None:
    """See `kernels.blend`."""
    c, rows = tuple(np.float32(x) for x in scalars.coefficients()), layout.rows()
    key_of = partial(random_key, scalars.seed, scalars.step)
    in_place = grad.dtype is torch.float32 and grad.data_ptr() == target.data_ptr()
    wide = isinstance(state, Fp32State)
    average = state[-1].numpy() if wide else halves(state[-1])
    written = halves(target)
    for first, last in _waves(grad.numel(), in_place):
        source = operand_of(grad[:last].clone() if in_place and not first else grad)

        def body(lo: int, hi: int, source: Any = source, first: int = first) -> None:
            for keys, element, begin, end in runs(rows, key_of, first + lo, first + hi):
                if wide:
                    _blend_fp32(average, source, written, c, begin, end)
                else:
                    _blend_split16(average, source, written, c, *keys, element, begin, end)

        threads.run(last - first, GRAIN, body)


def subtract(
    state: State,
    update: Tensor,
    working: Tensor | None,
    layout: Layout,
    decay: float,
    rates: Sequence[float],
) -> None:
    """See `kernels.subtract`."""
    numbers = [np.float32(-fp32(rate)) for rate in rates]
    rows, factor = [*zip(layout.rows(), numbers, strict=True)], np.float32(decay)
    wide = isinstance(state, Fp32State)
    masters = (state[0].numpy(),) if wide else (halves(state[0]), halves(state[1]))
    kernel = _subtract_fp32 if wide else _subtract_split16
    in_place = (
        working is not None
        and working.dtype is torch.float32
        and working.data_ptr() == update.data_ptr()
    )
    for first, last in reversed([*_waves(update.numel(), in_place)]):
        source = halves(update[:last].clone() if in_place and not first else update)
        operands = (source, operand_of(working)) if wide else (source,)

        def body(lo: int, hi: int, operands: Any = operands, first: int = first) -> None:
            for (offset, numel, _, _), rate in rows:
                begin, end = max(first + lo, offset), min(first + hi, offset + numel)
                if begin < end:
                    kernel(*masters, *operands, factor, rate, begin, end)
            _zero_gaps(working, layout, first + lo, first + hi)

        threads.run(last - first, GRAIN, body)


def _zero_gaps(working: Tensor | None, layout: Layout, lo: int, hi: int) -> None:
    if working is None:
        return
    done = lo
    for offset, numel, _, _ in layout.rows():
        working[done : min(offset, hi)].zero_()
        done = max(done, min(offset + numel, hi))
    working[done:hi].zero_()


def join_halves(weight: Tensor, low: Tensor, master: Tensor) -> None:
    """split16's (n,) weight and low halves into (n,) fp32."""
    operands = (halves(weight), halves(low), master.numpy())
    threads.run(master.numel(), GRAIN, lambda lo, hi: _join(*operands, lo, hi))
