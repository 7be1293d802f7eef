"""New memory is faulted in whole, and stays zero."""

from __future__ import annotations

import mmap
from resource import RUSAGE_SELF, getrusage

import torch

from offloadtrain.runtime import kernels
from tests.runtime.kernels.kernel_cases import each_backend

PAGES = 4096


def faults() -> int:
    return getrusage(RUSAGE_SELF).ru_minflt


@each_backend
def test_every_page_is_there_and_zero(backend: kernels.Backend) -> None:
    mapping = mmap.mmap(-1, PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)  # a fault for each page
    memory = torch.frombuffer(memoryview(mapping), dtype=torch.float32)
    with kernels.use(backend):
        before = faults()
        kernels.first_touch(memory)
        touched = faults()
    memory.view(PAGES, -1)[:, 0] = 1.0
    written = faults()
    assert touched - before >= PAGES
    assert written - touched < PAGES // 2, "pages had not been there to write to"
    assert memory.sum() == PAGES, "what is not written is zero"
