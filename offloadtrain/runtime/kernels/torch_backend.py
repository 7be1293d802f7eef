"""The kernels in plain torch: the last fallback, and the readable definition of the arithmetic.

Same bits as the native ones, at a tenth of the speed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offloadtrain.runtime.kernels.codec import fma, random_bits, to_fp32
from offloadtrain.runtime.kernels.formats import CODECS
from offloadtrain.runtime.kernels.scalars import AdamScalars, Coefficients
from offloadtrain.runtime.kernels.state import (
    BLOCK,
    Fp32State,
    Int8State,
    Layout,
    Split16State,
    State,
    blocks,
    pieces,
)

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
    codec = CODECS["split16" if isinstance(state, Split16State) else "int8"]
    c = Coefficients.of(scalars)
    for offset, numel, parameter, first in layout.rows():
        for lo, hi in pieces(numel, first):
            key = scalars.key(parameter, first + lo)
            elements = torch.arange(first + lo, first + hi, device="cpu") & 0xFFFFFFFF
            piece = (offset + lo, offset + hi)
            new = _step(to_fp32(_at(state, *piece)), grad[slice(*piece)], c)
            codec.store(_at(out, *piece), new, partial(random_bits, key, elements))


def _at(state: State, lo: int, hi: int) -> Any:
    """Elements [lo, hi) of every field; lo is a block's start if there are scales."""
    if isinstance(state, Int8State):
        scales = (x[lo // BLOCK : blocks(hi)] for x in state[4:])
        return Int8State(*(x[lo:hi] for x in state[:4]), *scales)
    return type(state)(*(x[lo:hi] for x in state))


def _adam_fp32(
    state: Fp32State, out: Fp32State, grad: Tensor, working: Tensor | None, c: Coefficients
) -> None:
    for lo, hi in pieces(grad.numel()):
        new = _step(_at(state, lo, hi), grad[lo:hi], c)
        for target, value in zip(out, new, strict=True):
            target[lo:hi] = value
        if working is not None:
            working[lo:hi] = new.master


def accumulate(total: Tensor, grad: Tensor, first: bool) -> None:
    """See `kernels.accumulate`."""
    for lo, hi in pieces(total.numel()):
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
    for lo, hi in pieces(values.numel()):
        squares = values[lo:hi].double().square()
        squares = torch.nn.functional.pad(squares, (0, -squares.numel() % SEGMENT))
        tree = squares.view(-1, SEGMENT)
        for width in [SEGMENT >> level for level in range(1, int(math.log2(SEGMENT)) + 1)]:
            tree = tree[:, :width] + tree[:, width:]
        for value in tree[:, 0].tolist():
            total += value
    return total
