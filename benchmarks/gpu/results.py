"""The results file: written after each measurement, so that one that is cut off keeps the rest."""

from __future__ import annotations

import json
import os
import platform
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

import offloadtrain
from offloadtrain.hardware.telemetry import probe
from offloadtrain.runtime import kernels

SCHEMA = 1


GOES_ON = timedelta(days=1)
"""A file is added to for so long; then the machine may be another one of the same name."""


class Results:
    """One JSON file per GPU and start: machine, versions, and every measurement by its name."""

    def __init__(self, folder: Path, title: str, now: datetime | None = None) -> None:
        """Goes on with the last file of this GPU, if it was begun within a day."""
        now = now or datetime.now(UTC)
        folder.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        self.path = folder / f"{slug}-{now:%Y%m%d}.json"
        self.values: dict[str, Any] = {
            "schema": SCHEMA,
            "device": title,
            "began": now.isoformat(timespec="seconds"),
            "measurements": {},
        }
        for path in sorted(folder.glob(f"{slug}-{'[0-9]' * 8}.json")):
            values = json.loads(path.read_text(encoding="utf-8"))
            if now - datetime.fromisoformat(values["began"]) < GOES_ON:
                self.path, self.values = path, values

    def has(self, name: str) -> bool:
        """Whether it was measured, or found to be missing; a failure is tried again."""
        found = self.values["measurements"].get(name)
        return found is not None and "error" not in found

    def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.values["measurements"].get(name, {})
        return found

    def describe(self, **facts: Any) -> None:
        """Facts of the machine and this run of the command."""
        self.values |= facts
        self._write()

    def add(self, name: str, found: dict[str, Any]) -> None:
        self.values["measurements"][name] = found
        self._write()

    def _write(self) -> None:
        fresh = self.path.with_suffix(".tmp")
        fresh.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
        os.replace(fresh, self.path)


def machine() -> dict[str, Any]:
    """What the measurements ran on."""
    told, on_gpu = probe(), torch.cuda.is_available()
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
        "offloadtrain": offloadtrain.__version__,
        "kernels": kernels.backend().name,
        "driver": told.driver,
        "cpu": told.cpu,
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": told.host_memory_bytes,
    }
    if on_gpu:
        gpu = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": gpu.name,
            "gpus": torch.cuda.device_count(),
            "gpu_memory_bytes": gpu.total_memory,
            "capability": [gpu.major, gpu.minor],
        }
    return found


def title() -> str:
    """Of the results file."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
