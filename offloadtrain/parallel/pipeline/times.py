"""Predicts a pipeline's step time from the program of each stage and the transfers between stages.

[Note: What a pipeline costs]
The program of every stage is the one that its engine runs, driven in the order of the schedule,
with the durations of [Note: What a step costs]. A stage's first operation of a microbatch waits for
the end of the previous stage's forward or the next stage's backward, and for the transfer: the
bytes of the activation over the link between them, one transfer at a time in each direction. A step
is decided when the squares of all stages are known. Bubble is the time in which a stage's compute
waits for other stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from offloadtrain.config.ranks_options import INTERLEAVED, NO_FLUSH, Schedule
from offloadtrain.hardware.machine import Machine
from offloadtrain.parallel.pipeline.drive import (
    Driven,
    OfStage,
    StageTurn,
    Turn,
    rank_order,
)
from offloadtrain.plan.costs.costs import Costs
from offloadtrain.plan.placement import Placement
from offloadtrain.plan.times import Prediction, with_micro_steps
from offloadtrain.step.program.operations import Lane
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.simulate import Timed, timed

OTHER_STAGES = "other stages"
"""Key of `Prediction.exposed_s` for the time in which the device waits for other stages."""

_SUMS = ("seconds", "launch_s", "d2h_bytes", "h2d_bytes", "comm_bytes", "dram_bytes", "sent")
"""Fields of a prediction that are added for stages of one rank."""

_STEPS = 3
"""Number of simulated steps; the result is the duration of the last one."""


@dataclass(frozen=True, slots=True)
class Link:
    """Link between two neighbouring stages.

    Attributes:
        stage: index of the first of the two.
        between_hosts: True if some pair of their ranks is on two hosts.
        seconds: transfer time of one microbatch in one direction.
        nbytes: bytes of one microbatch in one direction.
    """

    stage: int
    between_hosts: bool
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """Times of one step in a steady state.

    Attributes:
        ranks: number of ranks of the pipeline, each with the same number of stages.
        compute_s: stage → seconds of forward, backward and recompute.
        links: links between neighbouring stages.
        flops, recomputed: FLOPs of a rank in a step, on average.
    """

    seconds: float
    ranks: int
    compute_s: tuple[float, ...]
    links: tuple[Link, ...]
    flops: float
    recomputed: float

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank, the fraction of the step in which its device does not compute."""
        busy = (sum(self.compute_s[rank :: self.ranks]) for rank in range(self.ranks))
        return tuple(1 - busy_s / self.seconds for busy_s in busy)


def pipeline_times(
    stages: Sequence[Placement], machine: Machine, schedule: Schedule
) -> PipelineTimes:
    """Simulate a step of a pipeline. `stages`: for each stage, the placement of one of its
    ranks."""
    costs = [Costs(stage, machine) for stage in stages]
    links = links_of(stages, machine)
    ranks = len(stages) // stages[0].config.ranks.stages_per_rank
    count, depth = stages[0].config.train.grad_accum_steps, ranks
    few, some = 2 * depth, 3 * depth
    if count <= some:
        seconds = _step_s(costs, links, schedule, count, ranks)
    elif count % ranks and schedule == INTERLEAVED:  # rounds of more than `ranks`
        seconds = _step_s(costs, links, schedule, count, ranks)
    else:  # the time per further microbatch is constant: extrapolate from two sizes
        small, large = (_step_s(costs, links, schedule, n, ranks) for n in (few, some))
        seconds = large + (count - some) * (large - small) / (some - few)
    each = [
        sum(block.forward + block.backward for block in cost.computed.values()) for cost in costs
    ]
    return PipelineTimes(
        seconds,
        ranks,
        tuple(count * stage_s for stage_s in each),
        tuple(links),
        count * sum(cost.flops for cost in costs) / ranks,
        count * sum(cost.recomputed_flops for cost in costs) / ranks,
    )


