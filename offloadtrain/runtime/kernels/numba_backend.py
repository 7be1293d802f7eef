"""The kernels in Numba, with the same bits as the native kernels, for installs without a compiler.

bf16 and fp16 tensors are passed as their bits. Conversions run over slabs that fit in the L1 cache,
so that one arithmetic loop serves every dtype and vectorises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offloadtrain.runtime.kernels.codec import join_int8
from offloadtrain.runtime.kernels.formats import update_by_codec
from offloadtrain.runtime.kernels.numba_operands import (
    GRAIN,
    NO_FLOATS,
    NO_HALVES,
    SLAB,
    compiled,
    copy,
    fma,
    halves,
    join,
    load,
    load_bf16,
    operand_of,
    random_bits,
    runs,
    split,
    store,
    store_bf16,
    store_bf16_randomly,
    threads,
)
from offloadtrain.runtime.kernels.scalars import BlendScalars, Scalars, fp32, random_key
from offloadtrain.runtime.kernels.state import Fp32State, Layout, Split16State, State, pieces

_log = logging.getLogger(__name__)

SEGMENT = 2048
_SPLIT16_SLAB = 512  # five arrays fit in the cache


@compiled
def _adam(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, c: Any) -> None:
    scale, decay, l2, weight, towards, beta2, weight_sq, step, correction, eps = c
    for i in range(master.size):
        p = master[i]
        g = grad[i] * scale
        g = g if l2 == np.float32(0.0) else fma(p, l2, g)
        p = p * decay
        old = exp_avg[i]
        m = fma(weight, g - old, old if towards == np.float32(0.0) else g)
        v = fma(weight_sq * g, g, exp_avg_sq[i] * beta2)
        exp_avg[i] = m
        exp_avg_sq[i] = v
        master[i] = p + (step * m) / (np.sqrt(v) / correction + eps)


@compiled
def _lion(master: Any, exp_avg: Any, grad: Any, c: Any) -> None:
    scale, decay, beta1, weight1, beta2, weight2, step = c[:7]
    one, zero = np.float32(1.0), np.float32(0.0)
    for i in range(master.size):
        g = grad[i] * scale
        m = exp_avg[i]
        towards = fma(g, weight1, m * beta1)
        up = one if towards > zero else zero
        down = one if towards < zero else zero
        master[i] = master[i] * decay + (up - down) * step
        exp_avg[i] = fma(g, weight2, m * beta2)


@compiled
def _sgd(master: Any, grad: Any, c: Any) -> None:
    scale, l2, step = c[:3]
    for i in range(master.size):
        p = master[i]
        g = grad[i] * scale
        g = g if l2 == np.float32(0.0) else fma(p, l2, g)
        master[i] = fma(g, step, p)


@compiled
def _momentum(master: Any, buffer: Any, grad: Any, c: Any) -> None:
    scale, l2, step, momentum, weight, first, nesterov = c[:7]
    zero = np.float32(0.0)
    for i in range(master.size):
        p = master[i]
        g = grad[i] * scale
        g = g if l2 == zero else fma(p, l2, g)
        m = g if first != zero else fma(weight, g, buffer[i] * momentum)
        u = fma(m, momentum, g) if nesterov != zero else m
        buffer[i] = m
        master[i] = fma(u, step, p)


@compiled
def _adagrad(master: Any, total: Any, grad: Any, c: Any) -> None:
    scale, l2, lr, eps = c[:4]
    for i in range(master.size):
        p = master[i]
        g = grad[i] * scale
        g = g if l2 == np.float32(0.0) else fma(p, l2, g)
        s = fma(g, g, total[i])
        total[i] = s
        master[i] = p - (lr * g) / (np.sqrt(s) + eps)


@compiled
def _slab(rule: int, master: Any, first: Any, second: Any, grad: Any, c: Any) -> None:
    """Run one step of the rule with this number in native/kernels.h."""
    if rule == 0:
        _adam(master, first, second, grad, c)
    elif rule == 1:
        _lion(master, first, grad, c)
    elif rule == 2:
        _sgd(master, grad, c)
    elif rule == 3:
        _momentum(master, first, grad, c)
    elif rule == 4:
        _adagrad(master, first, grad, c)
    else:
        raise ValueError("no kernel for the rule of this number")


@compiled
def _update_fp32(
    rule: int,
    state: Any,
    out: Any,
    doubled: bool,
    grad: Any,
    working: Any,
    c: Any,
    lo: int,
    hi: int,
) -> None:
    buffer = np.empty(SLAB, np.float32)
    for start in range(lo, hi, SLAB):
        end = min(start + SLAB, hi)
        slab = buffer[: end - start]
        load(grad[0], grad[1], grad[2], start, end, slab)
        p, m, v = out[0][start:end], out[1][start:end], out[2][start:end]
        if doubled:
            copy(state[0][start:end], p)
            copy(state[1][start:end], m)
            copy(state[2][start:end], v)
        _slab(rule, p, m, v, slab, c)
        store(working[0], working[1], working[2], start, end, p)


@compiled
def _update_split16(
    rule: int,
    moments: int,
    state: Any,
    out: Any,
    grad: Any,
    c: Any,
    first: Any,
    second: Any,
    element: Any,
    lo: int,
    hi: int,
) -> None:
    floats = np.empty((4, _SPLIT16_SLAB), np.float32)
    integers = np.empty(_SPLIT16_SLAB, np.uint32)
    for start in range(lo, hi, _SPLIT16_SLAB):
        end = min(start + _SPLIT16_SLAB, hi)
        count = end - start
        g, p, m, v = floats[0, :count], floats[1, :count], floats[2, :count], floats[3, :count]
        random = integers[:count]
        load(grad[0], grad[1], grad[2], start, end, g)
        join(state[0][start:end], state[1][start:end], p)
        load_bf16(state[2][start:end], m)
        load_bf16(state[3][start:end], v)
        random_bits(first, second, np.uint32(element + np.uint32(start - lo)), random)
        _slab(rule, p, m, v, g, c)
        split(p, out[0][start:end], out[1][start:end])
        if moments > 0:
            store_bf16_randomly(m, random, np.uint32(0), out[2][start:end])
        if moments > 1:
            store_bf16_randomly(v, random, np.uint32(16), out[3][start:end])


@compiled
def _accumulate(total: Any, grad: Any, first: bool, lo: int, hi: int) -> None:
    buffer = np.empty(SLAB, np.float32)
    for start in range(lo, hi, SLAB):
        end = min(start + SLAB, hi)
        slab = buffer[: end - start]
        load(grad[0], grad[1], grad[2], start, end, slab)
        piece = total[start:end]
        for i in range(piece.size):
            piece[i] = slab[i] if first else piece[i] + slab[i]


@compiled
def _cast(source: Any, target: Any, lo: int, hi: int) -> None:
    store(target[0], target[1], target[2], lo, hi, source[lo:hi])


@compiled
def _segments(values: Any, starts: Any, counts: Any, sums: Any, lo: int, hi: int) -> None:
    buffer = np.empty(SEGMENT, np.float32)
    squares = np.empty(SEGMENT, np.float64)
    for s in range(lo, hi):
        start, count = starts[s], counts[s]
        load(values[0], values[1], values[2], start, start + count, buffer[:count])
        for i in range(count):
            value = np.float64(buffer[i])
            squares[i] = value * value
        squares[count:] = 0.0
        width = SEGMENT // 2
        while width > 0:
            for i in range(width):
                squares[i] = squares[i] + squares[i + width]
            width //= 2
        sums[s] = squares[0]


_NUMBERS = 10


def _packed(scalars: Scalars) -> tuple[np.float32, ...]:
    """Return the rule's coefficients, padded to equal length for all rules."""
    c = scalars.coefficients()
    return tuple(np.float32(value) for value in (*c, *[0.0] * (_NUMBERS - len(c))))


