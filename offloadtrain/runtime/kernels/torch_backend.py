"""The kernels in plain torch: the last fallback, and the readable definition of the arithmetic.

Same bits as the native ones, at a tenth of the speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offloadtrain.runtime.kernels.codec import (
    encode_moments,
    fma,
    random_bits,
    round_bf16,
    split,
    split_int8,
    to_fp32,
)
from offloadtrain.runtime.kernels.scalars import AdamScalars, Coefficients
from offloadtrain.runtime.kernels.state import (
    BLOCK,
    Fp32State,
    Int8State,
    Layout,
    Split16State,
    State,
    blocks,
)

_PIECE = 1 << 20
SEGMENT = 2048


def adam(
    state: State,
    out: State,
    grad: Tensor,
    working: Tensor | None,
    layout: Layout | None,
    scalars: AdamScalars,
) -> None:
    """See `kernels.adam`."""
    if isinstance(state, Fp32State) and isinstance(out, Fp32State):
        _adam_fp32(state, out, grad, working, Coefficients.of(scalars))
        return
    assert layout is not None
    step = _adam_split16 if isinstance(state, Split16State) else _adam_int8
    for offset, numel, parameter, first in layout.rows():
        for lo, hi in _pieces(numel, first):
            key = scalars.key(parameter, first + lo)
            elements = torch.arange(first + lo, first + hi, device="cpu") & 0xFFFFFFFF
            piece = (offset + lo, offset + hi)
            values = random_bits(key, elements)
            step(_at(state, *piece), _at(out, *piece), grad[slice(*piece)], values, scalars)


def _at(state: State, lo: int, hi: int) -> Any:
    """Elements [lo, hi) of every field; lo is a block's start if there are scales."""
    if isinstance(state, Int8State):
        scales = (x[lo // BLOCK : blocks(hi)] for x in state[4:])
        return Int8State(*(x[lo:hi] for x in state[:4]), *scales)
    return type(state)(*(x[lo:hi] for x in state))


def _adam_fp32(
    state: Fp32State, out: Fp32State, grad: Tensor, working: Tensor | None, c: Coefficients
) -> None:
    for lo, hi in _pieces(grad.numel()):
        new = _step(_at(state, lo, hi), grad[lo:hi], c)
        for target, value in zip(out, new, strict=True):
            target[lo:hi] = value
        if working is not None:
            working[lo:hi] = new.master


def _adam_split16(
    state: Split16State, out: Split16State, grad: Tensor, random: Tensor, scalars: AdamScalars
) -> None:
    new = _step(to_fp32(state), grad, Coefficients.of(scalars))
    weight, low = split(new.master)
    exp_avg = round_bf16(new.exp_avg, random & 0xFFFF)
    exp_avg_sq = round_bf16(new.exp_avg_sq, random >> 16)
    for target, value in zip(out, (weight, low, exp_avg, exp_avg_sq), strict=True):
        target.copy_(value)


def _adam_int8(
    state: Int8State, out: Int8State, grad: Tensor, random: Tensor, scalars: AdamScalars
) -> None:
    new = _step(to_fp32(state), grad, Coefficients.of(scalars))
    weight, correction = split_int8(new.master, state.weight.dtype, random & 0xFF)
    out.weight.copy_(weight)
    out.correction.copy_(correction)
    encode_moments(new.exp_avg, new.exp_avg_sq, random >> 8, out)


def accumulate(total: Tensor, grad: Tensor, first: bool) -> None:
    """See `kernels.accumulate`."""
    for lo, hi in _pieces(total.numel()):
        if first:
            total[lo:hi] = grad[lo:hi].float()
        else:
            total[lo:hi] += grad[lo:hi].float()


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
    for offset, numel, id, _ in layout.rows():
        squares[id] = _sum_squares(flat[offset : offset + numel])


def copy_flat(source: Tensor, target: Tensor) -> None:
    """See `kernels.copy`."""
    target.copy_(source)


def zero_flat(memory: Tensor) -> None:
    """See `kernels.zero`."""
    memory.zero_()


def cast(source: Tensor, target: Tensor) -> None:
    """See `kernels.cast`."""
    target.copy_(source)


def first_touch(memory: Tensor) -> None:
    """See `kernels.first_touch`."""
    memory.zero_()


def _pieces(numel: int, first: int = 0) -> Iterator[tuple[int, int]]:
    """Split at multiples of the piece's size, counted from `first`."""
    lo = 0
    while lo < numel:
        hi = min(lo + _PIECE - (first + lo) % _PIECE, numel)
        yield lo, hi
        lo = hi


def _step(state: Fp32State, grad: Tensor, c: Coefficients) -> Fp32State:
    """Compute one Adam step in fp32, in new memory."""
    master, exp_avg, exp_avg_sq = state
    g = grad.float() * c.grad_scale
    if c.l2 != 0.0:
        g = fma(master, c.l2, g)
    m = fma(g - exp_avg, c.exp_avg_weight, g if c.towards_grad else exp_avg)
    v = fma(g * c.exp_avg_sq_weight, g, exp_avg_sq * c.beta2)
    # numpy's root is correctly rounded, torch's is not always.
    root = torch.from_numpy(np.sqrt(v.numpy()))
    step = (m * c.negative_step_size) / (root / c.bias_correction2_sqrt + c.eps)
    return Fp32State(master * c.decay + step, m, v)


def _sum_squares(values: Tensor) -> float:
    total = 0.0
    for lo, hi in _pieces(values.numel()):
        squares = values[lo:hi].double().square()
        squares = torch.nn.functional.pad(squares, (0, -squares.numel() % SEGMENT))
        tree = squares.view(-1, SEGMENT)
        for width in [SEGMENT >> level for level in range(1, int(math.log2(SEGMENT)) + 1)]:
            tree = tree[:, :width] + tree[:, width:]
        for value in tree[:, 0].tolist():
            total += value
    return total
