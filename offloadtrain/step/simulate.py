"""The duration of a program whose operations have durations, if launching costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from offloadtrain.step.drive import steps
from offloadtrain.step.operations import (
    Event,
    HostWait,
    Kind,
    Lane,
    Launch,
    Operation,
    Record,
    Wait,
)
from offloadtrain.step.program import Program
from offloadtrain.step.spec import StepSpec

Seconds = Callable[[Launch], float]


@dataclass(frozen=True, slots=True)
class Timed:
    """A launch, which starts when its lane has done those before it, and those of `after` are done.

    Attributes:
        after: positions in the sequence of launches.
    """

    op: Launch
    after: tuple[int, ...]


def timed(operations: Iterable[Operation]) -> list[Timed]:
    """Return the launches, each with those that its waits put before it.

    Compute is the launching thread, as on lanes of threads: nothing is launched before the compute
    in front of it is done.
    """
    found: list[Timed] = []
    thread: set[int] = set()
    waits: dict[Lane, set[int]] = {lane: set() for lane in Lane}
    latest: dict[Lane, int] = {}
    stands_for: dict[Event, int | None] = {}
    for op in operations:
        match op:
            case Launch():
                found.append(Timed(op, tuple(sorted(thread | waits[op.lane]))))
                latest[op.lane] = len(found) - 1
                # A lane runs in order: what this launch waited for is before its later ones too.
                waits[op.lane] = set()
                if op.lane is Lane.COMPUTE:
                    thread = {latest[op.lane]}
            case Record():
                stands_for[op.event] = latest.get(op.event.lane)
            case Wait() | HostWait():
                lane = op.lane if isinstance(op, Wait) else Lane.COMPUTE
                launched = stands_for[op.event]
                if launched is not None:
                    (thread if lane is Lane.COMPUTE else waits[lane]).add(launched)
    return found


def ends(program: Sequence[Timed], seconds: Seconds) -> list[float]:
    """Return the end of each launch, in seconds from the start."""
    return [end for end, _ in _simulated(program, seconds)]


def _simulated(program: Sequence[Timed], seconds: Seconds) -> list[tuple[float, int | None]]:
    """Return the end of each launch, and the launch that it waited for last."""
    latest: dict[Lane, int] = {}
    found: list[tuple[float, int | None]] = []
    for number, one in enumerate(program):
        before = [*one.after, *([latest[one.op.lane]] if one.op.lane in latest else [])]
        last = max(before, key=lambda other: found[other][0], default=None)
        start = 0.0 if last is None else found[last][0]
        found.append((start + seconds(one.op), last))
        latest[one.op.lane] = number
    return found


@dataclass(frozen=True, slots=True)
class Steady:
    """One step of many.

    Attributes:
        busy: lane → seconds of work. No schedule is faster than the busiest one.
        exposed: lane → seconds that compute waited for work of this lane.
    """

    seconds: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]


_SETTLED = 4
"""Steps after which every one takes the same time."""


def steady(spec: StepSpec, seconds: Seconds, input_bytes: int = 0) -> Steady:
    """Simulate a step in the long run; in update mode "delayed", one after its warm-up.

    Args:
        input_bytes: see `drive.steps`.
    """
    warm = replace(spec, config=replace(spec.config, warmup_steps=0))
    program = timed(steps(Program(warm), _SETTLED, input_bytes))
    found = _simulated(program, seconds)
    decided = [number for number, one in enumerate(program) if one.op.kind is Kind.DECIDE]
    first, last = decided[-2] + 1, decided[-1]
    busy: dict[str, float] = {}
    exposed: dict[str, float] = {}
    ready = found[first - 1][0]
    for number in range(first, last + 1):
        op = program[number].op
        busy[op.lane] = busy.get(op.lane, 0.0) + seconds(op)
        if op.lane is Lane.COMPUTE:
            _blame(program, found, number, ready, exposed)
            ready = found[number][0]
    return Steady(found[last][0] - found[first - 1][0], busy, exposed)


def _blame(
    program: Sequence[Timed],
    found: Sequence[tuple[float, int | None]],
    number: int,
    ready: float,
    exposed: dict[str, float],
) -> None:
    """Attribute the time between `ready` and the start of launch `number` to the lanes that worked
    in it, back along what each launch waited for."""
    cause = found[number][1]
    while cause is not None and found[cause][0] > ready:
        end, before = found[cause]
        start = ready if before is None else max(found[before][0], ready)
        lane = program[cause].op.lane
        exposed[lane] = exposed.get(lane, 0.0) + end - start
        cause = before
