"""The samples of a rank's own GPU over time, as its log has them."""

from __future__ import annotations

import math
from typing import Any

from offloadtrain_tui.reading.series import Series
from offloadtrain_tui.reading.timed import Times

FIELDS = (
    "utilization_percent", "power_w", "temperature_c", "clock_mhz", "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s", "nvlink_rx_bytes_per_s", "nvlink_tx_bytes_per_s",
)  # fmt: skip


class GpuHistory(Times):
    """Columns that only grow; one thread adds, another reads."""

    def __init__(self) -> None:
        super().__init__()
        self.series = {name: Series() for name in FIELDS}

    def add(self, time_s: float, gpus: list[Any], uuid: object) -> None:
        """Add a parsed sample of the machine: of this GPU, or of the only one."""
        known = [gpu for gpu in gpus if isinstance(gpu, dict)]
        named = [gpu for gpu in known if gpu.get("uuid") == uuid]
        samples = named or (known if len(known) == 1 else [])
        if not samples:
            return
        for name, series in self.series.items():
            series.append(_number(samples[0].get(name)))
        self.stamp(time_s)


def _number(value: Any) -> float | None:
    if type(value) not in (int, float) or not abs(value) < 1e18:
        return None
    return float(value) if math.isfinite(value) else None