def update(
    state: State,
    out: State,
    grad: Tensor,
    working: Tensor | None,
    layout: Layout | None,
    scalars: Scalars,
) -> None:
    """See `kernels.update`. 8-bit state is decoded and encoded in plain torch, slowly."""
    if isinstance(state, Fp32State):
        _run_fp32(state, out, grad, working, scalars)
        return
    assert layout is not None
    if isinstance(state, Split16State):
        _run_split16(state, out, grad, layout, scalars)
    else:
        _warn_of_int8()
        _run_by_codec(state, out, grad, layout, scalars)


def _run_by_codec(state: State, out: State, grad: Tensor, layout: Layout, scalars: Scalars) -> None:
    made: Any = scalars  # a frozen dataclass
    unscaled: Scalars = replace(made, grad_scale=1.0)

    def change(master: Tensor, moments: list[Tensor], g: Tensor) -> None:
        values = Fp32State((master, *moments))
        _run_fp32(values, values, g, None, unscaled)

    update_by_codec(
        state.format,
        scalars.moments,
        state,
        grad,
        None,
        layout,
        change,
        step=scalars.step,
        grad_scale=scalars.grad_scale,
        seed=scalars.seed,
        out=None if out is state else out,
    )


def _run_fp32(
    state: State, out: State, grad: Tensor, working: Tensor | None, scalars: Scalars
) -> None:
    rule, packed, missing = scalars.rule, _packed(scalars), [NO_FLOATS] * (3 - len(state))
    before, after = (
        (*(tensor.numpy() for tensor in tensors), *missing) for tensors in (state, out)
    )
    operands, doubled = (operand_of(grad), operand_of(working)), out is not state

    def body(lo: int, hi: int) -> None:
        _update_fp32(rule, before, after, doubled, *operands, packed, lo, hi)

    threads.run(grad.numel(), GRAIN, body)


