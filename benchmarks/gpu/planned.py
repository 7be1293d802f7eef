"""What the plan says of a measurement, with the rates that were measured on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.gpu.spec import Spec
from offloadtrain.config import Config, DataConfig, DeviceConfig, TrainConfig
from offloadtrain.plan.changes import applied
from offloadtrain.plan.machine import Machine
from offloadtrain.plan.plan import make

_KEYS = {
    "state": "optim.state",
    "state_on": "optim.state_on",
    "update": "optim.update",
    "working": "device.working",
    "activation": "device.activation",
}


def planned(spec: Spec, machine: Machine) -> dict[str, Any]:
    """Seconds of a step, exposed seconds by lane, and bytes by tier."""
    config = Config(
        name=spec.size,
        model=spec.shape,
        data=DataConfig(train="-", seq_len=spec.seq_len),
        device=DeviceConfig(
            precision=spec.precision,  # type: ignore[arg-type]
            activation="recompute" if spec.recompute else "keep",
        ),
        train=TrainConfig(
            steps=1, micro_batch=spec.micro_batch, grad_accum_steps=spec.grad_accum_steps
        ),
    )
    config = applied(config, {_KEYS[key]: value for key, value in spec.options.items()})
    if spec.gpu_memory and not machine.on_cpu:
        machine = replace(machine, gpu_memory=str(spec.gpu_memory))
    found = make(config, "measured", machine)
    return {
        "fits": found.fits,
        "step_s": found.prediction.seconds,
        "exposed_s": dict(found.prediction.exposed_s),
        "busy_s": dict(found.prediction.busy_s),
        "device_bytes": sum(found.device.values()),
        "host_bytes": sum(found.host.values()),
    }
