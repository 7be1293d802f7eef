"""The largest model that is planned to train under a cap, trained: `python -m …largest BYTES`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.gpu.spec import Spec
from benchmarks.gpu.step import measure
from offloadtrain.config.model_shape import SIZES
from offloadtrain.plan.search.largest import largest
from offloadtrain.runtime.detect_machine import here


def train(gpu_memory: int, *, toy: bool) -> dict[str, Any]:
    """Two steps of the largest model with its weights on the device, in whichever state format
    holds most. `toy`: of the same plan on the host, and a model of two layers."""
    name, machine = here(on_gpu=torch.cuda.is_available())
    if toy:
        machine = replace(machine, host_memory="6 GiB")
    else:
        machine = replace(machine, gpu_memory=str(gpu_memory))
    rows = [row for row in largest(name, machine) if row.working == "device"]
    row = max(rows, key=lambda row: row.params)
    assert row.plan is not None, "not even a small model fits"
    plan, shape, batch = row.plan, row.plan.job.model, row.plan.job.train
    planned = {
        "model": row.model,
        "params": row.params,
        "layers": shape.num_layers,
        "d_model": shape.d_model,
        "state": row.state,
        "device_bytes": sum(plan.device.values()),
        "host_bytes": max(plan.host_peaks.values()),
    }
    if toy:
        shape = SIZES["debug"]
    spec = Spec(
        size="largest",
        custom=asdict(shape),
        seq_len=32 if toy else plan.job.data.seq_len,
        micro_batch=1 if toy else batch.micro_batch,
        grad_accum_steps=1 if toy else batch.grad_accum_steps,
        precision=plan.job.offload.precision,
        options={"state": row.state},
        gpu_memory=gpu_memory,
        warm=1,
        steps=1,
    )
    return measure(spec) | {"planned": planned}


if __name__ == "__main__":
    print(json.dumps(train(int(sys.argv[1]), toy="--toy" in sys.argv)))
