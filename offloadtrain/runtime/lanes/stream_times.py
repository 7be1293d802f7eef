"""Events of lanes on a device, and busy and waiting time of its streams, known once they have
happened.

Nothing here blocks: times are read from events that have happened.

[Note: Timing events]
Two events around each operation would be three quarters of the events of a step, at the cost of the
launching thread. So an operation of a stream is timed the first few times that its name
occurs, of which the very first does not count, and again in sampled steps. Otherwise it counts with
the average duration of its name when it was timed last. Waits of compute are always timed: they
differ from step to step, and are the purpose of the report.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offloadtrain.events.schema import WAIT
from offloadtrain.runtime.lanes.base import LaneEvent, LaneTotals, now_ms
from offloadtrain.runtime.lanes.queues import Flag
from offloadtrain.runtime.lanes.timeline import Interval
from offloadtrain.step.program.operations import Lane

_KEPT = 32
"""Maximum number of pending intervals and waits of compute before the ended ones are counted."""
_CLOCK_READS = 5
"""Number of readings of both clocks at the start of a timeline; the most precise is used."""
_LEARNT_RUNS = 4
"""Number of timed runs per name before the first sampled step."""


class StreamEvent(LaneEvent):
    """`cuda` is None for lanes without a stream; `issued` is set once the event can be waited
    for."""

    __slots__ = ("cuda", "handle", "issued", "lane")

    def __init__(self, lane: Lane, cuda: torch.cuda.Event | None, issued: Flag) -> None:
        self.lane = lane
        self.cuda = cuda
        self.issued = issued
        self.handle = ctypes.c_uint64()
        """The event's address once it is issued, for threads without Python."""

    def issue(self, stream: torch.cuda.Stream) -> None:
        assert self.cuda is not None
        # After everything launched on the stream: a wait for the event waits for all of it.
        self.cuda.record(stream)
        # Before `issued` is set, whose lock makes it visible to the native host thread.
        self.handle.value = self.cuda.cuda_event

    def has_happened(self) -> bool:
        if self.cuda is None or not self.issued.is_set():
            return self.issued.is_set()
        # 0: its lane has failed before. An event that was never recorded would report completion.
        return self.handle.value != 0 and bool(self.cuda.query())


@dataclass(frozen=True, slots=True)
class StreamInterval:
    """An interval of a stream, known once both events have happened.

    Attributes:
        waits: parts of it in which the stream was idle.
    """

    lane: str
    name: str
    start: torch.cuda.Event
    end: torch.cuda.Event
    waits: tuple[StreamInterval, ...] = ()

    def is_over(self) -> bool:
        return bool(self.end.query() and self.start.query())

    def busy_ms(self) -> float:
        return self.elapsed_ms() - sum(wait.elapsed_ms() for wait in self.waits)

    def elapsed_ms(self) -> float:
        return float(self.start.elapsed_time(self.end))


@dataclass(slots=True)
class _Mean:
    """The runs of one name in one sample."""

    sample: int
    runs: int = 0
    total_ms: float = 0.0


class UsualTimes:
    """Mean time per lane and name, in the newest sample that contains the name."""

    def __init__(self) -> None:
        self._sample = 0
        self._means: dict[tuple[Lane, str], _Mean] = {}

    def begin_sample(self) -> None:
        """Times from here on replace earlier times."""
        self._sample += 1

    def timed(self, lane: Lane, name: str, ms: float) -> None:
        """Record the time of a run."""
        mean = self._means.get((lane, name))
        # The very first run loads kernels and touches memory.
        if mean is None:
            self._means[lane, name] = _Mean(self._sample)
            return
        if mean.sample != self._sample:
            mean = self._means[lane, name] = _Mean(self._sample)
        mean.runs += 1
        mean.total_ms += ms

    def of(self, lane: Lane, name: str) -> float | None:
        """Return the usual milliseconds; None if runs should be timed. Callable on any thread."""
        mean = self._means.get((lane, name))
        if mean is None or mean.runs < (1 if mean.sample else _LEARNT_RUNS):
            return None
        return mean.total_ms / mean.runs