def _run_split16(state: State, out: State, grad: Tensor, layout: Layout, scalars: Scalars) -> None:
    rule, packed, rows = scalars.rule, _packed(scalars), layout.rows()
    moments, missing = len(scalars.moments), [NO_HALVES] * (4 - len(state))
    before, after = (
        (*(halves(tensor) for tensor in tensors), *missing) for tensors in (state, out)
    )
    operand = operand_of(grad)

    def body(lo: int, hi: int) -> None:
        for keys, element, begin, end in runs(rows, scalars.key, lo, hi):
            _update_split16(
                rule, moments, before, after, operand, packed, *keys, element, begin, end
            )

    threads.run(grad.numel(), GRAIN, body)


@lru_cache(maxsize=1)
def _warn_of_int8() -> None:
    _log.warning("CPU kernels: Numba has no kernel for 8-bit state; plain torch encodes it, slowly")


def accumulate(total: Tensor, grad: Tensor, first: bool) -> None:
    """See `kernels.accumulate`."""
    array, operand = total.numpy(), operand_of(grad)
    threads.run(total.numel(), GRAIN, lambda lo, hi: _accumulate(array, operand, first, lo, hi))


def cast(source: Tensor, target: Tensor) -> None:
    """See `kernels.cast`."""
    array, operand = source.numpy(), operand_of(target)
    threads.run(source.numel(), GRAIN, lambda lo, hi: _cast(array, operand, lo, hi))


def read_master(state: State, master: Tensor) -> None:
    """See `kernels.read_master`."""
    if isinstance(state, Split16State):
        operands = (halves(state.weight), halves(state.low), master.numpy())
        threads.run(master.numel(), GRAIN, lambda lo, hi: _join(*operands, lo, hi))
    else:
        for lo, hi in pieces(master.numel()):
            master[lo:hi] = join_int8(state[0][lo:hi], state[1][lo:hi])


def copy_flat(source: Tensor, target: Tensor) -> None:
    """See `kernels.copy`."""
    target.copy_(source)


def zero_flat(memory: Tensor) -> None:
    """See `kernels.zero` and `kernels.first_touch`."""
    memory.zero_()


first_touch = zero_flat


def accumulate_squares(
    total: Tensor, grad: Tensor, layout: Layout, first: bool, squares: Tensor
) -> None:
    """See `kernels.accumulate`."""
    for offset, numel, _, _ in layout.rows():
        piece = slice(offset, offset + numel)
        accumulate(total[piece], grad[piece], first)
    sum_squares(total, layout, squares)


def sum_squares(flat: Tensor, layout: Layout, squares: Tensor) -> None:
    """See `kernels.sum_squares_many`."""
    pairs = [
        (offset + done, min(SEGMENT, numel - done))
        for offset, numel, _, _ in layout.rows()
        for done in range(0, numel, SEGMENT)
    ]
    starts = np.array([start for start, _ in pairs], np.int64)
    counts = np.array([count for _, count in pairs], np.int64)
    sums, operand = np.empty(len(pairs), np.float64), operand_of(flat)
    body = lambda lo, hi: _segments(operand, starts, counts, sums, lo, hi)  # noqa: E731
    threads.run(len(pairs), GRAIN // SEGMENT, body)
    values = iter(sums.tolist())
    for _, numel, id, _ in layout.rows():
        total = 0.0
        for _ in range(-(-numel // SEGMENT)):
            total += next(values)
        squares[id] = total


def sum_squares_each(tensors: Sequence[tuple[int, Tensor]], squares: Tensor) -> None:
    """See `kernels.sum_squares_each`."""
    for id, values in tensors:
        flat = values.as_strided((values.numel(),), (1,))
        sum_squares(flat, Layout.of_one(flat.numel(), id), squares)


# Kernels of rules for matrices.


@compiled
def _blend(average: Any, grad: Any, c: Any) -> None:
    """Update the average; `grad` is overwritten by the direction."""
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
    """Yield ranges in which nothing is overwritten before it is read: [Note: Waves] in
    native/matrix_calls.h. The input of the first range must be copied."""
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
