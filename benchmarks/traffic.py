"""The limit of one-pass Adam: its 28 bytes per parameter, and next to no arithmetic."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, error_model="numpy")
def _traffic(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, working: Any) -> None:
    """Every load feeds a store, so that the compiler can leave none out."""
    shrink = np.float32(0.999)
    for i in range(master.size):
        master[i] = master[i] * shrink
        exp_avg[i] = exp_avg[i] * shrink
        exp_avg_sq[i] = exp_avg_sq[i] * shrink
        working[i] = np.uint16(grad[i] ^ np.uint16(1))


class Traffic:
    """Reads grad, reads and writes the three fp32 streams, writes working; contiguous parts."""

    def __init__(self, arrays: tuple[Any, ...], threads: int) -> None:
        cuts = [arrays[0].size * i // threads for i in range(threads + 1)]
        self._parts = [
            tuple(array[lo:hi] for array in arrays) for lo, hi in itertools.pairwise(cuts)
        ]
        self._pool = ThreadPoolExecutor(max(threads - 1, 1))

    def __call__(self) -> None:
        others = [self._pool.submit(_traffic, *part) for part in self._parts[1:]]
        _traffic(*self._parts[0])
        for other in others:
            other.result()
