"""Measurement of the drive: checkpoints, and state on the disk."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from offloadtrain.cli.bench.drive import BOTH, READ, WRITE, drive_cases
from offloadtrain.cli.bench.rounds import measure
from offloadtrain.hardware.direct_io import THREADS, DirectFile
from offloadtrain.hardware.file_system import IN_MEMORY, kind_of

CHECKPOINT_BYTES, PIECE_BYTES = 256 << 20, 8 << 20
STATE_BYTES, ROUNDS = 128 << 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRates:
    """10^9 bytes per second, as in `Machine`; 0: unknown."""

    disk_gbps: float
    disk_read_gbps: float = 0.0
    disk_write_gbps: float = 0.0
    disk_both_gbps: float = 0.0


def drive_rates(folder: Path) -> DriveRates:
    """Measure durable writes and, unless the folder is in host memory, moves of state.

    Raises:
        OSError: it cannot be written, or is full.
        DiskError: the same, of state.
    """
    checkpoints = checkpoint_gbps(folder)
    if kind_of(folder) in IN_MEMORY:
        return DriveRates(disk_gbps=checkpoints)
    with drive_cases(str(folder), STATE_BYTES) as cases:
        seconds = measure(cases, ROUNDS, lambda number: None)
    read, write, both = (
        ways * STATE_BYTES / statistics.median(seconds[case]) / 1e9
        for case, ways in ((READ, 1), (WRITE, 1), (BOTH, 2))
    )
    return DriveRates(
        disk_gbps=checkpoints, disk_read_gbps=read, disk_write_gbps=write, disk_both_gbps=both
    )


def checkpoint_gbps(folder: Path) -> float:
    """Measure durable writes as a checkpoint makes them: past the page cache, several at once.

    Raises:
        OSError: it cannot be written, or is full.
    """
    piece = memoryview(mmap.mmap(-1, PIECE_BYTES))
    piece[:] = os.urandom(PIECE_BYTES)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as made:
        file = DirectFile.create(Path(made) / "written", CHECKPOINT_BYTES)
        try:
            began = time.perf_counter()
            with ThreadPoolExecutor(THREADS) as pool:
                starts = range(0, CHECKPOINT_BYTES, PIECE_BYTES)
                list(pool.map(lambda start: file.write(piece, start), starts))
            file.sync()
            return CHECKPOINT_BYTES / (time.perf_counter() - began) / 1e9
        finally:
            file.close()
