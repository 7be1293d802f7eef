"""Measure the speed of a drive for optimizer state: reads, writes, both at once; no page cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from offloadtrain.cli.bench.rounds import Case
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.disk_arena import DiskArena
from offloadtrain.step.layout.buffers import BufferKey, BufferSpec, Memory
from offloadtrain.step.layout.tiers import Tier

BUCKETS = 16
READ, WRITE, BOTH = "read", "write", "read and write at once"


@contextmanager
def drive_cases(folder: str, num_bytes: int) -> Iterator[Mapping[str, Case]]:
    """Yield the cases, over a scratch file in `folder` of so many bytes, about.

    One bucket after the other is moved, each way through memory of its own. With both ways at once
    a thread reads the whole file while another writes it, half a file apart.

    Raises:
        DiskError: there is no room, or the disk fails.
    """
    arena = DiskArena(Ledger(), folder, in_memory=True)
    row = BufferSpec("bench", num_bytes // BUCKETS // 4, "float32", Tier.DISK)
    files = arena.map({BufferKey(slot, Memory.STATE_FILE): row for slot in range(BUCKETS)})
    memory = Arena(Ledger(), pin=False).map([row] * 2)

    def read() -> None:
        for file in files:
            arena.read(file, memory[0])

    def write(first: int = 0) -> None:
        for number in range(BUCKETS):
            arena.write(memory[1], files[(first + number) % BUCKETS])

    def both() -> None:
        with ThreadPoolExecutor(2) as pool:
            for future in (pool.submit(read), pool.submit(write, BUCKETS // 2)):
                future.result()

    try:
        yield {READ: read, WRITE: write, BOTH: both}
    finally:
        arena.close()
