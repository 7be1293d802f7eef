"""One measurement in a process of its own: `python -m benchmarks.gpu.step SPEC [TRACE]` prints
JSON."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.running import Running
from benchmarks.gpu.spec import Spec
from benchmarks.gpu.systems import MissingError, cap, here
from offloadtrain.config.errors import HostMemoryError


def measure(spec: Spec, trace: Path | None = None) -> dict[str, Any]:
    """Figures and raw samples; {"missing": why} where the system is not installed or the host has
    not that much memory, or the GPU has not and it is not ours."""
    try:
        return _measure(spec, trace)
    except (MissingError, HostMemoryError) as missing:
        return {"missing": str(missing)}
    except torch.OutOfMemoryError as error:
        if spec.system == "offloadtrain":
            raise
        return {"missing": f"does not fit: {str(error).splitlines()[0]}"}


def _measure(spec: Spec, trace: Path | None) -> dict[str, Any]:
    device = here()
    cap(spec.gpu_memory, device)
    running = Running(spec, device)
    running.steps(spec.warm)
    samples = running.measured(spec.steps)
    on_gpu = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    running.sample(trace)
    found = running.found(samples, peak)
    found["figures"]["device_reserved_bytes"] = (
        torch.cuda.max_memory_reserved(device) if on_gpu else None
    )
    found["figures"]["rss_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    running.system.close()
    return found


def main() -> None:
    spec = Spec.loads(sys.argv[1])
    trace = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    print(json.dumps(measure(spec, trace)))


if __name__ == "__main__":
    main()
