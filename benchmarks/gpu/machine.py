"""The machine's rates, and Adam by format and threads: `python -m benchmarks.gpu.machine`."""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.gpu import bus
from benchmarks.gpu.systems import here
from offloadtrain.cli.bench.adam import SCALARS, allocate
from offloadtrain.cli.bench.rounds import measure as rounds_of
from offloadtrain.cli.doctor.measure import measure
from offloadtrain.hardware.host_memory import available_bytes
from offloadtrain.runtime import kernels
from offloadtrain.runtime.device import resolve_precision

STATES = ("fp32", "split16", "int8")
ROUNDS = 3


def rates(*, toy: bool) -> dict[str, Any]:
    """What doctor measures, and Gparam/s of Adam by format and number of threads."""
    device = here()
    found = measure(
        device,
        bf16=resolve_precision("auto", device)[0] == "bf16",
        host_memory=available_bytes(),
        cores=len(os.sched_getaffinity(0)),
        drive=None,
        quick=toy,
        say=lambda text: print(text, file=sys.stderr),
    )
    return {
        "machine": asdict(found),
        "bus_gbps": bus.rates(device, 1 << 20 if toy else 1 << 30),
        "adam_gparams": _adam(1 << 20 if toy else 64 << 20),
    }


def _adam(numel: int) -> dict[str, dict[str, float]]:
    states = STATES if kernels.backend().name == "native" else STATES[:1]
    buffers = allocate(numel, states)
    by_threads: dict[str, dict[str, float]] = {}
    most = kernels.backend().threads
    for threads in sorted({1, 2, max(most // 2, 1), most}):
        kernels.set_threads(threads)
        cases = {
            name: partial(
                kernels.update,
                state,
                buffers.grad,
                SCALARS,
                layout=buffers.layout,
                working=buffers.working if name == "fp32" else None,
            )
            for name, state in buffers.states.items()
        }
        seconds = rounds_of(cases, ROUNDS, lambda number: None)
        medians = {name: numel / statistics.median(s) / 1e9 for name, s in seconds.items()}
        by_threads[str(threads)] = medians
    kernels.set_threads(None)
    return by_threads


if __name__ == "__main__":
    print(json.dumps(rates(toy="--toy" in sys.argv)))
