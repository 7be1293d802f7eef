"""Prediction of a step of a pipeline: the program of each stage, and what they send each other.

[Note: What a pipeline costs]
Every stage has the program that its engine runs, driven in the order of the schedule, with the
durations of [Note: What a step costs]. A stage's first operation of a microbatch waits for the one
before it (forward) or behind it (backward) to have ended, and for the transfer: the bytes of the
activation over the link between them, one transfer after the other in each direction. A step is
decided when the squares of all stages are known. Bubble is what a stage's compute waits for others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean as mean

from offloadtrain.hardware.machine import Machine
from offloadtrain.plan.costs import Costs
from offloadtrain.plan.placement import Placement
from offloadtrain.plan.prediction import Prediction
from offloadtrain.plan.times import with_micro_steps
from offloadtrain.step.operations import Lane, Launch
from offloadtrain.step.pipeline_drive import Schedule, StageTurn, Turn, stage_steps
from offloadtrain.step.program import Program
from offloadtrain.step.simulate import Timed, timed

OTHER_STAGES = "other stages"
"""In place of a lane: what the device waits for."""

_STEPS = 3
"""Simulated steps; the last one counts."""


@dataclass(frozen=True, slots=True)
class Link:
    """What two neighbouring stages send each other.

    Attributes:
        stage: the first of the two.
        between_hosts: some pair of their ranks is on two hosts.
        seconds: of one microbatch, one way.
        nbytes: of one microbatch, one way.
    """

    stage: int
    between_hosts: bool
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """One step of many.

    Attributes:
        compute_s: stage → seconds of forward, backward and recompute.
        links: between neighbours.
        flops, recomputed: of a rank in a step, on average.
    """

    seconds: float
    compute_s: tuple[float, ...]
    links: tuple[Link, ...]
    flops: float
    recomputed: float

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Stage → share of the step in which its device does not compute."""
        return tuple(1 - busy / self.seconds for busy in self.compute_s)


def pipeline_times(
    stages: Sequence[Placement], machine: Machine, schedule: Schedule
) -> PipelineTimes:
    """Simulate a step of a pipeline of these stages, each the placement of one of its ranks."""
    costs = [Costs(stage, machine) for stage in stages]
    links = links_of(stages, machine)
    count, depth = stages[0].config.train.grad_accum_steps, len(stages)
    few, some = 2 * depth, 3 * depth
    if count <= some:
        seconds = _step_s(costs, links, schedule, count)
    else:  # each further microbatch takes as long as those between the two sizes
        small, large = (_step_s(costs, links, schedule, n) for n in (few, some))
        seconds = large + (count - some) * (large - small) / (some - few)
    each = [sum(one.forward + one.backward for one in cost.computed.values()) for cost in costs]
    return PipelineTimes(
        seconds,
        tuple(count * one for one in each),
        tuple(links),
        count * mean(cost.flops for cost in costs),
        count * mean(cost.recomputed_flops for cost in costs),
    )


def as_part_of(
    alone: Prediction, times: PipelineTimes, stage: Placement, peak: float
) -> Prediction:
    """Return the prediction of a stage alone as it is in its pipeline.

    Args:
        peak: FLOPs per second of the data sheet; 0: unknown.
    """
    config, own = stage.config, stage.config.stage
    assert own is not None
    sent = (not own.is_first) + (not own.is_last)
    nbytes = times.links[0].nbytes * config.train.grad_accum_steps
    return replace(
        alone,
        seconds=times.seconds,
        exposed_s={**alone.exposed_s, OTHER_STAGES: max(times.seconds - alone.seconds, 0.0)},
        tokens_per_s=config.batch_tokens * stage.spec.replicas / times.seconds,
        tflops=times.flops / times.seconds / 1e12,
        hardware_tflops=(times.flops + times.recomputed) / times.seconds / 1e12,
        mfu=times.flops / times.seconds / peak if peak else None,
        comm_bytes=alone.comm_bytes + sent * nbytes,
    )


def least_seconds(stages: Sequence[Placement], machine: Machine, schedule: Schedule) -> float:
    """Return what compute alone takes: the busiest stage with all of its microbatches, and, where
    steps end with a flush, one of them on every other stage."""
    count = stages[0].config.train.grad_accum_steps
    each = [
        sum(one.forward + one.backward for one in Costs(stage, machine).computed.values())
        for stage in stages
    ]
    flush = 0.0 if schedule == "2bw" else sum(each) - max(each)
    return count * max(each) + flush


