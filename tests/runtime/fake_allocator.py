"""A stand-in for the counters of torch's allocator on a GPU, and for the driver's free bytes."""

from __future__ import annotations

import threading

import pytest
import torch


class FakeAllocator:
    """Counts what is allocated, as torch does: one peak, set back on request only.

    It refuses to wait for the device, as a sampler must not.
    """

    def __init__(self, total: int) -> None:
        self.total, self.others = total, 0
        self.allocated = self.reserved = self.peak = self.inactive = 0
        self._lock = threading.Lock()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Until the patch is undone."""
        patch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.set_back)
        patch.setattr(torch.cuda, "synchronize", self.refuse)
        patch.setattr(torch.cuda, "mem_get_info", self.refuse)

    def take(self, num_bytes: int) -> None:
        """Allocate, or free a negative number of bytes: they stay reserved."""
        with self._lock:
            self.allocated += num_bytes
            self.reserved = max(self.reserved, self.allocated)
            self.peak = max(self.peak, self.allocated)

    def free(self) -> int:
        return self.total - self.reserved - self.others

    def stats(self, device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        with self._lock:
            return {
                "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}},
                "reserved_bytes": {"all": {"current": self.reserved}},
                "inactive_split_bytes": {"all": {"current": self.inactive}},
            }

    def set_back(self, device: torch.device) -> None:
        with self._lock:
            self.peak = self.allocated

    def refuse(self, *args: object) -> None:
        raise AssertionError("the sampler waits for the device")
