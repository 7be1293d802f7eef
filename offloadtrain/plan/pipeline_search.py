"""The fastest division of a job among ranks: stages, replicas, microbatch and recompute.

Every candidate is planned as any job is: its memory from the spec of each stage, its time from the
programs of all stages together. Of each number of stages and schedule, those are simulated whose
compute alone takes least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.ranks_options import RanksConfig, contradictions
from offloadtrain.config.units import format_bytes, format_count, format_seconds
from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.pipeline_times import least_seconds
from offloadtrain.plan.placement import Placement
from offloadtrain.plan.plan import Plan, make
from offloadtrain.step.pipeline_drive import Schedule

MOST = 3
"""Candidates of a number of stages and schedule that are simulated."""


Activation = Literal["keep", "recompute", "offload"]

ALONE: Sequence[Schedule] = ("1f1b",)
"""A single stage has no schedule."""

ACTIVATIONS: Sequence[Activation] = get_args(Activation)


@dataclass(frozen=True, slots=True)
class Found:
    """A division that fits.

    Attributes:
        plan: of its stage with the most memory.
    """

    schedule: Schedule
    plan: Plan

    @property
    def stages(self) -> int:
        return self.plan.job.ranks.pipeline

    @property
    def micro_batch(self) -> int:
        return self.plan.placed.config.train.micro_batch

    @property
    def seconds(self) -> float:
        return self.plan.prediction.seconds

    @property
    def keys(self) -> str:
        """The job's keys that give it, as for --set."""
        config = self.plan.job
        return (
            f"ranks.pipeline={self.stages} ranks.schedule={config.ranks.schedule} "
            f"train.micro_batch={config.train.micro_batch} "
            f"train.grad_accum_steps={config.train.grad_accum_steps} "
            f"train.global_batch_tokens=0 offload.activation={config.offload.activation}"
        )


def search(
    job: Config,
    name: str,
    machine: Machine,
    ranks: int,
    schedules: Sequence[Schedule] = ("1f1b", "gpipe", "2bw"),
) -> list[Found]:
    """Return the best division of a job's step for each number of stages and schedule that fits,
    the fastest first.

    Raises:
        PlanError: the machine cannot run the job whatever its memory.
    """
    tried = _candidates(job, ranks, schedules)
    planned = (_planned(one, name, machine, ranks) for one in tried)
    groups: dict[tuple[int, Schedule], list[Found]] = {}
    for one in planned:
        if one is not None:
            groups.setdefault((one.stages, one.schedule), []).append(one)
    return sorted(map(_best, groups.values()), key=lambda one: one.seconds)


def _best(group: Sequence[Found]) -> Found:
    """Return the fastest of those whose compute takes least."""
    first, *others = sorted(group, key=lambda one: _least(one.plan))[:MOST]
    for one in others:
        if _least(one.plan) < first.seconds:
            first = min(first, one, key=lambda each: each.seconds)
    return first


def table(found: Sequence[Found]) -> Iterator[str]:
    """Yield a line per division, and the keys of the first that a job can have."""
    yield (
        f"{'stages':>6} {'replicas':>8} {'schedule':8} {'microbatch':>10} {'x':>4} "
        f"{'activation':10} {'device':>10} {'bubble':>7} {'step':>9} {'tokens/s':>9}"
    )
    for one in found:
        plan, train = one.plan, one.plan.placed.config.train
        times = plan.pipeline
        bubble = f"{100 * max(times.bubbles):.0f} %" if times is not None else "-"
        yield (
            f"{one.stages:6} {plan.placed.spec.ranks:8} {one.schedule if times else '-':8} "
            f"{one.micro_batch:10} "
            f"{train.grad_accum_steps:4} {plan.job.offload.activation:10} "
            f"{format_bytes(sum(plan.device.values())):>10} {bubble:>7} "
            f"{format_seconds(one.seconds):>9} "
            f"{format_count(plan.prediction.tokens_per_s):>9}"
        )
    yield (
        "bubble: of the stage that waits most. 2bw (PipeDream-2BW) uses gradients that are one "
        "version stale, and runs in ot.pipeline, not in jobs"
    )
    runs = [one for one in found if one.schedule != "2bw"]
    if runs:
        yield f"The fastest job: --set {runs[0].keys}"


