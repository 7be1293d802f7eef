"""A job on 1, 2, 4 … GPUs at constant batch per GPU, offloaded and resident."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.model_shape import flops_per_token
from offloadtrain.config.units import format_count
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.baselines.published import (
    SCHEDULES,
    Pipeline,
    Run,
    Schedule,
    Software,
    pipeline_row,
    step_times,
    too_large_for,
)
from offloadtrain.plan.costs.costs import kernels_of
from offloadtrain.plan.placement import resolved
from offloadtrain.plan.plan import make

IDEAL = Software(compute_share=1.0, adam_share=1.0, contention=1.0, ring_share=1.0)
"""Software of the analytic rows: GPUs, hosts and links at full speed."""


NO_LINK = "the machine is one host (no node_link_gbps)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One placement on one number of GPUs.

    Attributes:
        system: "offloadtrain"; or, analytic and with all state on the GPUs, "resident" (ZeRO) and
            the pipeline schedules "gpipe", "flush" and "2bw", with one stage per GPU.
        stage: ZeRO stage; 0 for pipelines.
        efficiency: tokens/s per GPU, relative to the fewest GPUs on which the job fits.
        problem: why it does not fit; empty if it does.
    """

    system: str
    stage: int
    gpus: int
    tokens_per_s: float
    tflops: float
    efficiency: float
    problem: str


def sweep(job: Config, name: str, machine: Machine, counts: Sequence[int]) -> list[Point]:
    """Return a weak scaling curve: every GPU has the job's batch.

    Raises:
        PlanError, MachineError: from `plan.make` and its prediction.
    """
    job = resolved(job, machine)
    rows: list[Point] = []
    stages: tuple[int, ...] = (3,) if job.offload.weights.offloaded else (1, 2, 3)
    linked = [n for n in counts if n <= machine.gpus or machine.node_link_gbps > 0]
    for stage in stages:
        rows += _relative([_offloaded(job, name, machine, stage, count) for count in counts])
    for stage in () if machine.on_cpu else range(4):
        rows += _relative([_resident(job, machine, stage, count) for count in linked])
    for schedule in () if machine.on_cpu else SCHEDULES:
        short = [count for count in linked if count <= job.model.num_layers]
        rows += _relative([_pipelined(job, machine, schedule, count) for count in short])
    return rows


def table(points: Sequence[Point], name: str) -> str:
    """Return a text table, one line per placement and number of GPUs."""
    head = (
        f"{'system':13} {'stage':>5} {'GPUs':>5} {'tokens/s':>9} {'Tflop/s each':>12} "
        f"{'efficiency':>10}"
    )
    note = (
        f"{name}: every GPU has the job's batch; 6 N + 12 L d T per token. offloadtrain: simulated "
        "from its schedule. Analytic, with the state on the GPUs: resident (ZeRO of that stage), "
        "and pipelines of a stage per GPU: gpipe, flush (PipeDream-Flush), 2bw (PipeDream-2BW, "
        "whose updates are one version stale)"
    )
    return "\n".join([head, *map(_line, points), note])


def _line(point: Point) -> str:
    start = f"{point.system:13} {point.stage:5} {point.gpus:5}"
    if point.problem:
        return f"{start} {point.problem}"
    return (
        f"{start} {format_count(point.tokens_per_s):>9} {point.tflops:12.1f} "
        f"{point.efficiency:10.3f}"
    )


def _offloaded(job: Config, name: str, machine: Machine, stage: int, gpus: int) -> Point:
    train = job.train
    wider = replace(
        job,
        train=replace(train, grad_accum_steps=train.grad_accum_steps * gpus, global_batch_tokens=0),
        offload=job.offload.replace(zero_stage=stage),
    )
    try:
        plan = make(wider, name, machine, gpus)
    except ConfigError as error:  # [ranks] does not divide this number of ranks
        reason, _, _ = str(error).partition(":")
        return Point(
            system="offloadtrain",
            stage=stage,
            gpus=gpus,
            tokens_per_s=0.0,
            tflops=0.0,
            efficiency=0.0,
            problem=reason,
        )
    linked = plan.hosts == 1 or machine.node_link_gbps > 0
    problem = "" if plan.fits and linked else "does not fit" if linked else NO_LINK
    return Point(
        system="offloadtrain",
        stage=stage,
        gpus=gpus,
        tokens_per_s=plan.prediction.tokens_per_s if linked else 0.0,
        tflops=plan.prediction.tflops if linked else 0.0,
        efficiency=0.0,
        problem=problem,
    )


def _resident(job: Config, machine: Machine, stage: int, gpus: int) -> Point:
    """Predict with the analytic model of published systems; recompute is that of the job."""
    train = job.train
    shape = replace(job.model, max_seq_len=job.data.seq_len)
    run = Run(
        shape=shape,
        micro_batch=train.micro_batch,
        micro_steps=train.grad_accum_steps,
        gpus=gpus,
        stage=stage,
        offload=False,
        recompute=job.offload.activations.recomputes,
        kernels=kernels_of(job.model, compiled=job.offload.compute.compile_blocks),
    )
    tokens = train.micro_batch * train.grad_accum_steps * job.data.seq_len
    rate = tokens / step_times(run, machine, IDEAL).step
    return Point(
        system="resident",
        stage=stage,
        gpus=gpus,
        tokens_per_s=rate * gpus,
        tflops=rate * flops_per_token(job.model, job.data.seq_len) / 1e12,
        efficiency=0.0,
        problem="does not fit" if too_large_for(run, machine, IDEAL) else "",
    )


def _pipelined(job: Config, machine: Machine, schedule: Schedule, gpus: int) -> Point:
    train = job.train
    micro_batches = train.grad_accum_steps * gpus
    pipe = Pipeline(
        shape=replace(job.model, max_seq_len=job.data.seq_len),
        micro_batch=train.micro_batch,
        micro_batches=micro_batches,
        stages=gpus,
        recompute=job.offload.activations.recomputes,
        kernels=kernels_of(job.model, compiled=job.offload.compute.compile_blocks),
    )
    estimate = pipeline_row(schedule, pipe, machine)
    needed = estimate.weights_bytes + estimate.state_bytes + estimate.activation_bytes
    rate = micro_batches * train.micro_batch * job.data.seq_len / estimate.step_s
    return Point(
        system=schedule,
        stage=0,
        gpus=gpus,
        tokens_per_s=rate,
        tflops=rate / gpus * flops_per_token(job.model, job.data.seq_len) / 1e12,
        efficiency=0.0,
        problem="does not fit"
        if needed > machine.gpu_memory_bytes - machine.gpu_reserved_bytes
        else "",
    )


def _relative(points: Sequence[Point]) -> Iterator[Point]:
    first = next((point for point in points if not point.problem), None)
    for point in points:
        share = 0.0
        if first is not None and not point.problem:
            share = point.tokens_per_s / point.gpus * first.gpus / first.tokens_per_s
        yield replace(point, efficiency=share)
