"""The Numba twin of the native kernels: the same bits where no compiler was found.

bf16 and fp16 tensors come in as their bits. Conversions run over slabs that stay in the first-level
cache, so that one arithmetic loop serves every dtype and vectorises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from offloadtrain.adam_scalars import AdamScalars, Coefficients

SEGMENT = 2048
_SLAB = 2048
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_compiled = njit(nogil=True, cache=True, error_model="numpy", fastmath=False)


@intrinsic
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), emit


@intrinsic
def _bits(typing: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), emit


@intrinsic
def _float(typing: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), emit


@_compiled
def _load_bf16(source: Any, target: Any) -> None:
    for i in range(source.size):
        target[i] = _float(np.uint32(np.uint32(source[i]) << np.uint32(16)))


@_compiled
def _load_fp16(source: Any, target: Any) -> None:
    for i in range(source.size):
        stored = np.uint32(source[i])
        magnitude = np.uint32((stored & np.uint32(0x7FFF)) << np.uint32(13))
        sign = np.uint32((stored & np.uint32(0x8000)) << np.uint32(16))
        scaled = _bits(_float(magnitude) * np.float32(2.0**112))
        special = np.uint32(magnitude | np.uint32(0x7F800000))
        value = special if magnitude >= np.uint32(0x0F800000) else scaled
        target[i] = _float(np.uint32(sign | value))


@_compiled
def _store_bf16(source: Any, target: Any) -> None:
    for i in range(source.size):
        bits = _bits(source[i])
        even = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
        nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        target[i] = np.uint16(np.uint32(0x7FC0) if nan else rounded)


@_compiled
def _store_fp16(source: Any, target: Any) -> None:
    for i in range(source.size):
        bits = _bits(source[i])
        sign = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))
        size = np.uint32(bits & np.uint32(0x7FFFFFFF))
        odd = np.uint32((size >> np.uint32(13)) & np.uint32(1))
        shifted = np.uint32(size - np.uint32(0x38000000) + np.uint32(0xFFF) + odd)
        normal = np.uint32(shifted >> np.uint32(13))
        denormal = np.uint32(_bits(_float(size) + np.float32(0.5)) - np.uint32(0x3F000000))
        finite = denormal if size < np.uint32(0x38800000) else normal
        special = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else np.uint32(0x7C00)
        value = special if size >= np.uint32(0x47800000) else finite
        target[i] = np.uint16(np.uint32(sign | value))


@_compiled
def _load(kind: int, floats: Any, halves: Any, lo: int, hi: int, target: Any) -> None:
    if kind == 0:
        target[: hi - lo] = floats[lo:hi]
    elif kind == 1:
        _load_bf16(halves[lo:hi], target)
    else:
        _load_fp16(halves[lo:hi], target)


@_compiled
def _store(kind: int, floats: Any, halves: Any, lo: int, hi: int, source: Any) -> None:
    if kind == 0:
        floats[lo:hi] = source
    elif kind == 1:
        _store_bf16(source, halves[lo:hi])
    elif kind == 2:
        _store_fp16(source, halves[lo:hi])


@_compiled
def _adam_slab(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, c: Any, toward: bool) -> None:
    scale, decay, l2, weight, beta2, weight_sq, step, correction, eps = c
    for i in range(master.size):
        p = master[i]
        g = grad[i] * scale
        g = g if l2 == np.float32(0.0) else _fma(p, l2, g)
        p = p * decay
        old = exp_avg[i]
        m = _fma(weight, g - old, g if toward else old)
        v = _fma(weight_sq * g, g, exp_avg_sq[i] * beta2)
        exp_avg[i] = m
        exp_avg_sq[i] = v
        master[i] = p + (step * m) / (np.sqrt(v) / correction + eps)


@_compiled
def _adam(
    master: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    grad: Any,
    working: Any,
    coefficients: Any,
    toward: bool,
    lo: int,
    hi: int,
) -> None:
    buffer = np.empty(_SLAB, np.float32)
    for start in range(lo, hi, _SLAB):
        end = min(start + _SLAB, hi)
        slab = buffer[: end - start]
        _load(grad[0], grad[1], grad[2], start, end, slab)
        piece = master[start:end]
        _adam_slab(piece, exp_avg[start:end], exp_avg_sq[start:end], slab, coefficients, toward)
        _store(working[0], working[1], working[2], start, end, piece)


@_compiled
def _accumulate(total: Any, grad: Any, first: bool, lo: int, hi: int) -> None:
    buffer = np.empty(_SLAB, np.float32)
    for start in range(lo, hi, _SLAB):
        end = min(start + _SLAB, hi)
        slab = buffer[: end - start]
        _load(grad[0], grad[1], grad[2], start, end, slab)
        piece = total[start:end]
        for i in range(piece.size):
            piece[i] = slab[i] if first else piece[i] + slab[i]


@_compiled
def _cast(source: Any, target: Any, lo: int, hi: int) -> None:
    _store(target[0], target[1], target[2], lo, hi, source[lo:hi])


@_compiled
def _segments(values: Any, starts: Any, counts: Any, sums: Any, lo: int, hi: int) -> None:
    buffer = np.empty(SEGMENT, np.float32)
    squares = np.empty(SEGMENT, np.float64)
    for s in range(lo, hi):
        start, count = starts[s], counts[s]
        _load(values[0], values[1], values[2], start, start + count, buffer[:count])
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


class _Threads:
    """Runs a loop body over contiguous parts, on as many threads as asked for."""

    def __init__(self) -> None:
        self.count = 1
        self._pool: tuple[int, int, ThreadPoolExecutor] | None = None

    def run(self, numel: int, grain: int, body: Callable[[int, int], None]) -> None:
        grains = -(-numel // grain)
        count = min(self.count, grains)
        cuts = [min(numel, grains * i // max(count, 1) * grain) for i in range(count + 1)]
        if count <= 1:
            body(0, numel)
            return
        futures = [self._executor().submit(body, a, b) for a, b in pairwise(cuts[1:])]
        body(cuts[0], cuts[1])
        for future in futures:
            future.result()

    def _executor(self) -> ThreadPoolExecutor:
        key = (os.getpid(), self.count)  # threads do not survive a fork
        if self._pool is None or self._pool[:2] != key:
            self._pool = (*key, ThreadPoolExecutor(max(self.count - 1, 1)))
        return self._pool[2]


threads = _Threads()
_GRAIN = 16384
_NO_FLOATS = np.empty(0, np.float32)
_NO_HALVES = np.empty(0, np.uint16)
_Operand = tuple[int, "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


def _operand(tensor: Tensor | None) -> _Operand:
    if tensor is None:
        return (-1, _NO_FLOATS, _NO_HALVES)
    kind = _KINDS[tensor.dtype]
    if kind == 0:
        return (kind, tensor.numpy(), _NO_HALVES)
    return (kind, _NO_FLOATS, tensor.view(torch.uint16).numpy())


def adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    working: Tensor | None,
    scalars: AdamScalars,
) -> None:
    """See `kernels.adam`."""
    c = Coefficients.of(scalars)
    packed = tuple(
        np.float32(value)
        for value in (
            c.grad_scale,
            c.decay,
            c.l2,
            c.exp_avg_weight,
            c.beta2,
            c.exp_avg_sq_weight,
            c.negative_step_size,
            c.bias_correction2_sqrt,
            c.eps,
        )
    )
    arrays = (master.numpy(), exp_avg.numpy(), exp_avg_sq.numpy())
    operands = (_operand(grad), _operand(working))

    def body(lo: int, hi: int) -> None:
        _adam(*arrays, *operands, packed, c.towards_grad, lo, hi)

    threads.run(master.numel(), _GRAIN, body)


def accumulate(total: Tensor, grad: Tensor, first: bool) -> None:
    """See `kernels.accumulate`."""
    array, operand = total.numpy(), _operand(grad)
    threads.run(total.numel(), _GRAIN, lambda lo, hi: _accumulate(array, operand, first, lo, hi))


def cast(source: Tensor, target: Tensor) -> None:
    """See `kernels.cast`."""
    array, operand = source.numpy(), _operand(target)
    threads.run(source.numel(), _GRAIN, lambda lo, hi: _cast(array, operand, lo, hi))


def sum_squares(flat: Tensor, offsets: Sequence[int], numels: Sequence[int]) -> list[float]:
    """See `kernels.sum_squares_many`."""
    pairs = [
        (offset + done, min(SEGMENT, numel - done))
        for offset, numel in zip(offsets, numels, strict=True)
        for done in range(0, numel, SEGMENT)
    ]
    starts = np.array([start for start, _ in pairs], np.int64)
    counts = np.array([count for _, count in pairs], np.int64)
    sums, operand = np.empty(len(pairs), np.float64), _operand(flat)
    body = lambda lo, hi: _segments(operand, starts, counts, sums, lo, hi)  # noqa: E731
    threads.run(len(pairs), _GRAIN // SEGMENT, body)
    values = iter(sums.tolist())
    totals = []
    for numel in numels:
        total = 0.0
        for _ in range(-(-numel // SEGMENT)):
            total += next(values)
        totals.append(total)
    return totals


def first_touch(memory: Tensor) -> None:
    """See `kernels.first_touch`."""
    memory.zero_()
