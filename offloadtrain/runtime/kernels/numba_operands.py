"""Number formats, operands of any dtype, and threads of the Numba kernels.

bf16 and fp16 are passed as their bits. A loop never writes an array that it reads, except element
by element under one name: LLVM would use its scalar fallback. LLVM vectorises loops over arrays.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from offloadtrain.runtime.thread_pools import started_pool

compiled = njit(nogil=True, cache=True, error_model="numpy", fastmath=False)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
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


@compiled
def copy(source: Any, target: Any) -> None:
    for i in range(source.size):
        target[i] = source[i]


@compiled
def load_bf16(source: Any, target: Any) -> None:
    for i in range(source.size):
        target[i] = _float(np.uint32(np.uint32(source[i]) << np.uint32(16)))


@compiled
def load_fp16(source: Any, target: Any) -> None:
    for i in range(source.size):
        stored = np.uint32(source[i])
        magnitude = np.uint32((stored & np.uint32(0x7FFF)) << np.uint32(13))
        sign = np.uint32((stored & np.uint32(0x8000)) << np.uint32(16))
        scaled = _bits(_float(magnitude) * np.float32(2.0**112))
        special = np.uint32(magnitude | np.uint32(0x7F800000))
        value = special if magnitude >= np.uint32(0x0F800000) else scaled
        target[i] = _float(np.uint32(sign | value))


@compiled
def store_bf16(source: Any, target: Any) -> None:
    for i in range(source.size):
        bits = _bits(source[i])
        even = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
        nan = np.uint32(bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        target[i] = np.uint16(np.uint32(0x7FC0) if nan else rounded)


@compiled
def store_fp16(source: Any, target: Any) -> None:
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


@compiled
def random_bits(first: Any, second: Any, element: Any, target: Any) -> None:
    """target[i] = the random bits of element + i; see [Note: Random bits] in native/numbers.h."""
    for i in range(target.size):
        x = np.uint32(np.uint32(element + np.uint32(i)) ^ first)
        x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
        x = np.uint32(x ^ second)
        x = np.uint32(np.uint32(x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
        target[i] = np.uint32(x ^ (x >> np.uint32(16)))


@compiled
def store_bf16_randomly(source: Any, random: Any, shift: Any, target: Any) -> None:
    """Round up with the probability of the discarded part; uses 16 random bits from bit `shift`
    on."""
    for i in range(source.size):
        bits = _bits(source[i])
        magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
        special = np.uint32(0x7FC00000) if magnitude > np.uint32(0x7F800000) else bits
        up = np.uint32(bits + np.uint32(np.uint32(random[i] >> shift) & np.uint32(0xFFFF)))
        rounded = up if magnitude < np.uint32(0x7F800000) else special
        target[i] = np.uint16(np.uint32(rounded >> np.uint32(16)))


@compiled
def join(weight: Any, low: Any, target: Any) -> None:
    """The two halves of split16 → fp32."""
    for i in range(target.size):
        high = np.uint32(np.uint32(weight[i]) << np.uint32(16))
        target[i] = _float(np.uint32(high + np.uint32(np.int32(low[i]))))


@compiled
def split(source: Any, weight: Any, low: Any) -> None:
    """fp32 → the two halves of split16."""
    for i in range(source.size):
        raw = _bits(source[i])
        nan = np.uint32(raw & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        bits = np.uint32(0x7FC00000) if nan else raw
        weight[i] = np.uint16(np.uint32(np.uint32(bits + np.uint32(0x8000)) >> np.uint32(16)))
        low[i] = np.int16(np.uint16(bits))


GRAIN = 16384
SLAB = 1024
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@compiled
def load(kind: int, floats: Any, halves: Any, lo: int, hi: int, target: Any) -> None:
    if kind == 0:
        target[: hi - lo] = floats[lo:hi]
    elif kind == 1:
        load_bf16(halves[lo:hi], target)
    else:
        load_fp16(halves[lo:hi], target)


@compiled
def store(kind: int, floats: Any, halves: Any, lo: int, hi: int, source: Any) -> None:
    if kind == 0:
        floats[lo:hi] = source
    elif kind == 1:
        store_bf16(source, halves[lo:hi])
    elif kind == 2:
        store_fp16(source, halves[lo:hi])


class _Threads:
    """Runs a loop body over contiguous parts, on the requested number of threads."""

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
        key = (os.getpid(), self.count)  # threads do not survive a fork
        if self._pool is None or self._pool[:2] != key:
            self._pool = (*key, started_pool("numba", max(self.count - 1, 1)))
        futures = [self._pool[2].submit(body, a, b) for a, b in pairwise(cuts[1:])]
        body(cuts[0], cuts[1])
        for future in futures:
            future.result()


threads = _Threads()
NO_FLOATS = np.empty(0, np.float32)
NO_HALVES = np.empty(0, np.uint16)
Operand = tuple[int, "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


def operand_of(tensor: Tensor | None) -> Operand:
    if tensor is None:
        return (-1, NO_FLOATS, NO_HALVES)
    kind = _KINDS[tensor.dtype]
    if kind == 0:
        return (kind, tensor.numpy(), NO_HALVES)
    return (kind, NO_FLOATS, tensor.view(torch.uint16).numpy())


def halves(tensor: Tensor) -> np.ndarray[Any, Any]:
    kind = torch.int16 if tensor.dtype is torch.int16 else torch.uint16
    return tensor.view(kind).numpy()


Keys = tuple[np.uint32, np.uint32]


def runs(
    rows: Sequence[tuple[int, int, int, int]],
    key_of: Callable[[int, int], int],
    lo: int,
    hi: int,
) -> Iterator[tuple[Keys, np.uint32, int, int]]:
    """Yield (keys, element, begin, end) for the parts of [lo, hi) that belong to parameters, cut
    where the key of the random bits changes."""
    for offset, numel, parameter, first in rows:
        begin, stop = max(lo, offset), min(hi, offset + numel)
        while begin < stop:
            element = begin - offset + first
            end = min(stop, offset - first + ((element >> 32) + 1 << 32))
            key = key_of(parameter, element)
            keys = (np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32))
            yield keys, np.uint32(element & 0xFFFFFFFF), begin, end
            begin = end
