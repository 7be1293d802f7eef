"""The plan of a rank with one or more pipeline stages, and the division of layers among stages.

All stages should compute for about the same time. The last stage has the head in addition to its
layers, and with a large vocabulary the head takes as long as several layers. Every stage waits for
the slowest, so the last one gets fewer layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

from offloadtrain.config.batch_split import of_stage
from offloadtrain.config.job import Config
from offloadtrain.config.ranks_options import NO_FLUSH, evenly, names_of
from offloadtrain.config.units import format_bytes, format_seconds
from offloadtrain.hardware.machine import Machine
from offloadtrain.parallel.pipeline.drive import in_flight
from offloadtrain.parallel.pipeline.times import PipelineTimes, added_to, as_part_of, pipeline_times
from offloadtrain.parallel.pipeline.two_versions import rows_without_flush
from offloadtrain.plan.costs.costs import Costs
from offloadtrain.plan.costs.microbatch import Trace
from offloadtrain.plan.placement import Placement, place
from offloadtrain.plan.plan import Plan
from offloadtrain.plan.times import Prediction, predict

LEAST = 2
"""Minimum number of layers of a stage."""

_Division: TypeAlias = tuple[int, int, tuple[int, ...]]
"""(slowest stage's time, sum of squared times, layers of each stage); smaller is better."""


@dataclass(frozen=True)
class PipelinePlan(Plan):
    """Memory and step time of one rank of a pipeline.

    Attributes:
        placed: the rank's first stage.
        others: the rank's other stages.
        stages: the stages of all ranks.
    """

    others: tuple[Placement, ...] = ()
    stages: tuple[Placement, ...] = ()

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.placed, *self.others

    @property
    def stage_names(self) -> str:
        stages = (placed.config.stage for placed in self.placements)
        return names_of([stage for stage in stages if stage is not None])

    @cached_property
    def pipeline(self) -> PipelineTimes:
        """Times of a step on all stages."""
        return pipeline_times(self.stages, self.machine, self.job.ranks.schedule)

    @cached_property
    def prediction(self) -> Prediction:
        alone = predict(self.with_copies, self.machine)
        for placed in self.others:
            alone = added_to(alone, predict(placed, self.machine))
        peak = 1e12 * self.machine.peak_tflops
        return as_part_of(alone, self.pipeline, self.placements, peak)

    def divisions(self) -> Sequence[tuple[int, ...]]:
        layers = balanced(self.stages, self.machine)
        return ((), *divisions_from(evenly(sum(layers), len(layers)), layers))

    def stage_lines(self) -> Iterator[str]:
        """Yield a line for each stage: compute time, bubble, and what it sends to the next
        stage."""
        times = self.pipeline
        for number, busy in enumerate(times.compute_s):
            line = (
                f"  stage {number + 1} ({self.stages[number].repeated} layers): computes "
                f"{format_seconds(busy)}, bubble {100 * times.bubbles[number % times.ranks]:.0f} %"
            )
            if number < len(times.links):
                link = times.links[number]
                where = "between hosts" if link.between_hosts else "inside the host"
                line += (
                    f"; a microbatch to the next one: {format_bytes(link.nbytes)}, "
                    f"{format_seconds(link.seconds)} {where}"
                )
            yield line


def times_of(plan: Plan) -> PipelineTimes | None:
    """Return the times of a step on all stages; None if the model is not divided into stages."""
    return plan.pipeline if isinstance(plan, PipelinePlan) else None


def stages_of(plan: Plan) -> tuple[Placement, ...]:
    """Return the placements of all stages of the model."""
    return plan.stages if isinstance(plan, PipelinePlan) else plan.placements


def plan_stages(
    job: Config,
    name: str,
    machine: Machine,
    part: Config,
    shards: int,
    copies: int,
    trace: Trace | None,
    rank: int | None,
) -> PipelinePlan:
    """Plan the stages of a job.

    Args:
        part: the job with the rank's part of the batch.
        shards: number of ranks that share a copy of a stage's state.
        copies: number of copies of a stage's state.
        rank: rank of the pipeline to plan; None: the rank that needs the most memory.

    Raises:
        PlanError: as in `place`.
    """
    ranks, count = job.ranks.pipeline, job.ranks.stages
    placed = [
        _placed(of_stage(part, number), number, shards, copies, trace) for number in range(count)
    ]
    plans = [
        PipelinePlan(job, name, machine, placed[first], tuple(placed[first + ranks :: ranks]))
        for first in range(ranks)
    ]
    most = max(plans, key=lambda plan: sum(plan.device.values()) + sum(plan.needed.values()))
    chosen = most if rank is None else plans[rank]
    copied = [plan.with_copies for plan in plans] + placed[ranks:]
    return replace(chosen, stages=tuple(copied))


def _placed(config: Config, stage: int, shards: int, copies: int, trace: Trace | None) -> Placement:
    table = config.ranks
    rows = rows_without_flush(stage, table.stages) if table.schedule == NO_FLUSH else {}
    microbatches = in_flight(
        *(table.schedule, stage, table.stages, table.stages_per_rank),
        config.train.grad_accum_steps,
    )
    return place(config, shards, trace=trace, copies=copies, in_flight=microbatches, **rows)


def balanced(stages: Sequence[Placement], machine: Machine) -> tuple[int, ...]:
    """Return the number of layers per stage that minimizes the compute time of the slowest stage.

    Args:
        stages: stages of a pipeline, with any division of layers.
    """
    before, layers, after = 0, list[int](), 0
    for stage in stages:
        computed = Costs(stage, machine).computed
        for block in stage.spec.blocks:
            seconds = computed[block.name].forward + computed[block.name].backward
            duration = round(
                1e9 * seconds
            )  # rounded, so that identical layers have identical durations
            if block.repeated:
                layers.append(duration)
            elif layers:
                after += duration
            else:
                before += duration
    return divided(layers, before, after, len(stages))


def divided(layers: Sequence[int], before: int, after: int, stages: int) -> tuple[int, ...]:
    """Divide layers so that the slowest stage takes least time. Among equal divisions, choose the
    one whose stages differ least, then the one with fewer layers on the first stages, which hold
    the activations of more microbatches.

    Args:
        layers: duration of each layer, in nanoseconds.
        before, after: nanoseconds of the first stage before its layers, and of the last stage after
            its layers.
    """
    ends = [0, *accumulate(layers)]
    outside = [before, *[0] * (stages - 2), after]
    best: dict[int, _Division] = {0: (0, 0, ())}
    """End of the stages divided so far → their best division."""
    for stage in range(stages):
        next_best: dict[int, _Division] = {}
        most = len(layers) - LEAST * (stages - 1 - stage)
        for first, (longest, squares, each) in best.items():
            for end in range(first + LEAST, most + 1):
                duration = ends[end] - ends[first] + outside[stage]
                division = (max(longest, duration), squares + duration**2, (*each, end - first))
                next_best[end] = min(next_best.get(end, division), division)
        best = next_best
    return best[len(layers)][2]


def divisions_from(first: Sequence[int], last: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the divisions on a path from `first` (excluded) to `last` (included). Each step moves
    one layer from the stage with the largest excess to the stage with the largest deficit."""
    each = list(first)
    while any(more := [have - meant for have, meant in zip(each, last, strict=True)]):
        each[more.index(max(more))] -= 1
        each[more.index(min(more))] += 1
        yield tuple(each)
