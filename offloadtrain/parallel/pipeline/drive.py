"""Runs the program of a pipeline stage in the order of a schedule, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

from offloadtrain.config.ranks_options import NO_FLUSH, Schedule
from offloadtrain.parallel.pipeline.two_versions import close_sums
from offloadtrain.step.layout.block_spec import readings_of
from offloadtrain.step.program.operations import Kind, Launch, Operations
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.updates import Decision
from offloadtrain.step.proof.drive import Inputs, backward, forward

SQUARES = "squares"
"""Owner of the launch that marks when a stage knows the squares of its parameters."""


class Turn(NamedTuple):
    """A microbatch on a stage, or the end of a step.

    Attributes:
        number: index of the microbatch, or at the end of a step index of the step; counted over all
            steps.
    """

    kind: Literal["forward", "backward", "squares", "decide"]
    number: int


@dataclass(frozen=True, slots=True)
class StageTurn:
    """A turn, with the indices of its first and last compute launch in the stage."""

    turn: Turn
    first: int
    last: int


class OfStage(NamedTuple):
    """A turn of one of a rank's stages."""

    stage: int
    turn: Turn


def rank_order(
    schedule: Schedule, rank: int, ranks: int, per_rank: int, microbatches: int, steps: int
) -> Iterator[OfStage]:
    """Yield the turns of a rank's stages in the order in which `parallel.pipeline.schedule` runs
    them."""
    if per_rank == 1:
        turns = order(schedule, rank, ranks, microbatches, steps)
        yield from (OfStage(rank, turn) for turn in turns)
        return
    for step in range(steps):
        for stage, turn in _interleaved(rank, ranks, per_rank, microbatches):
            yield OfStage(stage, turn._replace(number=step * microbatches + turn.number))
        stages = range(rank, ranks * per_rank, ranks)
        yield from (OfStage(stage, Turn("squares", step)) for stage in stages)
        yield from (OfStage(stage, Turn("decide", step)) for stage in stages)


def _interleaved(rank: int, ranks: int, per_rank: int, microbatches: int) -> Iterator[OfStage]:
    """Yield forwards and backwards of a step of interleaved 1F1B in torch's order: in rounds of
    about `ranks` microbatches, which all run on one of the rank's stages before the next one."""
    each = microbatches // max(1, microbatches // ranks)
    total = per_rank * microbatches
    ahead = min((per_rank - 1) * each + 2 * (ranks - 1 - rank), total)
    done = {"forward": [0] * per_rank, "backward": [0] * per_rank}

    def take(kind: Literal["forward", "backward"], at: int) -> OfStage:
        local = at // each % per_rank
        local = local if kind == "forward" else per_rank - 1 - local
        number = done[kind][local]
        done[kind][local] += 1
        return OfStage(local * ranks + rank, Turn(kind, number))

    for at in range(total + ahead):
        if at < total:
            yield take("forward", at)
        if at >= ahead:
            yield take("backward", at - ahead)


def in_flight(schedule: Schedule, stage: int, stages: int, per_rank: int, microbatches: int) -> int:
    """Return the largest number of microbatches whose activations a stage holds at a time."""
    ranks = stages // per_rank
    steps, most, now = 2 if schedule == NO_FLUSH else 1, 0, 0
    for turn_stage, turn in rank_order(
        schedule, stage % ranks, ranks, per_rank, microbatches, steps
    ):
        if turn_stage == stage and turn.kind in ("forward", "backward"):
            now += 1 if turn.kind == "forward" else -1
            most = max(most, now)
    return most


def order(
    schedule: Schedule, stage: int, stages: int, microbatches: int, steps: int
) -> Iterator[Turn]:
    """Yield the turns of a rank with a single stage."""
    if schedule == NO_FLUSH:
        yield from _without_flush(stage, stages, microbatches, steps)
        return
    for step in range(steps):
        base = step * microbatches
        ahead = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
        yield from (Turn("forward", base + number) for number in range(ahead))
        for number in range(microbatches):
            yield Turn("backward", base + number)
            if number + ahead < microbatches:
                yield Turn("forward", base + number + ahead)
        yield Turn("squares", step)
        yield Turn("decide", step)


