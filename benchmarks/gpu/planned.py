"""What the plan says of a measurement, with the rates that were measured on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.gpu.spec import Spec
from offloadtrain.config.job import OFFLOAD, Config
from offloadtrain.config.sections import DataConfig, TrainConfig
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.plan import make


def job_of(spec: Spec) -> Config:
    """Return the job that makes the same steps."""
    options: dict[str, Any] = {
        "precision": spec.precision,
        "activation": "recompute" if spec.recompute else "keep",
    }
    return Config(
        name=spec.size,
        model=spec.shape,
        data=DataConfig(train="-", seq_len=spec.seq_len),
        offload=OFFLOAD.replace(**options | spec.options),
        train=TrainConfig(
            steps=1, micro_batch=spec.micro_batch, grad_accum_steps=spec.grad_accum_steps
        ),
    )


def planned(spec: Spec, machine: Machine) -> dict[str, Any]:
    """Seconds of a step, exposed seconds by lane, and bytes by tier."""
    if spec.gpu_memory and not machine.on_cpu:
        machine = replace(machine, gpu_memory=str(spec.gpu_memory))
    plan = make(job_of(spec), "measured", machine)
    return {
        "fits": plan.fits,
        "step_s": plan.prediction.seconds,
        "none_right_s": plan.prediction.none_right_s,
        "exposed_s": dict(plan.prediction.exposed_s),
        "busy_s": dict(plan.prediction.busy_s),
        "device_bytes": sum(plan.device.values()),
        "host_bytes": sum(plan.host.values()),
    }
