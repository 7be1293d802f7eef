"""One measurement in a process of its own: `python -m benchmarks.gpu.step SPEC` prints JSON.

A step's time is from one return of the optimizer's step to the next, with each loss read, as a
training loop has it; between steps nobody waits for the device.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.spec import Spec
from benchmarks.gpu.systems import MissingError, System, make
from offloadtrain.events import Record, Span, Step
from offloadtrain.memory import Tier
from offloadtrain.peaks import peak_flops
from offloadtrain.shapes import flops_per_token, num_params
from offloadtrain.trace import chrome_trace


def measure(spec: Spec, trace: Path | None = None) -> dict[str, Any]:
    """Figures and raw samples; {"missing": why} where the system is not installed, or does not fit
    and is not ours."""
    try:
        return _measure(spec, trace)
    except MissingError as missing:
        return {"missing": str(missing)}
    except torch.OutOfMemoryError as error:
        if spec.system == "offloadtrain":
            raise
        return {"missing": f"does not fit: {str(error).splitlines()[0]}"}


def _measure(spec: Spec, trace: Path | None) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _cap(spec, device)
    torch.manual_seed(0)
    system = make(spec, device)
    size = (spec.micro_batch, spec.seq_len)
    tokens = torch.randint(spec.shape.vocab_size, size, device=device)
    samples, waits, losses = [], [], []
    last = time.perf_counter()
    for number in range(spec.warm + spec.steps):
        if trace is not None and system.optimizer is not None and number == spec.warm:
            system.optimizer.sample_timeline()
        total = sum(system.micro(tokens, tokens) for _ in range(spec.grad_accum_steps))
        system.step()
        losses.append(float(total) / spec.grad_accum_steps)
        now = time.perf_counter()
        if number >= spec.warm:
            samples.append(now - last)
            waits.append(_told(system))
        last = now
        if trace is not None and number == spec.warm:
            _write_trace(trace, system, samples[-1])
    found = _figures(spec, device, samples, system) | {"losses": losses, "reports": waits}
    system.close()
    return found


def _cap(spec: Spec, device: torch.device) -> None:
    if spec.gpu_memory and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(spec.gpu_memory / total, 1.0), device)


def _told(system: System) -> dict[str, Any]:
    report = system.optimizer.last_step if system.optimizer else None
    if report is None:
        return {}
    return {
        "exposed_ms": report.exposed_ms,
        "busy_ms": {str(lane): spent for lane, spent in report.busy_ms.items()},
        "d2h_bytes": report.d2h_bytes,
        "h2d_bytes": report.h2d_bytes,
    }


def _figures(
    spec: Spec, device: torch.device, samples: list[float], system: System
) -> dict[str, Any]:
    step_s = statistics.median(samples)
    rate = spec.step_tokens / step_s
    flops = rate * flops_per_token(spec.shape, spec.seq_len)
    on_gpu = device.type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(device), spec.precision) if on_gpu else None
    params = num_params(spec.shape)
    host = system.optimizer.ledger.total(Tier.HOST) if system.optimizer else None
    figures = {
        "params": params,
        "step_s": step_s,
        "tokens_per_s": rate,
        "tflops": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "device_peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "device_reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "host_bytes": host,
        "host_bytes_per_param": host / params if host is not None else None,
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if system.optimizer is not None and system.optimizer.last_step is not None:
        report = system.optimizer.last_step
        figures["bus_bytes_per_param"] = (report.d2h_bytes + report.h2d_bytes) / params
        figures["ledger"] = [asdict(row) for row in system.optimizer.ledger.rows()]
    return {"figures": figures, "samples": samples}


def _write_trace(path: Path, system: System, step_s: float) -> None:
    assert system.optimizer is not None and system.optimizer.last_step is not None
    report = system.optimizer.last_step
    step = Step(step=1, loss=0.0, lr=0.0, tokens=0, step_ms=1e3 * step_s)
    spans = [Span(step=1, **asdict(interval)) for interval in report.timeline]
    records = [Record(event, 0, 0.0) for event in (step, *spans)]
    path.write_text(json.dumps(chrome_trace(records)), encoding="utf-8")


def main() -> None:
    spec = Spec.loads(sys.argv[1])
    trace = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    print(json.dumps(measure(spec, trace)))


if __name__ == "__main__":
    main()
