"""Memory of a run's rank for its log: owners, live samples, and the peaks of each step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from offloadtrain.engine import StepReport
from offloadtrain.events import schema
from offloadtrain.events.memory_ring import RingWriter
from offloadtrain.hardware.memory_sampler import MemorySampler
from offloadtrain.hardware.nvml import Nvml
from offloadtrain.parallel.pipeline.stage_optimizers import AnyOptimizer
from offloadtrain.runtime.device_memory import AllocatorCounters
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.train.log.unaccounted import UnaccountedMemory

_EVERY_S = 1.0
_CHANGE = 0.005

Rows = tuple[schema.MemoryRow, ...]


class RunMemory:
    """Reads the engine's Ledger and torch's allocator, and runs the memory sampler.

    Attributes:
        read: the rows read last.
    """

    def __init__(
        self,
        optimizer: AnyOptimizer,
        emit: Callable[[schema.Event], None],
        ring: Path,
        *,
        nvml: Nvml,
        warn: Callable[[str, str], None],
    ) -> None:
        """Begin to sample.

        Args:
            emit: gets records, also on the sampler's thread.
            ring: path of the ring file.
        """
        self.read: Rows = ()
        self._optimizer, self._emit = optimizer, emit
        self._logged: dict[tuple[str, str, str], int] = {}
        self._read_s = -math.inf
        self._allocator: AllocatorCounters | None = None
        if optimizer.device.type == "cuda":
            free = partial(nvml.memory_free, gpu_uuid(optimizer.device))
            self._allocator = AllocatorCounters(optimizer.device, free)
        # On the CPU activations are in the same memory, and in no Ledger.
        unaccounted = UnaccountedMemory(optimizer.ledger) if self._allocator else None

        def compare() -> None:
            if unaccounted is not None and (message := unaccounted.look()):
                warn("host-memory", message)

        self._sampler = MemorySampler(
            emit,
            each_second=compare,
            read_device=self._allocator.read if self._allocator else None,
            pinned=lambda: optimizer.ledger.total(Tier.HOST) if optimizer.pinned else 0,
            ring=_ring(ring, warn),
        )

    def step_begins(self, step: int, *, follow: bool) -> None:
        """Tell what step is in progress; `follow`: its lanes are sampled, and so is its memory."""
        self._sampler.step_begins(step, follow=follow)

    def step_ends(self, report: StepReport) -> tuple[int, int]:
        """Return the step's peaks on device and host in bytes; log its curve if it was sampled."""
        on_host, curve = self._sampler.step_ends()
        if curve is not None and report.sampled:
            self._emit(curve)
        return (self._allocator.step_ends() if self._allocator else 0), on_host

    def rows(self) -> Rows:
        """Read the engine's Ledger and, on a GPU, torch's other memory."""
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
        """Read the rows once a second; empty unless one has changed by half a percent."""
        if time.monotonic() - self._read_s <= _EVERY_S:
            return ()
        self.read, self._read_s = self.rows(), time.monotonic()
        now = {
            (row.owner, row.tier, what): size
            for row in self.read
            for what, size in (("now", row.num_bytes), ("peak", row.peak_bytes))
        }
        same = now.keys() == self._logged.keys() and all(
            abs(now[key] - self._logged[key]) <= _CHANGE * self._logged[key] for key in now
        )
        if same:
            return ()
        self._logged = now
        return self.read

    def close(self) -> None:
        """End the sampler with a last record. Idempotent."""
        self._sampler.close()


def gpu_uuid(device: torch.device) -> str:
    """Return the GPU's name in NVML."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _ring(path: Path, warn: Callable[[str, str], None]) -> RingWriter | None:
    try:
        return RingWriter(path)
    except OSError as error:
        warn("no-ring", f"live memory is 2 s old at most, not 0.2 s: no ring file ({error})")
        return None
