"""Compares the update of state on the disk with the drive's rate of concurrent reads and writes.

The bound of an update is the time of concurrent sequential O_DIRECT reads and writes of the same
bytes, with nothing else running (`drive_cases`). The engine reads, updates and writes the same
number of bytes in `step()` of a model whose gradients are ready. Cases alternate, once per round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import isqrt

import torch
from torch import nn

from offloadtrain.cli.bench.rounds import Case, Row, measure, ratio
from offloadtrain.engine import OffloadOptimizer, offload
from offloadtrain.optim import AdamW
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.disk_arena import DiskArena
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.layout.buffers import BufferKey, BufferSpec, Memory
from offloadtrain.step.layout.tiers import Tier

BUCKETS = 16
READ, WRITE, BOTH = "read", "write", "read and write at once"
GOAL = 0.85
"""Share of the bound that the engine's update should reach."""

BYTES_PER_PARAM = 12
_ENGINE = "the engine's update"


def run(folder: str, num_bytes: int, rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Measure with about `num_bytes` of state in files in `folder`.

    Returns:
        One row per case: `num_bytes` read and written, its median `seconds` and their rate in
        `gb_per_s`; `x_bound`: median over the rounds of bound over time; None for a case that is
        not an update.

    Raises:
        DiskError: there is no space for three times as much, or the disk fails.
    """
    width = max(isqrt(num_bytes // BYTES_PER_PARAM // BUCKETS) // 64, 1) * 64
    one_way = BUCKETS * width * width * BYTES_PER_PARAM
    with drive_cases(folder, one_way) as raw, _engine(folder, width) as update:
        cases: dict[str, Case] = {**raw, _ENGINE: update}

        def begin(number: int) -> None:
            say(f"disk, round {number}/{rounds}")
            update.prepare()

        seconds = measure(cases, rounds, begin)
    rows = []
    for case, times in seconds.items():
        median, moved = statistics.median(times), one_way * (1 if case in (READ, WRITE) else 2)
        rows.append(
            {
                "case": case,
                "num_bytes": moved,
                "seconds": median,
                "gb_per_s": moved / median / 1e9,
                "x_bound": ratio(seconds[BOTH], times) if case == _ENGINE else None,
            }
        )
    return rows


@contextmanager
def _engine(folder: str, width: int) -> Iterator[_Update]:
    """Yield the part of `step()` that runs after all gradients are on the host."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(BUCKETS)))
    lanes = ThreadLanes()
    with on_lanes(lanes):
        optimizer = offload(
            model,
            AdamW(lr=1e-4),
            device="cpu",
            precision="fp32",
            clip_norm=1.0,
            state_on="disk",
            scratch_dir=folder,
            scratch_in_memory=True,
        )
    try:
        yield _Update(optimizer, model, width)
    finally:
        optimizer.close()


class _Update:
    """The update of a step. `prepare` makes the gradients for the next call."""

    def __init__(self, optimizer: OffloadOptimizer, model: nn.Module, width: int) -> None:
        self._optimizer, self._model, self._width = optimizer, model, width

    def prepare(self) -> None:
        self._optimizer.backward(self._model(torch.ones(1, self._width)).mean())
        # Wait for the gradients, since their transfer is not part of the update.
        self._optimizer.lanes.synchronize()

    def __call__(self) -> None:
        self._optimizer.step()
        self._optimizer.synchronize()


def table(rows: Sequence[Row]) -> str:
    """Return all rows and the verdict as text."""
    lines = [f"{'case':24} {'GB':>8} {'s':>8} {'GB/s':>8} {'of the bound':>14}"]
    for row in rows:
        share = "-" if row["x_bound"] is None else f"{row['x_bound']:.2f}"
        figures = (row["num_bytes"] / 1e9, row["seconds"], row["gb_per_s"])
        lines.append(f"{row['case']:24} {' '.join(f'{x:8.2f}' for x in figures)} {share:>14}")
    rates = {row["case"]: row["gb_per_s"] for row in rows}
    x_bound = next(row["x_bound"] for row in rows if row["x_bound"] is not None)
    word = "reached" if x_bound >= GOAL else "missed"
    return "\n".join(
        (
            *lines,
            "",
            f"goal: the engine's update at {GOAL} of the bound or more: {x_bound:.2f}, {word}",
            # `doctor` measures fewer bytes.
            f"for a machine file: disk_read_gbps = {rates[READ]:.2f}, disk_write_gbps = "
            f"{rates[WRITE]:.2f}, disk_both_gbps = {rates[BOTH]:.2f}",
        )
    )


@contextmanager
def drive_cases(folder: str, num_bytes: int) -> Iterator[Mapping[str, Case]]:
    """Yield the cases, over a scratch file of about `num_bytes` in `folder`.

    Buckets are moved one after the other, in each direction through separate memory. In `BOTH`,
    a thread reads the whole file while another writes it, half a file apart.

    Raises:
        DiskError: there is too little space, or the disk fails.
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