def _without_flush(stage: int, stages: int, microbatches: int, steps: int) -> Iterator[Turn]:
    """Yield turns without flushes. Forward `stages` - 1 of a step follows the decision on the
    previous step: see [Note: Without a flush] in `steps`."""
    ahead = stages - stage
    for number in range(steps * microbatches):
        step, in_step = divmod(number, microbatches)
        if step and in_step == stages - 1:
            yield Turn("decide", step - 1)
        yield Turn("forward", number)
        if (done := number - ahead + 1) >= 0:
            yield Turn("backward", done)
            if (done + 1) % microbatches == 0:
                yield Turn("squares", done // microbatches)


def stage_steps(
    program: Program,
    schedule: Schedule,
    stage: int,
    stages: int,
    steps: int,
    input_bytes: int = 0,
) -> tuple[Operations, list[StageTurn]]:
    """Return the operations of a stage's first steps, and the position of its turns in its
    launches.

    Args:
        input_bytes: as in `drive.steps`.
    """
    driven = Driven(program, schedule, input_bytes)
    turns = order(schedule, stage, stages, program.spec.config.grad_accum_steps, steps)
    return driven.operations, [driven.take(turn) for turn in turns]


class Driven:
    """Drives a stage's program and records its operations.

    Attributes:
        launches: number of launches in `operations`.
    """

    def __init__(self, program: Program, schedule: Schedule, input_bytes: int) -> None:
        self.operations: Operations = []
        self.launches = 0
        self._program, self._flushes = program, schedule != NO_FLUSH
        self._input_bytes = input_bytes
        self._inputs: dict[int, Inputs] = {}
        self._numbers = count()
        self._micro_steps = program.spec.config.grad_accum_steps
        self._readings = readings_of(program.spec.blocks)
        self._versions: dict[int, int] = {}
        """Microbatch between forward and backward → version of the weights that its forward
        read."""

    def take(self, turn: Turn) -> StageTurn:
        """Report the events of a turn to the program."""
        events = {
            "forward": (self._forward, Kind.FORWARD),
            "backward": (self._backward, Kind.BACKWARD),
            "squares": (self._squares, Kind.DECIDE),
            "decide": (self._decide, Kind.DECIDE),
        }
        report, kind = events[turn.kind]
        operations = report(turn.number)
        launches = [op for op in operations if isinstance(op, Launch)]
        computed = [self.launches + n for n, op in enumerate(launches) if op.kind is kind]
        self.operations += operations
        self.launches += len(launches)
        return StageTurn(turn, computed[0], computed[-1])

    def _forward(self, number: int) -> Operations:
        done: Operations = []
        if not self._flushes and number % self._micro_steps == 0:
            done += self._program.flush()
        self._versions[number] = self._program.mode.version
        inputs = self._inputs[number] = Inputs(self._program, self._input_bytes, self._numbers)
        return done + forward(self._program, self._readings, inputs)

    def _backward(self, number: int) -> Operations:
        program, (step, in_step) = self._program, divmod(number, self._micro_steps)
        last, inputs = in_step + 1 == self._micro_steps, self._inputs.pop(number)
        is_old = self._versions.pop(number) != program.mode.version
        done = program.switch_version(to_previous=True) if is_old else []
        done += backward(program, self._readings, inputs, step + 1, last=last)
        if is_old:
            done += program.switch_version(to_previous=False)
        if number == 0 and not program.spec.is_single:
            done += program.wait_for_first_sums()
        return done

    def _squares(self, _: int) -> Operations:
        done = self._program.norm() + self._program.computes(Kind.DECIDE, SQUARES)
        if not self._flushes:
            close_sums(self._program)
        return done

    def _decide(self, step: int) -> Operations:
        program = self._program
        done = program.computes(Kind.DECIDE, "")
        names = [block.name for block in program.spec.blocks]
        done += program.norm_known(names, Decision(step + 1))
        if self._flushes:
            program.end_step()
        return done + program.begin_pass()
