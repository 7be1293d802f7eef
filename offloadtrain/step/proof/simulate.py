"""The duration of a program whose operations have durations, if launching costs nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import (
    Event,
    HostWait,
    Kind,
    Lane,
    Launch,
    Operation,
    Record,
    Wait,
)
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps

Seconds = Callable[[Launch], float]


@dataclass(frozen=True, slots=True)
class Timed:
    """A launch, which starts after all earlier launches of its lane, and the launches of `after`.

    Attributes:
        after: indices in the sequence of launches.
    """

    op: Launch
    after: tuple[int, ...]


def timed(operations: Iterable[Operation]) -> list[Timed]:
    """Return the launches, each with the launches that its waits order before it.

    Compute is the launching thread, as on thread lanes: nothing is launched before the preceding
    compute has run.
    """
    launches: list[Timed] = []
    thread: set[int] = set()
    waits: dict[Lane, set[int]] = {lane: set() for lane in Lane}
    latest: dict[Lane, int] = {}
    stands_for: dict[Event, int | None] = {}
    for op in operations:
        match op:
            case Launch():
                launches.append(Timed(op, tuple(sorted(thread | waits[op.lane]))))
                latest[op.lane] = len(launches) - 1
                # A lane runs in order: the awaited launches also precede its later launches.
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
    return launches


LINKS: Mapping[str, str] = {Lane.DISK_LOAD: Lane.DISK_READ, Lane.DISK_READ: Lane.DISK_READ}
"""Lane → the lane whose link it shares. A link serves one operation at a time."""

Simulated = list[tuple[float, int | None]]
"""The end of each launch, in seconds from the start, and the launch that it waited for last."""


def simulated(program: Sequence[Timed], seconds: Seconds) -> Simulated:
    lanes = {entry.op.lane for entry in program}
    if sum(lane in LINKS for lane in lanes) > 1:
        return _Sharing(program, seconds).run()
    latest: dict[Lane, int] = {}
    times: list[tuple[float, int | None]] = []
    for number, launch in enumerate(program):
        before = [*launch.after, *([latest[launch.op.lane]] if launch.op.lane in latest else [])]
        last = max(before, key=lambda other: times[other][0], default=None)
        start = 0.0 if last is None else times[last][0]
        times.append((start + seconds(launch.op), last))
        latest[launch.op.lane] = number
    return times


class _Sharing:
    """Lanes that share a link: the link serves the operation that has been ready for longest. This
    is not the order of launch, so the next operation is chosen among all lanes."""

    def __init__(self, program: Sequence[Timed], seconds: Seconds) -> None:
        self._program, self._seconds = program, seconds
        self._ends: list[float | None] = [None] * len(program)
        self._before: list[int | None] = [None] * len(program)
        self._left: dict[Lane, deque[int]] = {}
        for number, launch in enumerate(program):
            self._left.setdefault(launch.op.lane, deque()).append(number)
        self._latest: dict[str, int] = {}
        """Lane, or link → its last launch."""
        self._ready: dict[Lane, tuple[float, int | None]] = {}
        """Lane → time when its next launch is ready, and the launch that it waited for last."""

    def run(self) -> Simulated:
        for _ in self._program:
            start, _ready, number, awaited = min(self._starts())
            op = self._program[number].op
            self._ends[number], self._before[number] = start + self._seconds(op), awaited
            self._left[op.lane].popleft()
            del self._ready[op.lane]
            self._latest[op.lane] = number
            if op.lane in LINKS:
                self._latest[f"link {LINKS[op.lane]}"] = number
        return [(end or 0.0, before) for end, before in zip(self._ends, self._before, strict=True)]

    def _starts(self) -> Iterator[tuple[float, float, int, int | None]]:
        """Yield (start, ready, number, awaited) of each lane's next launch whose start is known."""
        for lane, left in self._left.items():
            if not left:
                continue
            if lane not in self._ready:
                before = [*self._program[left[0]].after]
                before += [self._latest[lane]] if lane in self._latest else []
                ends = [(end, other) for other in before if (end := self._ends[other]) is not None]
                if len(ends) < len(before):
                    continue
                self._ready[lane] = max(ends, default=(0.0, None), key=lambda pair: pair[0])
            ready, awaited = self._ready[lane]
            holder = self._latest.get(f"link {LINKS[lane]}") if lane in LINKS else None
            free = 0.0 if holder is None else self._ends[holder] or 0.0
            yield max(ready, free), ready, left[0], holder if free > ready else awaited


