"""Finds the fastest division of a job among ranks: stages, replicas, microbatch and recompute.
Experts and matrices keep the job's division, among the ranks of each stage.

Every candidate is planned like any job: its memory from the spec of each stage, its time from the
programs of all stages together. For each number of stages and schedule, only those candidates are
simulated whose busiest resource (compute, bus or host memory) takes least time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from offloadtrain.config.batch_split import replicas
from offloadtrain.config.errors import ConfigError
from offloadtrain.config.job import Config
from offloadtrain.config.ranks_options import (
    INTERLEAVED,
    RanksConfig,
    Schedule,
    contradictions,
    interleaved_contradictions,
    unflushed_contradictions,
)
from offloadtrain.config.units import format_bytes, format_count, format_seconds
from offloadtrain.hardware.machine import Machine
from offloadtrain.parallel.pipeline.plan import stages_of, times_of
from offloadtrain.parallel.pipeline.times import least_seconds
from offloadtrain.plan.automatic import with_sums_on
from offloadtrain.plan.plan import Plan, make
from offloadtrain.plan.search.suggest import text_of

PER_RANK = (2, 4)
"""Numbers of stages per rank that the search tries with "interleaved"."""

MOST = 3
"""Number of candidates that are simulated for each number of stages and schedule."""


Activation = Literal["keep", "recompute", "offload"]

ALONE: Sequence[Schedule] = ("1f1b",)
"""Schedules that are tried with a single stage, where the schedule makes no difference."""

ACTIVATIONS: Sequence[Activation] = get_args(Activation)

_OFFLOAD_KEYS = ("recompute_blocks", "partition_activations", "sums_on", "sums_down")


@dataclass(frozen=True, slots=True)
class Found:
    """A division of a job that fits into memory.

    Attributes:
        plan: plan of the stage that needs the most memory.
        asked: the job before it was divided.
    """

    plan: Plan
    asked: Config

    @property
    def schedule(self) -> Schedule:
        return self.plan.job.ranks.schedule

    @property
    def stages(self) -> int:
        """Number of ranks of the pipeline; each holds `stages_per_rank` stages."""
        return self.plan.job.ranks.pipeline

    @property
    def order(self) -> str:
        """The schedule, with the number of stages per rank if it is above 1."""
        each = self.plan.job.ranks.stages_per_rank
        return f"{self.schedule} x{each}" if each > 1 else self.schedule

    @property
    def micro_batch(self) -> int:
        return self.plan.placed.config.train.micro_batch

    @property
    def seconds(self) -> float:
        return self.plan.prediction.seconds

    @property
    def activation(self) -> str:
        """Activation policy, and the number of recomputed layers of each stage."""
        activations = self.plan.job.offload.activations
        shown = (activations.mode, activations.recompute_blocks)
        return " ".join(str(value) for value in shown if value is not None)

    @property
    def keys(self) -> str:
        """Arguments of --set that turn the job into this division. Keys that only the original job
        sets are reset."""
        config, requested = self.plan.job, self.asked
        each = config.ranks.stages_per_rank
        several = max(each, requested.ranks.stages_per_rank) > 1
        layers = ",".join(map(str, config.ranks.layers_per_stage))
        uneven = bool(layers or requested.ranks.layers_per_stage)
        return (
            f"ranks.pipeline={self.stages} ranks.schedule={config.ranks.schedule} "
            + (f"ranks.stages_per_rank={each} " if several else "")
            + (f"ranks.layers_per_stage=[{layers}] " if uneven else "")
            + f"train.micro_batch={config.train.micro_batch} "
            f"train.grad_accum_steps={config.train.grad_accum_steps} "
            f"train.global_batch_tokens=0{self._keys_of_offload}"
            + ("" if config.ranks.flushes else " offload.update=delayed offload.warmup_steps=0")
        )

    @property
    def _keys_of_offload(self) -> str:
        """Arguments of --set for keys of `offload` that the search has changed."""
        offload, requested = self.plan.job.offload, self.asked.offload
        changed = {
            key: value
            for key in _OFFLOAD_KEYS
            if (value := offload.value(key)) != requested.value(key)
        }
        changed = {"activation": offload.value("activation")} | changed
        if changed.get("recompute_blocks", 0) is None:
            # Equivalent, because --set cannot remove a number.
            changed |= {"activation": "recompute", "recompute_blocks": 0}
        return " " + text_of({f"offload.{key}": value for key, value in changed.items()})


def search(
    job: Config,
    name: str,
    machine: Machine,
    ranks: int,
    schedules: Sequence[Schedule] = ("1f1b", "gpipe", "2bw", INTERLEAVED),
) -> list[Found]:
    """Return the best division for each number of stages and schedule that fits into memory, the
    fastest first.

    Raises:
        PlanError: the machine cannot run the job with any amount of memory.
        ConfigError: the ranks cannot be divided by the job's parts of matrices or experts.
    """
    fixed = RanksConfig(tensor=job.ranks.tensor, expert=job.ranks.expert)
    replicas(replace(job, ranks=fixed), ranks)
    groups: dict[tuple[int, Schedule], list[Found]] = {}
    for division in _divisions(job, ranks, schedules):
        planned = (_planned(choice, job, name, machine, ranks) for choice in division)
        # If all activations can be kept, no candidate with recompute is faster.
        if fitting := next(filter(None, planned), None):
            groups.setdefault((fitting.stages, fitting.schedule), []).append(fitting)
    return sorted(map(_best, groups.values()), key=lambda candidate: candidate.seconds)


def _best(group: Sequence[Found]) -> Found:
    """Return the fastest candidate, among those with the smallest lower bounds of their time."""
    first, *rest = sorted(group, key=lambda each: _least(each.plan))[:MOST]
    for candidate in rest:
        if _least(candidate.plan) < first.seconds:
            first = min(first, candidate, key=lambda each: each.seconds)
    return first


def table(found: Sequence[Found]) -> Iterator[str]:
    """Yield a line per division, then --set arguments of the fastest, and of that without 2bw."""
    yield (
        f"{'stages':>6} {'replicas':>8} {'schedule':14} {'microbatch':>10} {'x':>4} "
        f"{'activation':12} {'device':>10} {'bubble':>7} {'step':>9} {'tokens/s':>9}"
    )
    for division in found:
        plan, train = division.plan, division.plan.placed.config.train
        times = times_of(plan)
        bubble = f"{100 * max(times.bubbles):.0f} %" if times is not None else "-"
        yield (
            f"{division.stages:6} {plan.placed.spec.ranks:8} {division.order if times else '-':14} "
            f"{division.micro_batch:10} "
            f"{train.grad_accum_steps:4} {division.activation:12} "
            f"{format_bytes(sum(plan.device.values())):>10} {bubble:>7} "
            f"{format_seconds(division.seconds):>9} "
            f"{format_count(plan.prediction.tokens_per_s):>9}"
        )
    yield (
        "bubble: of the stage that waits most. 2bw (PipeDream-2BW) uses gradients that are one "
        'version stale, as offload.update = "delayed" does'
    )
    yield f"The fastest job: --set {found[0].keys}"
    flushed = [result for result in found if result.plan.job.ranks.flushes]
    if flushed and flushed[0] is not found[0]:
        yield f"The fastest without 2bw: --set {flushed[0].keys}"


def as_json(found: Sequence[Found]) -> list[dict[str, Any]]:
    return [
        {
            "stages": division.stages,
            "stages_per_rank": division.plan.job.ranks.stages_per_rank,
            "layers_per_stage": list(division.plan.job.ranks.layers_per_stage),
            "replicas": division.plan.placed.spec.ranks,
            "schedule": division.schedule,
            "micro_batch": division.micro_batch,
            "activation": division.plan.job.offload.activations.mode,
            "recompute_blocks": division.plan.job.offload.activations.recompute_blocks,
            "sums_on": division.plan.job.offload.gradients.sums_tier,
            "device_bytes": sum(division.plan.device.values()),
            "bubbles": [] if (times := times_of(division.plan)) is None else list(times.bubbles),
            "seconds": division.seconds,
            "tokens_per_s": division.plan.prediction.tokens_per_s,
            "keys": division.keys,
        }
        for division in found
    ]


def _divisions(job: Config, ranks: int, schedules: Sequence[Schedule]) -> Iterator[list[Config]]:
    """Yield, for each division, jobs with the same tokens per step, the fastest first: with all
    activations kept, with as few recomputed layers as possible, and with recompute from inputs on
    the host."""
    sequences = job.train.micro_batch * job.train.grad_accum_steps
    groups = ranks // job.ranks.tensor
    for stages in (n for n in range(1, groups + 1) if groups % n == 0):
        share, rest = divmod(sequences, groups // stages)
        if rest:
            continue
        for of_job in _orders(job, stages, schedules):
            for size in (
                1 << power for power in range(share.bit_length()) if share % (1 << power) == 0
            ):
                for variant in _with_sums(job, sequences // size):
                    tried = (
                        _divided(variant, of_job, size, sequences // size, activation)
                        for activation in ACTIVATIONS
                    )
                    yield [divided for divided in tried if not any(_problems(divided))]


def _with_sums(job: Config, count: int) -> Iterator[Config]:
    """Yield the job with gradient sums placed as it requests, and with all sums on the device."""
    share = job.offload.gradients.device_share
    for of_sums in sorted({share, 1.0 if count > 1 else share}):
        yield with_sums_on(job, of_sums)


def _orders(job: Config, stages: int, schedules: Sequence[Schedule]) -> Iterator[RanksConfig]:
    """Yield the schedules that the model's layers allow on `stages` pipeline ranks."""
    for schedule in schedules if stages > 1 else ALONE:
        for per_rank in PER_RANK if schedule == INTERLEAVED else (1,):
            candidate = RanksConfig(
                pipeline=stages,
                schedule=schedule,
                stages_per_rank=per_rank,
                layers_per_stage="auto" if stages > 1 else (),
                tensor=job.ranks.tensor,
                expert=job.ranks.expert,
            )
            if not any(_contradictions(job, candidate)):
                yield candidate


