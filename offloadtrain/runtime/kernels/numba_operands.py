"""What the Numba kernels share: operands of any dtype, and the threads that run a loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offloadtrain.runtime.kernels.numba_numbers import (
    compiled,
    load_bf16,
    load_fp16,
    store_bf16,
    store_fp16,
)
from offloadtrain.runtime.thread_pools import started_pool

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
    """Yield (keys, element, begin, end) of what of [lo, hi) belongs to parameters, cut where the
    key of the random bits changes."""
    for offset, numel, parameter, first in rows:
        begin, stop = max(lo, offset), min(hi, offset + numel)
        while begin < stop:
            element = begin - offset + first
            end = min(stop, offset - first + ((element >> 32) + 1 << 32))
            key = key_of(parameter, element)
            keys = (np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32))
            yield keys, np.uint32(element & 0xFFFFFFFF), begin, end
            begin = end