class StreamTimes:
    """Busy and exposed time of streams, and the timeline of a sampled step.

    The training thread and the device's autograd thread call it, and threads of lanes append. For
    the choice of timed operations see [Note: Timing events].
    """

    def __init__(self) -> None:
        self._running: dict[Lane, deque[StreamInterval]] = {lane: deque() for lane in Lane}
        """Operations of each lane that are not known to have ended, in order."""
        self._usual = UsualTimes()
        # Written by the lane's thread and read by `settle`, which stores how much it has counted:
        # no lock is needed.
        self._assumed_ms = dict.fromkeys(Lane, 0.0)
        self._counted_ms = dict.fromkeys(Lane, 0.0)
        self._waits: deque[StreamInterval] = deque()
        """Waits of compute that are not known to have ended."""
        self._waits_in_span: list[StreamInterval] = []
        self._open_spans = 0
        self._computes = ""
        """Name of the outermost open span."""
        self._computes_since: torch.cuda.Event | None = None
        """Start event of that span, if it is timed."""
        self._intervals: list[StreamInterval] = []
        self._samples = dict.fromkeys(Lane, False)
        """Lane → True while its intervals are recorded. Each lane ends this on its own thread."""
        self._origin: tuple[float, torch.cuda.Event] | None = None

    def should_time(self, lane: Lane, name: str) -> bool:
        """Return True if an operation that is about to run should be timed: the caller then calls
        `ran` after it. Otherwise its usual time is counted."""
        if self._samples[lane]:
            return True
        # Compute's operations inside a span are part of the span's time.
        if lane is Lane.COMPUTE and self._open_spans:
            return False
        return self._assume(lane, name)

    def _assume(self, lane: Lane, name: str) -> bool:
        """Count the usual time of a run; returns True if there is none, so that it must be
        timed."""
        usual_ms = self._usual.of(lane, name)
        if usual_ms is None:
            return True
        self._assumed_ms[lane] += usual_ms
        return False

    def ran(self, lane: Lane, name: str, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Record an operation on a stream."""
        interval = StreamInterval(lane, name, start, end)
        if lane is not Lane.COMPUTE or self._open_spans == 0:
            self._running[lane].append(interval)
        self._sample(lane, interval)

    def waited(self, lane: Lane, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Record a stall of compute, which waited for `lane`."""
        wait = StreamInterval(WAIT, lane.value, start, end)
        self._waits.append(wait)
        if self._open_spans:
            self._waits_in_span.append(wait)
        self._sample(Lane.COMPUTE, wait)

    def open(
        self, name: str, event: Callable[[], torch.cuda.Event], totals: LaneTotals
    ) -> torch.cuda.Event | None:
        """Record that a span opens; `event` records an event now, which is returned if it is
        needed."""
        # An evaluation has no step() that counts them: events would pile up.
        if len(self._running[Lane.COMPUTE]) + len(self._waits) >= _KEPT:
            self.settle(totals)
        outermost = self._open_spans == 0
        self._open_spans += 1
        unknown = outermost and self._usual.of(Lane.COMPUTE, name) is None
        began = event() if unknown or self._samples[Lane.COMPUTE] else None
        if outermost:
            self._computes, self._computes_since = name, began
        return began

    def close(
        self, name: str, start: torch.cuda.Event | None, event: Callable[[], torch.cuda.Event]
    ) -> None:
        """Record that a span closes; `start`: return value of `open`."""
        self._open_spans -= 1
        since, last = self._computes_since, self._open_spans == 0
        samples = start is not None and self._samples[Lane.COMPUTE]
        end = event() if samples or (last and since is not None) else None
        if last:
            waits, self._waits_in_span = tuple(self._waits_in_span), []
            if since is None:
                self._assume(Lane.COMPUTE, self._computes)
            elif end is not None:
                interval = StreamInterval(Lane.COMPUTE, self._computes, since, end, waits)
                self._running[Lane.COMPUTE].append(interval)
        if start is not None and end is not None:
            self._sample(Lane.COMPUTE, StreamInterval(Lane.COMPUTE, name, start, end))

    def settle(self, totals: LaneTotals) -> None:
        """Count the intervals that have ended; never waits."""
        # Called by the training thread or autograd's, while lane threads append at the other end.
        for lane, running in self._running.items():
            while running and running[0].is_over():
                interval = running.popleft()
                spent_ms = interval.busy_ms()
                totals.busy_ms[lane] += spent_ms
                self._usual.timed(lane, interval.name, spent_ms)
            assumed_ms = self._assumed_ms[lane]
            totals.busy_ms[lane] += assumed_ms - self._counted_ms[lane]
            self._counted_ms[lane] = assumed_ms
        while self._waits and self._waits[0].is_over():
            totals.exposed_ms += self._waits.popleft().elapsed_ms()

    def begin_sampling(self, stream: torch.cuda.Stream) -> None:
        """Record intervals from now on. `stream` is idle: an event happens when it is recorded."""
        tries = [_read_clocks(stream) for _ in range(_CLOCK_READS)]
        _, now, event = min(tries, key=lambda reading: reading[0])
        self._intervals, self._origin = [], (now, event)
        self._samples = dict.fromkeys(Lane, True)
        self._usual.begin_sample()

    def end_sampling(self, lane: Lane) -> None:
        """Stop recording intervals of a lane."""
        self._samples[lane] = False

    def sampled(self) -> tuple[float, list[Interval]]:
        """Return the host clock in ms at the start of sampling, and the intervals, which have all
        ended."""
        assert self._origin is not None
        began_ms, origin = self._origin
        return began_ms, [
            Interval(i.lane, i.name, origin.elapsed_time(i.start), i.elapsed_ms())
            for i in self._intervals
        ]

    def _sample(self, lane: Lane, interval: StreamInterval) -> None:
        if self._samples[lane]:
            self._intervals.append(interval)


def _read_clocks(stream: torch.cuda.Stream) -> tuple[float, float, torch.cuda.Event]:
    """Return (uncertainty in ms, host clock in ms, event at that time). The uncertainty is large if
    another process takes the core in between."""
    event, before_ms = torch.cuda.Event(enable_timing=True), now_ms()
    # The event happens between the two readings of the host clock, so the wait is intended.
    event.record(stream)
    event.synchronize()
    after_ms = now_ms()
    return after_ms - before_ms, after_ms, event