def _problems(job: Config) -> Iterator[str]:
    """Yield the reasons why the schedule cannot run the job."""
    rule, on_spike = job.optim.name, job.train.on_spike
    yield from interleaved_contradictions(job.ranks, job.offload)
    yield from unflushed_contradictions(job.ranks, job.offload, rule=rule, on_spike=on_spike)


def _divided(
    job: Config, ranks: RanksConfig, size: int, count: int, activation: Activation
) -> Config:
    train = replace(job.train, micro_batch=size, grad_accum_steps=count, global_batch_tokens=0)
    again: Literal["auto"] | None = None if activation == "keep" else "auto"
    divides = job.offload.activations.partition and activation != "keep"
    offload = job.offload.replace(
        activation=activation,
        recompute_blocks=again,
        partition_activations=divides,
    )
    if not ranks.flushes:
        offload = offload.replace(update="delayed", warmup_steps=0)
    return replace(job, ranks=ranks, train=train, offload=offload)


def _planned(
    job: Config, requested: Config, name: str, machine: Machine, ranks: int
) -> Found | None:
    """Return the plan; None if the ranks cannot share the batch or it does not fit into memory."""
    try:
        plan = make(job, name, machine, ranks)
    except ConfigError:
        return None
    return Found(plan, requested) if plan.fits else None


def _least(plan: Plan) -> float:
    return least_seconds(stages_of(plan), plan.machine, plan.job.ranks.schedule)


def undivided(job: Config) -> str:
    """Return why the job's model cannot be divided into stages; "" if it can."""
    return next(_contradictions(job, RanksConfig(pipeline=2)), "")


def _contradictions(job: Config, ranks: RanksConfig) -> Iterator[str]:
    """Yield the reasons against this division of the model, assuming no generated samples."""
    return contradictions(
        *(ranks, job.model, job.offload),
        is_own=job.hf is None,
        samples=False,
        adapters=False,
        rule=job.optim.name,
    )
