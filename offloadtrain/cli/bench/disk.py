"""State on the disk against what the drive reads and writes at once.

The bound of an update is what sequential O_DIRECT reads and writes of the same bytes take when
both run at once and nothing else does: a thread reads the whole file while another writes it, half
a file apart. The engine reads, updates and writes as many bytes in the `step()` of a model, whose
gradients were there before. All cases run in turn, once per round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isqrt
from typing import Any

import torch
from torch import nn

from offloadtrain.cli.bench.rounds import Case, Seconds, ratio
from offloadtrain.cli.bench.rounds import measure as in_turn
from offloadtrain.engine import OffloadOptimizer, offload
from offloadtrain.optim import AdamW
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.disk_arena import DiskArena
from offloadtrain.runtime.lanes import on_lanes
from offloadtrain.runtime.lanes.threads import ThreadLanes
from offloadtrain.step.memory import MemoryRequest

GOAL = 0.85
"""Share of the bound that the engine's update is to reach."""

BLOCKS = 16
_BYTES_PER_PARAM = 12
_READ, _WRITE, _BOTH, _ENGINE = "read", "write", "read and write at once", "the engine's update"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRow:
    """One case.

    Attributes:
        num_bytes: read and written.
        gb_per_s: their median rate.
        x_bound: median over the rounds of bound over time; None for what is no update.
    """

    case: str
    num_bytes: int
    seconds: float
    gb_per_s: float
    x_bound: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run(folder: str, num_bytes: int, rounds: int, say: Callable[[str], None]) -> list[DiskRow]:
    """Measure with about so many bytes of state in files in `folder`.

    Raises:
        DiskError: there is no room for three times as much, or the disk fails.
    """
    width = max(isqrt(num_bytes // _BYTES_PER_PARAM // BLOCKS) // 64, 1) * 64
    with _raw(folder, width) as raw, _engine(folder, width) as update:
        cases: dict[str, Case] = {**raw, _ENGINE: update}

        def begin(number: int) -> None:
            say(f"disk, round {number}/{rounds}")
            update.prepare()

        seconds = in_turn(cases, rounds, begin)
    one_way = BLOCKS * width * width * _BYTES_PER_PARAM
    return [_row(case, one_way * (1 if case in (_READ, _WRITE) else 2), seconds) for case in cases]


def _row(case: str, num_bytes: int, seconds: Seconds) -> DiskRow:
    median = statistics.median(seconds[case])
    bound = ratio(seconds[_BOTH], seconds[case]) if case == _ENGINE else None
    return DiskRow(
        case=case,
        num_bytes=num_bytes,
        seconds=median,
        gb_per_s=num_bytes / median / 1e9,
        x_bound=bound,
    )


@contextmanager
def _raw(folder: str, width: int) -> Iterator[Mapping[str, Case]]:
    """A bucket's state after the other, each way through memory of its own."""
    arena = DiskArena(Ledger(), folder, in_memory=True)
    files = arena.map([MemoryRequest("bench", 3 * width * width, "float32")] * BLOCKS)
    memory = Arena(Ledger(), pin=False).map(
        [MemoryRequest("bench", files[0].numel(), "float32")] * 2
    )

    def read() -> None:
        for file in files:
            arena.read(file, memory[0])

    def write(first: int = 0) -> None:
        for number in range(BLOCKS):
            arena.write(memory[1], files[(first + number) % BLOCKS])

    def both() -> None:
        with ThreadPoolExecutor(2) as pool:
            for one in (pool.submit(read), pool.submit(write, BLOCKS // 2)):
                one.result()

    try:
        yield {_READ: read, _WRITE: write, _BOTH: both}
    finally:
        arena.close()


@contextmanager
def _engine(folder: str, width: int) -> Iterator[_Update]:
    """What `step()` does once all gradients are on the host."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(BLOCKS)))
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
    """A step's update. `prepare` makes the gradients for the next call."""

    def __init__(self, optimizer: OffloadOptimizer, model: nn.Module, width: int) -> None:
        self._optimizer, self._model, self._width = optimizer, model, width

    def prepare(self) -> None:
        self._optimizer.backward(self._model(torch.ones(1, self._width)).mean())
        # The gradients have to be there: their way is not the update's.
        self._optimizer.lanes.synchronize()

    def __call__(self) -> None:
        self._optimizer.step()
        self._optimizer.synchronize()


def table(rows: Sequence[DiskRow]) -> str:
    """All rows and the verdict, for people."""
    lines = [f"{'case':24} {'GB':>8} {'s':>8} {'GB/s':>8} {'of the bound':>14}"]
    for row in rows:
        share = "-" if row.x_bound is None else f"{row.x_bound:.2f}"
        size = row.num_bytes / 1e9
        lines.append(
            f"{row.case:24} {size:8.2f} {row.seconds:8.2f} {row.gb_per_s:8.2f} {share:>14}"
        )
    return "\n".join([*lines, "", verdict(rows), machine_keys(rows)])


def machine_keys(rows: Sequence[DiskRow]) -> str:
    """Return what a machine file says of this drive, which `doctor` does not measure."""
    rates = {row.case: row.gb_per_s for row in rows}
    return (
        f"for a machine file: disk_read_gbps = {rates[_READ]:.2f}, disk_write_gbps = "
        f"{rates[_WRITE]:.2f}, disk_both_gbps = {rates[_BOTH]:.2f}"
    )


def verdict(rows: Sequence[DiskRow]) -> str:
    """Compare the engine's update with the goal."""
    found = next(row.x_bound for row in rows if row.x_bound is not None)
    word = "reached" if found >= GOAL else "missed"
    return f"goal: the engine's update at {GOAL} of the bound or more: {found:.2f}, {word}"
