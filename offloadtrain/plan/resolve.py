"""A job with what depends on its machine resolved: its precision."""

from __future__ import annotations

from dataclasses import replace

from offloadtrain.config.job import Config
from offloadtrain.config.offload import STATE_PRECISIONS
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.placement import PlanError


def resolved(job: Config, machine: Machine) -> Config:
    """Return the job with "auto" precision resolved for the machine.

    Raises:
        PlanError: the machine does not support device, precision or state format.
    """
    kind, where = job.device.kind, machine.gpu or "its CPU"
    if kind != "auto" and (kind == "cpu") != machine.on_cpu:
        raise PlanError(
            f"device.kind = {kind!r}, but the machine computes on {where}: choose another machine, "
            'or set device.kind = "auto"'
        )
    precision = job.offload.precision
    if precision == "auto":
        precision = machine.auto_precision
    elif precision not in machine.precisions:
        raise PlanError(
            f"offload.precision = {precision!r}, but {where} does not support it: set "
            f"offload.precision = {' or '.join(machine.precisions)}"
        )
    state = job.offload.state.format
    if precision not in STATE_PRECISIONS[state]:
        raise PlanError(
            f"offload.state = {state!r} does not support offload.precision = {precision!r} on "
            f"{where}: set offload.state = fp32"
            + (" or int8" if precision in STATE_PRECISIONS["int8"] else "")
        )
    return replace(job, offload=job.offload.replace(precision=precision))
