"""The kernels in plain torch: the last resort, and the readable statement of what they compute.

Same bits as the native ones, at a tenth of the speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from offloadtrain.adam_scalars import AdamScalars, Coefficients

_PIECE = 1 << 20
SEGMENT = 2048


def adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    working: Tensor | None,
    scalars: AdamScalars,
) -> None:
    """See `kernels.adam`."""
    coefficients = Coefficients.of(scalars)
    for lo, hi in _pieces(master.numel()):
        target = None if working is None else working[lo:hi]
        _adam_piece(
            master[lo:hi], exp_avg[lo:hi], exp_avg_sq[lo:hi], grad[lo:hi], target, coefficients
        )


def accumulate(total: Tensor, grad: Tensor, first: bool) -> None:
    """See `kernels.accumulate`."""
    for lo, hi in _pieces(total.numel()):
        if first:
            total[lo:hi] = grad[lo:hi].float()
        else:
            total[lo:hi] += grad[lo:hi].float()


def sum_squares(flat: Tensor, offsets: Sequence[int], numels: Sequence[int]) -> list[float]:
    """See `kernels.sum_squares_many`."""
    return [
        _sum_squares(flat[offset : offset + numel])
        for offset, numel in zip(offsets, numels, strict=True)
    ]


def cast(source: Tensor, target: Tensor) -> None:
    """See `kernels.cast`."""
    target.copy_(source)


def first_touch(memory: Tensor) -> None:
    """See `kernels.first_touch`."""
    memory.zero_()


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    for lo in range(0, numel, _PIECE):
        yield lo, min(lo + _PIECE, numel)


def _adam_piece(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    working: Tensor | None,
    c: Coefficients,
) -> None:
    g = grad.float() * c.grad_scale
    if c.l2 != 0.0:
        g = _fma(master, _like(g, c.l2), g)
    m = _fma(_like(g, c.exp_avg_weight), g - exp_avg, g if c.towards_grad else exp_avg)
    v = _fma(g * c.exp_avg_sq_weight, g, exp_avg_sq * c.beta2)
    # numpy's root is correctly rounded, torch's is not always.
    root = torch.from_numpy(np.sqrt(v.numpy()))
    step = (m * c.negative_step_size) / (root / c.bias_correction2_sqrt + c.eps)
    master.copy_(master * c.decay + step)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if working is not None:
        working.copy_(master)


def _like(tensor: Tensor, value: float) -> Tensor:
    return torch.full_like(tensor, value)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32 tensors, rounded once.

    The product is exact in double. The sum is rounded to odd, which makes the second rounding, to
    fp32, the rounding of the exact value (Boldo & Melquiond 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    kept = total - product
    error = (product - (total - kept)) + (addend - kept)
    bits = total.view(torch.int64)
    inexact_even = (error != 0) & torch.isfinite(error) & (bits & 1 == 0)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact_even, bits + towards, bits).view(torch.float64).float()


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