def as_part_of(
    alone: Prediction, times: PipelineTimes, held: Sequence[Placement], peak: float
) -> Prediction:
    """Return the prediction of a rank as a part of the pipeline, from that of its stages alone.

    Args:
        peak: FLOPs per second in the data sheet; 0: unknown.
    """
    config, stages = held[0].config, [placed.config.stage for placed in held]
    sent = sum((not stage.is_first) + (not stage.is_last) for stage in stages if stage is not None)
    nbytes = times.links[0].nbytes * config.train.grad_accum_steps
    seconds = max(times.seconds, alone.launch_s)
    return replace(
        alone,
        seconds=seconds,
        exposed_s={**alone.exposed_s, OTHER_STAGES: max(times.seconds - alone.seconds, 0.0)},
        tokens_per_s=config.batch_tokens * held[0].spec.replicas / seconds,
        tflops=times.flops / seconds / 1e12,
        hardware_tflops=(times.flops + times.recomputed) / seconds / 1e12,
        mfu=times.flops / seconds / peak if peak else None,
        comm_bytes=alone.comm_bytes + sent * nbytes,
    )


def added_to(prediction: Prediction, other: Prediction) -> Prediction:
    """Add the work and transfers of two stages that run one after the other on one rank."""

    def lanes(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
        return {lane: first.get(lane, 0.0) + second.get(lane, 0.0) for lane in {*first, *second}}

    return replace(
        prediction,
        busy_s=lanes(prediction.busy_s, other.busy_s),
        exposed_s=lanes(prediction.exposed_s, other.exposed_s),
        **{key: getattr(prediction, key) + getattr(other, key) for key in _SUMS},
    )


def least_seconds(stages: Sequence[Placement], machine: Machine, schedule: Schedule) -> float:
    """Return a lower bound of the step time: the time of the busiest of compute, bus and host
    memory. Compute is that of the busiest stage with all its microbatches; if steps end with a
    flush, also one microbatch on every other stage."""
    count = stages[0].config.train.grad_accum_steps
    of_stages = [Costs(stage, machine) for stage in stages]
    each = [
        sum(block.forward + block.backward for block in costs.computed.values())
        for costs in of_stages
    ]
    flush = 0.0 if schedule == NO_FLUSH else sum(each) - max(each)
    return max(count * max(each) + flush, *(costs.least_moving_s for costs in of_stages))


def links_of(stages: Sequence[Placement], machine: Machine) -> list[Link]:
    """Return the links between neighbouring stages. Ranks of a stage have consecutive numbers, and
    fill the hosts. Pairs of ranks on two hosts share the bandwidth between these. Each part of
    matrices sends the complete activation to the same part of the next stage."""
    width = stages[0].spec.replicas * stages[0].config.ranks.tensor
    tokens = stages[0].config.train.micro_batch * stages[0].config.data.seq_len
    nbytes = tokens * stages[0].config.model.d_model * stages[0].weight_bytes
    links, ranks = [], len(stages) // stages[0].config.ranks.stages_per_rank
    for stage in range(len(stages) - 1):
        ends = stage % ranks * width, (stage + 1) % ranks * width
        numbers = [(ends[0] + part, ends[1] + part) for part in range(width)]
        pairs = [(rank // machine.gpus, other // machine.gpus) for rank, other in numbers]
        crossing = [pair for pair in pairs if pair[0] != pair[1]]
        gbps = machine.gpu_link_gbps
        if crossing:
            most = max(sum(pair[0] == host for pair in crossing) for host, _ in crossing)
            gbps = min(gbps, machine.node_link_gbps / most)
        links.append(Link(stage, bool(crossing), nbytes / (1e9 * gbps), nbytes))
    return links


@dataclass(slots=True)
class _Rank:
    """Launches of all stages of a rank, which share its lanes, and the turns that they belong
    to."""

    program: list[Timed] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    turns: dict[OfStage, StageTurn] = field(default_factory=dict)
    starts: dict[int, OfStage] = field(default_factory=dict)
    """Index of a launch → the turn that begins with it."""


def _step_s(
    costs: Sequence[Costs], links: Sequence[Link], schedule: Schedule, count: int, ranks: int
) -> float:
    each = [_rank(costs[rank::ranks], schedule, rank, ranks, count) for rank in range(ranks)]
    ended = _simulated(each, links)
    # The time between two consecutive decisions is the time of a step.
    decided = [OfStage(0, Turn("decide", step)) for step in range(_STEPS)]
    known = [turn for turn in decided if turn in each[0].turns][-2:]
    early, late = (ended[0][each[0].turns[turn].last] for turn in known)
    return late - early


def _rank(costs: Sequence[Costs], schedule: Schedule, rank: int, ranks: int, count: int) -> _Rank:
    """Drive the programs of a rank's stages in turn.

    Args:
        costs: costs of each of the rank's stages.
    """
    steps = _STEPS + (schedule == NO_FLUSH)  # without flushes the last step is not decided
    driven = [_driven(stage_costs, schedule, count) for stage_costs in costs]
    order = rank_order(schedule, rank, ranks, len(costs), count, steps)
    turns = [
        (stage, driver.take(turn), driver.launches)
        for stage, turn in order
        for driver in [driven[stage // ranks]]
    ]
    alone, result = [timed(driver.operations) for driver in driven], _Rank()
    places: list[list[int]] = [[] for _ in costs]
    """For each stage: index of a launch in the stage → its index in the rank."""
    for stage, turn, end in turns:
        local = stage // ranks
        for operation in alone[local][len(places[local]) : end]:
            places[local].append(len(result.program))
            result.program.append(
                Timed(operation.op, tuple(places[local][at] for at in operation.after))
            )
            result.seconds.append(costs[local].seconds(operation.op))
        at = StageTurn(turn.turn, places[local][turn.first], places[local][turn.last])
        result.turns[OfStage(stage, turn.turn)] = at
        result.starts[at.first] = OfStage(stage, turn.turn)
    return result


def _driven(costs: Costs, schedule: Schedule, count: int) -> Driven:
    spec = with_micro_steps(costs.spec, count)
    spec = replace(spec, config=spec.config.replace(warmup_steps=0))
    return Driven(Program(spec), schedule, costs.placed.input_bytes)


def _simulated(ranks: Sequence[_Rank], links: Sequence[Link]) -> list[list[float]]:
    """Return the end times of each launch of each rank, in seconds."""
    ends: list[list[float]] = [[] for _ in ranks]
    latest: list[dict[Lane, float]] = [{} for _ in ranks]
    arrivals = _Arrivals(ranks, links, ends)
    left = True
    while left:
        left = False
        for number, rank in enumerate(ranks):
            done = ends[number]
            while len(done) < len(rank.program):
                turn = rank.starts.get(len(done))
                start = 0.0 if turn is None else arrivals.of(*turn)
                if start is None:  # another stage must run first
                    break
                operation = rank.program[len(done)]
                before = (done[other] for other in operation.after)
                start = max(start, latest[number].get(operation.op.lane, 0.0), *before, 0.0)
                done.append(start + rank.seconds[len(done)])
                latest[number][operation.op.lane] = done[-1]
                left = True
    assert all(len(end) == len(rank.program) for end, rank in zip(ends, ranks, strict=True))
    return ends


class _Arrivals:
    """Computes the earliest start of a turn that other stages allow."""

    def __init__(
        self, ranks: Sequence[_Rank], links: Sequence[Link], ends: Sequence[list[float]]
    ) -> None:
        self._ranks, self._links, self._ends = ranks, links, ends
        self._count = len(links) + 1
        self._free: dict[tuple[int, bool], float] = {}
        """(link, is forward) → end time of its last transfer."""

    def of(self, stage: int, turn: Turn) -> float | None:
        """Return the earliest start; None if it is not known yet. Must be called in the order of
        the stage's turns, which is the order of transfers to it."""
        match turn.kind:
            case "forward":
                return 0.0 if stage == 0 else self._sent(stage - 1, turn, forward=True)
            case "backward":
                last = stage == self._count - 1
                return 0.0 if last else self._sent(stage + 1, turn, forward=False)
            case "squares":
                return 0.0
            case "decide":
                squared = turn._replace(kind="squares")
                squares = [self._end(number, squared) for number in range(self._count)]
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
        rank = stage % len(self._ranks)
        stage_turn = self._ranks[rank].turns.get(OfStage(stage, turn))
        if stage_turn is None or stage_turn.last >= len(self._ends[rank]):
            return None
        return self._ends[rank][stage_turn.last]
