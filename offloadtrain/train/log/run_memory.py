"""Memory of a rank for its log: owners, live samples, peaks of each step, unaccounted memory."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from offloadtrain.config.units import format_bytes
from offloadtrain.engine import StepReport
from offloadtrain.events import schema
from offloadtrain.hardware.memory_sampler import MemorySampler
from offloadtrain.hardware.nvml import Nvml
from offloadtrain.hardware.telemetry import anonymous_mappings
from offloadtrain.parallel.pipeline.stage_optimizers import AnyOptimizer
from offloadtrain.runtime.arena import Ledger
from offloadtrain.runtime.device_memory import AllocatorCounters
from offloadtrain.step.layout.tiers import Tier

ALLOWED_BYTES = 4 << 30
"""Allowed growth since training began: libraries loaded late, compiled code, batches."""
_NEAR = 0.2
"""Relative difference in size below which an owner is named as a likely cause."""


class UnaccountedMemory:
    """Compares the anonymous memory of this process with the Ledger's host memory.

    The Ledger counts every byte that the engine maps. Any other growth is unplanned, and may make
    the kernel kill the run.
    """

    def __init__(self, ledger: Ledger, read: Callable[[], int | None] | None = None) -> None:
        """`read` returns the anonymous bytes of the process, or None if unknown."""
        self._ledger = ledger
        self._read = read or anonymous_bytes
        self._before = self._beyond()
        self._has_warned = self._was_beyond = False

    def look(self) -> str | None:
        """Return a warning once: memory beyond the Ledger has grown by more than ALLOWED_BYTES in
        two looks in a row. (Memory that is being mapped is not in the Ledger yet.)"""
        beyond = self._beyond()
        if self._has_warned or beyond is None or self._before is None:
            return None
        growth = beyond - self._before
        was_beyond, self._was_beyond = self._was_beyond, growth > ALLOWED_BYTES
        if not (was_beyond and self._was_beyond):
            return None
        self._has_warned = True
        in_ledger = self._ledger.total(Tier.HOST)
        largest = [f"{name} {format_bytes(size)}" for size, name in anonymous_mappings()[:2]]
        return (
            f"this process has {format_bytes(in_ledger + beyond)} of host memory, of which the "
            f"engine's Ledger has {format_bytes(in_ledger)}. The rest has grown by "
            f"{format_bytes(growth)} since training began{self._near(growth)}. Largest mappings: "
            f"{', '.join(largest)}. If it keeps growing, the kernel may kill the run: lower "
            "train.micro_batch, or keep less on the host"
        )

    def _beyond(self) -> int | None:
        anonymous = self._read()
        return None if anonymous is None else anonymous - self._ledger.total(Tier.HOST)

    def _near(self, growth: int) -> str:
        """Name the owner of about this size, which may have been copied."""
        rows = [row for row in self._ledger.rows() if row.tier == Tier.HOST.value and row.bytes]
        near = min(rows, key=lambda row: abs(row.bytes - growth), default=None)
        if near is None or abs(near.bytes - growth) > _NEAR * growth:
            return ""
        return f", about the size of '{near.owner}' ({format_bytes(near.bytes)})"


def anonymous_bytes() -> int | None:
    """Return the anonymous resident memory of this process; None if unknown. It takes microseconds,
    unlike /proc/self/smaps_rollup, which walks all pages."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        if match := re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE):
            return int(match[1]) << 10
    return None


_EVERY_S = 1.0
_CHANGE = 0.005

Rows = tuple[schema.MemoryRow, ...]


class RunMemory:
    """Reads the engine's Ledger and torch's allocator, and runs the memory sampler.

    Attributes:
        sampler: takes samples from `begin` until it is closed.
    """

    _optimizer: AnyOptimizer

    def __init__(self, emit: Callable[[schema.Event], None]) -> None:
        """`emit` receives records, also on the sampler's thread."""
        self._emit, self.sampler = emit, MemorySampler(emit)
        self._read: Rows = ()
        self._logged: dict[tuple[str, str, str], int] = {}
        self._read_s = -math.inf
        self._allocator: AllocatorCounters | None = None

    def begin(
        self, optimizer: AnyOptimizer, *, nvml: Nvml, warn: Callable[[str, str], None]
    ) -> None:
        """Start the sampler."""
        self._optimizer = optimizer
        if optimizer.device.type == "cuda":
            free = partial(nvml.memory_free, gpu_uuid(optimizer.device))
            self._allocator = AllocatorCounters(optimizer.device, free)
        # On the CPU activations are host memory too, but no Ledger has them.
        unaccounted = UnaccountedMemory(optimizer.ledger) if self._allocator else None

        def compare() -> None:
            if unaccounted is not None and (message := unaccounted.look()):
                warn("host-memory", message)

        self.sampler.begin(
            each_second=compare,
            read_device=self._allocator.read if self._allocator else None,
            pinned=lambda: optimizer.ledger.total(Tier.HOST) if optimizer.pinned else 0,
        )

    def end_step(self, report: StepReport) -> tuple[int, int]:
        """Return the step's peak bytes on (device, host); log its memory curve if sampled."""
        on_host, curve = self.sampler.end_step()
        if curve is not None and report.sampled:
            self._emit(curve)
        return (self._allocator.end_step() if self._allocator else 0), on_host

    def rows(self) -> Rows:
        """Return the engine's Ledger and, on a GPU, torch's other memory."""
        rows = [
            schema.MemoryRow(
                owner=row.owner, tier=row.tier, num_bytes=row.bytes, peak_bytes=row.peak_bytes
            )
            for row in self._optimizer.ledger.rows()
        ]
        if self._allocator is not None:
            engine_bytes = sum(row.num_bytes for row in rows if row.tier == Tier.DEVICE)
            rows.append(
                schema.MemoryRow(
                    owner="activations and gradients",
                    tier=Tier.DEVICE.value,
                    num_bytes=max(self._allocator.read().allocated - engine_bytes, 0),
                    peak_bytes=max(self._allocator.run_peak - engine_bytes, 0),
                )
            )
        return tuple(rows)

    def news(self) -> Rows:
        """Return the rows at most once a second; () unless a row changed by half a percent."""
        if time.monotonic() - self._read_s <= _EVERY_S:
            return ()
        self._read, self._read_s = self.rows(), time.monotonic()
        now = {
            (row.owner, row.tier, what): size
            for row in self._read
            for what, size in (("now", row.num_bytes), ("peak", row.peak_bytes))
        }
        same = now.keys() == self._logged.keys() and all(
            abs(now[key] - self._logged[key]) <= _CHANGE * self._logged[key] for key in now
        )
        if same:
            return ()
        self._logged = now
        return self._read

    def engine_bytes(self) -> tuple[int, int]:
        """Return the last read bytes on (device, host); on the CPU all are host bytes."""
        device = sum(row.num_bytes for row in self._read if row.tier == Tier.DEVICE)
        host = sum(row.num_bytes for row in self._read if row.tier == Tier.HOST)
        return (device, host) if self._optimizer.device.type != "cpu" else (0, device + host)


def gpu_uuid(device: torch.device) -> str:
    """Return the GPU's UUID in NVML's form."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