def as_json(found: Sequence[Found]) -> list[dict[str, Any]]:
    return [
        {
            "stages": one.stages,
            "replicas": one.plan.placed.spec.ranks,
            "schedule": one.schedule,
            "micro_batch": one.micro_batch,
            "activation": one.plan.job.offload.activation,
            "device_bytes": sum(one.plan.device.values()),
            "bubbles": [] if one.plan.pipeline is None else list(one.plan.pipeline.bubbles),
            "seconds": one.seconds,
            "tokens_per_s": one.plan.prediction.tokens_per_s,
            "keys": one.keys,
        }
        for one in found
    ]


def _candidates(
    job: Config, ranks: int, schedules: Sequence[Schedule]
) -> Iterator[tuple[Schedule, Config]]:
    """Yield jobs of the same tokens per step."""
    sequences = job.train.micro_batch * job.train.grad_accum_steps
    for stages in (n for n in range(1, ranks + 1) if ranks % n == 0):
        own, rest = divmod(sequences, ranks // stages)
        if rest:
            continue
        for schedule in schedules if stages > 1 else ALONE:
            flushed: Literal["gpipe", "1f1b"] = "gpipe" if schedule == "gpipe" else "1f1b"
            of_job = RanksConfig(pipeline=stages, schedule=flushed)
            if any(contradictions(of_job, job.model, is_own=job.hf is None, samples=False)):
                continue
            for size in (n for n in range(1, own + 1) if own % n == 0 and n & (n - 1) == 0):
                for activation in ACTIVATIONS:
                    if schedule != "2bw" or (stages > 1 and _runs_unflushed(job, activation)):
                        yield schedule, _divided(job, of_job, size, sequences // size, activation)


def _runs_unflushed(job: Config, activation: Activation) -> bool:
    """Whether `pipeline(schedule="2bw")` takes the job."""
    on_device = activation == "keep" and job.offload.working == "device"
    return on_device and job.offload.precision != "fp16"


def _divided(
    job: Config, ranks: RanksConfig, size: int, count: int, activation: Activation
) -> Config:
    train = replace(job.train, micro_batch=size, grad_accum_steps=count, global_batch_tokens=0)
    offload = replace(job.offload, activation=activation)
    return replace(job, ranks=ranks, train=train, offload=offload)


def _planned(
    candidate: tuple[Schedule, Config], name: str, machine: Machine, ranks: int
) -> Found | None:
    """Return the plan, if the ranks can share the batch so, and it fits."""
    schedule, job = candidate
    try:
        plan = make(job, name, machine, ranks)
    except ConfigError:
        return None
    if schedule == "2bw":
        if plan.placed.config.train.grad_accum_steps < job.ranks.pipeline:
            return None
        plan = without_flush(plan)
    return Found(schedule, plan) if plan.fits else None


def without_flush(plan: Plan) -> Plan:
    """Return the plan of a pipeline as PipeDream-2BW: two versions of the weights on all stages
    but the last, two sums of gradients on all but the first."""
    changed = [_with_versions(stage) for stage in plan.stages]
    plans = [replace(plan, placed=one, stages=tuple(changed), schedule="2bw") for one in changed]
    return max(plans, key=lambda one: sum(one.device.values()) + sum(one.needed.values()))


def _with_versions(placed: Placement) -> Placement:
    stage = placed.config.stage
    assert stage is not None
    delayed = replace(placed.spec.config, update="delayed", warmup_steps=0)
    versions, sums = 1 if stage.is_last else 2, 1 if stage.is_first else 2
    spec = replace(placed.spec, config=delayed, weight_versions=versions, gradient_sums=sums)
    return replace(placed, spec=spec)


def _least(plan: Plan) -> float:
    return least_seconds(plan.stages or (plan.placed,), plan.machine, plan.schedule)


def undivided(job: Config) -> str:
    """Say why there are no stages, if the model allows none."""
    found = contradictions(RanksConfig(pipeline=2), job.model, is_own=job.hf is None, samples=False)
    return next(found, "")