def links_of(stages: Sequence[Placement], machine: Machine) -> list[Link]:
    """Return the links between neighbours: ranks of a stage have numbers one after the other, and
    fill the hosts; those that cross between two hosts share what links these."""
    replicas = stages[0].spec.replicas
    tokens = stages[0].config.train.micro_batch * stages[0].config.data.seq_len
    nbytes = tokens * stages[0].config.model.d_model * stages[0].weight_bytes
    found = []
    for stage in range(len(stages) - 1):
        first = range(stage * replicas, (stage + 1) * replicas)
        pairs = [(rank // machine.gpus, (rank + replicas) // machine.gpus) for rank in first]
        crossing = [pair for pair in pairs if pair[0] != pair[1]]
        gbps = machine.gpu_link_gbps
        if crossing:
            most = max(sum(one[0] == host for one in crossing) for host, _ in crossing)
            gbps = min(gbps, machine.node_link_gbps / most)
        found.append(Link(stage, bool(crossing), nbytes / (1e9 * gbps), nbytes))
    return found


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage's launches, and its turns in them."""

    program: Sequence[Timed]
    turns: Mapping[Turn, StageTurn]
    starts: Mapping[int, Turn]
    """Launch → the turn that it begins."""
    seconds: Callable[[Launch], float]


def _step_s(costs: Sequence[Costs], links: Sequence[Link], schedule: Schedule, count: int) -> float:
    depth = len(costs)
    stages = [_stage(cost, schedule, number, depth, count) for number, cost in enumerate(costs)]
    ended = _simulated(stages, links)
    # Two steps that are decided follow each other: the time between is a step.
    decided = [Turn("decide", step) for step in range(_STEPS)]
    known = [turn for turn in decided if turn in stages[0].turns][-2:]
    early, late = (ended[0][stages[0].turns[turn].last] for turn in known)
    return late - early


def _stage(costs: Costs, schedule: Schedule, number: int, depth: int, count: int) -> _Stage:
    spec = with_micro_steps(costs.spec, count)
    spec = replace(spec, config=replace(spec.config, warmup_steps=0))
    steps = _STEPS + (schedule == "2bw")  # whose last one is not decided
    operations, turns = stage_steps(
        Program(spec), schedule, number, depth, steps, costs.placed.input_bytes
    )
    return _Stage(
        timed(operations),
        {one.turn: one for one in turns},
        {one.first: one.turn for one in turns},
        costs.seconds,
    )


def _simulated(stages: Sequence[_Stage], links: Sequence[Link]) -> list[list[float]]:
    """Return the end of each launch of each stage."""
    ends: list[list[float]] = [[] for _ in stages]
    latest: list[dict[Lane, float]] = [{} for _ in stages]
    arrivals = _Arrivals(stages, links, ends)
    left = True
    while left:
        left = False
        for number, stage in enumerate(stages):
            done = ends[number]
            while len(done) < len(stage.program):
                turn = stage.starts.get(len(done))
                start = 0.0 if turn is None else arrivals.of(number, turn)
                if start is None:  # another stage comes first
                    break
                one = stage.program[len(done)]
                before = (done[other] for other in one.after)
                start = max(start, latest[number].get(one.op.lane, 0.0), *before, 0.0)
                done.append(start + stage.seconds(one.op))
                latest[number][one.op.lane] = done[-1]
                left = True
    assert all(len(end) == len(stage.program) for end, stage in zip(ends, stages, strict=True))
    return ends


class _Arrivals:
    """When a turn may begin, as far as other stages are concerned."""

    def __init__(
        self, stages: Sequence[_Stage], links: Sequence[Link], ends: Sequence[list[float]]
    ) -> None:
        self._stages, self._links, self._ends = stages, links, ends
        self._free: dict[tuple[int, bool], float] = {}
        """Link and direction → the end of its last transfer."""

    def of(self, stage: int, turn: Turn) -> float | None:
        """Return the moment; None if it is not known yet. Asked in the order of the stage's turns,
        which is that of the transfers to it."""
        match turn.kind:
            case "forward":
                return 0.0 if stage == 0 else self._sent(stage - 1, turn, forward=True)
            case "backward":
                last = stage == len(self._stages) - 1
                return 0.0 if last else self._sent(stage + 1, turn, forward=False)
            case "squares":
                return 0.0
            case "decide":
                squared = turn._replace(kind="squares")
                squares = [self._end(one, squared) for one in range(len(self._stages))]
                known = [end for end in squares if end is not None]
                return max(known) if len(known) == len(squares) else None

    def _sent(self, sender: int, turn: Turn, *, forward: bool) -> float | None:
        if (end := self._end(sender, turn)) is None:
            return None
        key = (sender if forward else sender - 1), forward
        arrived = max(end, self._free.get(key, 0.0)) + self._links[key[0]].seconds
        self._free[key] = arrived
        return arrived

    def _end(self, stage: int, turn: Turn) -> float | None:
        found = self._stages[stage].turns.get(turn)
        if found is None or found.last >= len(self._ends[stage]):
            return None
        return self._ends[stage][found.last]