@dataclass(frozen=True, slots=True)
class Steady:
    """A typical step.

    Attributes:
        busy: lane → seconds of work. No schedule is faster than the busiest lane, or than all lanes
            of a link.
        exposed: lane → seconds that compute waited for work of this lane.
        launches: number of launches on all lanes.
    """

    seconds: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]
    launches: float


def moved(spec: StepSpec, lanes: Container[Lane]) -> dict[Lane, int]:
    """Return lane → bytes that its operations write in a typical step."""
    program = timed(steps(Program(spec), _SETTLED))
    decided = [number for number, entry in enumerate(program) if entry.op.kind is Kind.DECIDE]
    moved_bytes: dict[Lane, int] = {}
    for launch in program[decided[-2] : decided[-1]]:
        if launch.op.lane in lanes:
            nbytes = sum(ref.nbytes for ref in launch.op.writes)
            moved_bytes[launch.op.lane] = moved_bytes.get(launch.op.lane, 0) + nbytes
    return moved_bytes


_SETTLED, _MOST_STEPS = 4, 64
"""Number of steps after which steps usually take equal time; maximum number of steps that are
simulated until they do."""


def steady(
    spec: StepSpec, seconds: Seconds, input_bytes: int = 0, *, clipped: bool = False
) -> Steady:
    """Simulate steps in the long run and return the mean of a period; in update mode "delayed",
    after its warm-up.

    Args:
        input_bytes, clipped: see `drive.steps`.
    """
    warm = replace(spec, config=spec.config.replace(warmup_steps=0))
    period, settled = spec.period, _SETTLED
    while True:
        count = settled + period - 1
        program = timed(steps(Program(warm), count, input_bytes, clipped=clipped))
        times = simulated(program, seconds)
        before, last = (_mean(program, times, seconds, period, ends) for ends in (-2, -1))
        if _are_alike(before, last) or settled >= _MOST_STEPS:
            return last
        # Work piles up on a lane, and waits move from one lane to another, until its ring is full.
        settled *= 2


def _mean(
    program: Sequence[Timed],
    times: Simulated,
    seconds: Seconds,
    period: int,
    ends: int,
) -> Steady:
    """Return the mean of `period` steps of a simulated program; `ends`: index of the last of them
    among all steps, negative: from the end."""
    decided = [number for number, entry in enumerate(program) if entry.op.kind is Kind.DECIDE]
    first, last = decided[ends - period] + 1, decided[ends]
    busy: dict[str, float] = {}
    exposed: dict[str, float] = {}
    ready = times[first - 1][0]
    for number in range(first, last + 1):
        op = program[number].op
        busy[op.lane] = busy.get(op.lane, 0.0) + seconds(op) / period
        if op.lane is not Lane.COMPUTE:
            continue
        # The time between `ready` and its start is exposed time of the lanes that worked then,
        # following the launches that each launch waited for.
        cause = times[number][1]
        while cause is not None and times[cause][0] > ready:
            end, before = times[cause]
            start = ready if before is None else max(times[before][0], ready)
            lane = program[cause].op.lane
            exposed[lane] = exposed.get(lane, 0.0) + end - start
            cause = before
        ready = times[number][0]
    of_one = {lane: waited / period for lane, waited in exposed.items()}
    took_s = times[last][0] - times[first - 1][0]
    return Steady(took_s / period, busy, of_one, (last + 1 - first) / period)


def _are_alike(first: Steady, other: Steady) -> bool:
    """Return True if two steps take equal time, including the exposed time of each lane."""
    least = 1e-9 * max(first.seconds, other.seconds)
    waits = [
        (first.exposed.get(lane, 0.0), other.exposed.get(lane, 0.0))
        for lane in first.exposed.keys() | other.exposed.keys()
    ]
    return all(abs(a - b) <= least for a, b in [(first.seconds, other.seconds), *waits])


def bound(busy: Mapping[str, float]) -> tuple[float, str]:
    """Return the seconds and the name of the busiest lane, or link, of a step."""
    links: dict[str, float] = {}
    for lane, seconds in busy.items():
        link = LINKS.get(lane, lane)
        links[link] = links.get(link, 0.0) + seconds
    return max((seconds, str(link)) for link, seconds in links.items())
