"""Pipeline schedules as analytic rows, for comparison with offload: GPipe, PipeDream-Flush, 2BW.

Memory and time as in PipeDream-2BW (arXiv:2006.09503, section 3 and appendix A), the bubble as in
GPipe (arXiv:1811.06965, section 2.3). Stages are equal. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from offloadtrain.config.model_shape import ModelShape, num_params
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.baselines.published import (
    MEGATRON,
    compute_seconds,
    input_bytes,
    layer_bytes,
)
from offloadtrain.plan.costs.device_time import Kernels

Schedule = Literal["gpipe", "flush", "2bw"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A model cut into `stages`, one GPU each, `replicas` times over.

    Attributes:
        micro_batches: per step and replica.
        recompute: recompute everything but each stage's input.
    """

    shape: ModelShape
    micro_batch: int
    micro_batches: int
    stages: int
    replicas: int = 1
    recompute: bool = True
    kernels: Kernels = MEGATRON


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule of a pipeline; bytes are of one GPU of the stage.

    Attributes:
        weights_bytes: all versions of the 16-bit weights. 2BW has two, except on the last stage,
            where each microbatch's backward follows its forward.
        state_bytes: 16-bit gradients and the fp32 state of Adam.
        activation_bytes: stashed and working.
        step_s: until the next step can start.
        bubble: share of `step_s` in which a stage is idle.
        stale: updates use gradients of the previous version.
    """

    schedule: Schedule
    weights_bytes: float
    state_bytes: float
    activation_bytes: float
    step_s: float
    bubble: float
    stale: bool


def row(schedule: Schedule, pipe: Pipeline, machine: Machine, stage: int = 0) -> Row:
    """Memory of one stage, counted from 0, and time of one schedule."""
    params = num_params(pipe.shape) / pipe.stages
    turn, sync = _stage_seconds(pipe, machine), _sync_seconds(pipe, machine)
    if schedule == "2bw":  # no flush: the sync of one step overlaps the next
        step = max(pipe.micro_batches * turn, sync)
    else:
        step = (pipe.micro_batches + pipe.stages - 1) * turn + sync
    return Row(
        schedule=schedule,
        weights_bytes=2 * params * _versions(schedule, pipe, stage),
        state_bytes=14 * params,
        activation_bytes=_activation_bytes(schedule, pipe, stage),
        step_s=step,
        bubble=1 - pipe.micro_batches * turn / step,
        stale=schedule == "2bw",
    )


def _versions(schedule: Schedule, pipe: Pipeline, stage: int) -> int:
    return 2 if schedule == "2bw" and stage < pipe.stages - 1 else 1


def _activation_bytes(schedule: Schedule, pipe: Pipeline, stage: int) -> float:
    """Count stashed microbatches: all of them in GPipe, else those between a stage and the last."""
    in_flight = pipe.stages - stage
    stashed = pipe.micro_batches if schedule == "gpipe" else min(in_flight, pipe.micro_batches)
    inputs = stashed * input_bytes(pipe.shape, pipe.micro_batch)
    layers_bytes = layer_bytes(pipe.shape, pipe.micro_batch) * pipe.shape.num_layers / pipe.stages
    return inputs + (layers_bytes if pipe.recompute else stashed * layers_bytes)


def _stage_seconds(pipe: Pipeline, machine: Machine) -> float:
    """Time of one microbatch on one stage, with the transfers of its input and gradient."""
    total = compute_seconds(
        pipe.shape, pipe.micro_batch, machine, pipe.kernels, recompute=pipe.recompute
    )
    compute = (total.forward + total.backward) / pipe.stages
    moved = 2 * input_bytes(pipe.shape, pipe.micro_batch) if pipe.stages > 1 else 0.0
    return compute + moved / _link(pipe.stages, machine)


def _sync_seconds(pipe: Pipeline, machine: Machine) -> float:
    """The all-reduce of a stage's 16-bit gradients among replicas."""
    gradients = 2 * num_params(pipe.shape) / pipe.stages
    moved = 2 * gradients * (pipe.replicas - 1) / pipe.replicas
    return moved / _link(pipe.stages * pipe.replicas, machine)


def _link(gpus: int, machine: Machine) -> float:
    """Bytes per second of one GPU; between hosts, all GPUs of a host share its links."""
    if gpus <= machine.gpus:
        return 1e9 * machine.gpu_link_gbps
    return 1e9 * min(machine.gpu_link_gbps, machine.node_link_gbps / machine.gpus)
