"""Lanes: the queues of a step that run concurrently, and the one interface to all of them.

[Note: Lanes]
A *lane* runs its operations in the order of launch. Lanes run concurrently; two lanes are ordered
only by `record` on one and `wait` on the other. Launching never blocks on the work itself. Every
operation declares the ranges that it reads and writes, and receives exactly the views of these
ranges, so that it cannot access undeclared memory. Other code (the user's forward, autograd's
backward) cannot be wrapped in this way: it runs inside a *span*, an interval of the compute lane
with declared ranges, opened and closed by hooks.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import Self

import torch
from torch import Tensor

from offloadtrain.config.errors import OffloadTrainError
from offloadtrain.events.schema import WAIT
from offloadtrain.runtime.lanes.timeline import Interval, Timeline, with_bytes
from offloadtrain.step.program.operations import Kind, Lane

_STRIDED_KEPT = 256
"""Maximum number of cached views of a buffer."""


class LaneError(OffloadTrainError):
    """An operation failed on a lane outside the training thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A named piece of memory that lanes share.

    Attributes:
        name: its name in the Ledger and in traces.
        flat: 1-D contiguous tensor; the buffer owns it.
    """

    name: str
    flat: Tensor
    _strided: dict[tuple[torch.Size, tuple[int, ...], int | torch.SymInt], Tensor] = field(
        default_factory=dict, repr=False
    )

    def strided(
        self, shape: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt
    ) -> Tensor:
        """View elements starting at `offset`. Views are cached: backward requests the same views in
        every step."""
        view = self._strided.get((shape, stride, offset))
        if view is None:
            # A user may save different parts of a weight each time, such as embeddings of every
            # length.
            if len(self._strided) >= _STRIDED_KEPT:
                self._strided.clear()
            start = self.flat.storage_offset() + offset
            view = torch.as_strided(self.flat, shape, stride, start)
            self._strided[shape, stride, offset] = view
        return view

    @property
    def whole(self) -> Range:
        return Range(self, 0, self.flat.numel())

    def first(self, numel: int) -> Range:
        return Range(self, 0, numel)


@dataclass(frozen=True, eq=False)
class Range:
    """Elements [lo, hi) of a buffer."""

    buffer: Buffer
    lo: int
    hi: int

    # Both are cached: ranges live as long as their buffers, and every step launches over them.
    @cached_property
    def view(self) -> Tensor:
        return self.buffer.flat[self.lo : self.hi]

    @cached_property
    def nbytes(self) -> int:
        return (self.hi - self.lo) * self.buffer.flat.element_size()


class LaneEvent:
    """A point on a lane that other lanes can wait for; only `Lanes.record` makes it."""

    __slots__ = ()

    @classmethod
    def own(cls, event: LaneEvent) -> Self:
        """Return the event if lanes of this backend have recorded it.

        Raises:
            TypeError: other lanes have recorded it.
        """
        if not isinstance(event, cls):
            raise TypeError(f"{event!r} was not recorded by these lanes")
        return event


@dataclass(slots=True)
class LaneTotals:
    """Totals of the lanes since they were made; the step report takes differences.

    Attributes:
        busy_ms: lane → time in operations; for compute, in spans. On CUDA only those known to
            have ended: the last operations of a step count in the next step.
        exposed_ms: time that compute waited for the other lanes.
        comm_bytes: bytes that this rank has sent in collectives over gradients and weights.
        disk_read_bytes, disk_written_bytes: bytes of state, gradients and weights on the disk; a
            checkpoint reads the state once, and the bytes that it writes do not count.
    """

    busy_ms: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    exposed_ms: float = 0.0
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    comm_bytes: int = 0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0

    def minus(self, earlier: LaneTotals) -> LaneTotals:
        return LaneTotals(
            busy_ms={lane: spent - earlier.busy_ms[lane] for lane, spent in self.busy_ms.items()},
            exposed_ms=self.exposed_ms - earlier.exposed_ms,
            d2h_bytes=self.d2h_bytes - earlier.d2h_bytes,
            h2d_bytes=self.h2d_bytes - earlier.h2d_bytes,
            comm_bytes=self.comm_bytes - earlier.comm_bytes,
            disk_read_bytes=self.disk_read_bytes - earlier.disk_read_bytes,
            disk_written_bytes=self.disk_written_bytes - earlier.disk_written_bytes,
        )

    def copy(self) -> LaneTotals:
        return self.minus(LaneTotals())


@dataclass(frozen=True, slots=True)
class HostProgress:
    """Number of operations of the host lane since it was made; they run in the order of launch.

    Attributes:
        launched: operations put into its queue.
        begun, ended: if they differ while the lane is idle, an operation has failed midway.
    """

    launched: int = 0
    begun: int = 0
    ended: int = 0


@dataclass(slots=True, eq=False)
class Span:
    """User code that runs on the compute lane between `open_span` and `close_span`."""

    name: str
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    mark: object = None
    closed: bool = field(default=False)


_NBYTES = attrgetter("nbytes")

Operation = Callable[..., object]
"""Called with the views of `reads`, then the views of `writes`; an updated range is a write."""


class Lanes(ABC):
    """A backend: CUDA streams and a host thread, or everything in order on the CPU."""

    def __init__(self) -> None:
        self.totals = LaneTotals()
        self._sizes: dict[tuple[str, str], deque[int]] | None = None
        """In a sampled step: (lane, name) → bytes of each copy and collective."""
        self._timeline: Timeline | None = None
        """The last timeline, until it is read."""
        self._samples = False
        """True while compute's intervals are recorded."""
        self._is_reading = False
        """True while this thread waits for a timeline: such a wait is not exposed time."""
        self._last: dict[Lane, str] = {}
        self.loads_cross_bus = True
        """Streamed weights come from the host; False if they come from shards on the device."""
        self.copies_block = False
        """The host memory is not page-locked: a copy returns when it is complete."""

    @abstractmethod
    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        """Put `fn` at the end of `lane`; it is called with the declared views.

        Raises:
            LaneError: an earlier operation failed on a thread.
        """

    @abstractmethod
    def record(self, lane: Lane) -> LaneEvent:
        """Return an event that occurs when everything launched on `lane` so far is complete."""

    @abstractmethod
    def wait(self, lane: Lane, event: LaneEvent, why: object) -> None:
        """Start later launches on `lane` after `event`; `str(why)` is the reason."""

    def follow_caller(self) -> None:  # noqa: B027
        """Order later launches on the lane of writes after device operations that the caller's
        code has launched. On a CPU these are complete already."""

    @abstractmethod
    def host_wait(self, event: LaneEvent, why: object) -> None:
        """Block the calling thread until `event` has occurred. It counts as exposed time."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until every lane is idle; raises LaneError if an operation failed on any lane."""

    @abstractmethod
    def close(self) -> None:
        """Drain and end the lanes. Idempotent. Does not raise earlier failures."""

    @abstractmethod
    def host_progress(self) -> HostProgress:
        """Return the progress of the host lane; never waits."""

    @abstractmethod
    def abandon(self) -> None:
        """After a failure of the device: drop launched operations that have not begun. Returns
        when the host lane is idle, and does not use the device."""

    def start_timeline(self) -> None:
        """Record an `Interval` for each operation until `end_timeline`. Operations that already run
        on lanes other than compute are recorded, too."""
        if self._timeline is not None:
            _ = self._timeline.intervals
        self._sizes = {}
        self._begin_sampling()

    def end_timeline(self) -> Timeline:
        """End the sampling, without waits: operations that were launched before belong to the
        timeline, compute's later operations and waits do not."""
        # Later launches are not recorded.
        for lane in Lane:
            self._run_in_order(lane, partial(self._end_sampling, lane))
        ends = [self.record(lane) for lane in Lane]
        sizes, self._sizes = self._sizes or {}, None

        def read() -> list[Interval]:
            self._is_reading = True
            # Intervals are known only after their end.
            for event in ends:
                self.host_wait(event, "the timeline")
            self._is_reading = False
            self._timeline = None
            return with_bytes(self._sampled(), sizes)

        self._timeline = Timeline(read)
        return self._timeline

    @abstractmethod
    def _run_in_order(self, lane: Lane, task: Callable[[], object]) -> None:
        """Run a task of the launching code in the order of a lane, on its stream; the task is not
        counted."""

    def _begin_sampling(self) -> None:
        """Start to record intervals."""
        self._samples = True

    def _end_sampling(self, lane: Lane) -> None:
        """Stop recording intervals of a lane; runs in the order of the lane."""
        self._samples = self._samples and lane is not Lane.COMPUTE

    def _sampled(self) -> list[Interval]:
        """Return the recorded intervals, all of which have ended; [] without a clock."""
        return []

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        """User code may access these ranges on the compute lane until `close_span`."""
        return Span(name, tuple(reads), tuple(writes))

    def close_span(self, span: Span) -> None:
        """End the span on the compute lane. A second close is ignored."""
        span.closed = True

    def read_totals(self) -> LaneTotals:
        """Return a copy of the present totals; never waits."""
        return self.totals.copy()

    def undefine(self, range_: Range, lane: Lane) -> None:  # noqa: B027
        """The contents of a reused range are undefined until `lane` writes it. Lanes that check a
        run may record this, or fill the range."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory of the compute device that other lanes will write.

        This is an operation on the compute lane: only lanes that wait for an event recorded after
        it are ordered after earlier uses of this memory, and after the fill of torch's
        deterministic mode.

        Returns:
            (numel,), uninitialised.
        """
        return torch.empty(numel, dtype=dtype, device=device)

    def state(self) -> str:
        """Describe each lane: its last launch, and the length of its queue; callable on any
        thread."""
        pending = self._pending()
        return "; ".join(
            f"{lane.value}: {name} launched last, {pending.get(lane, 0)} in the queue"
            for lane, name in list(self._last.items())
        )

    def _pending(self) -> dict[Lane, int]:
        """Return the number of tasks in the queue of each lane that has a queue."""
        return {}

    def _count(self, lane: Lane, name: str, writes: Sequence[Range]) -> None:
        """Count a launched operation."""
        self._last[lane] = name
        # Norms are 8 bytes per tensor: only bytes per parameter count.
        if lane in (Lane.COMPUTE, Lane.HOST, Lane.UPDATE) or name == Kind.NORMS_DOWN:
            return
        nbytes = sum(map(_NBYTES, writes))
        if self._sizes is not None:
            self._sizes.setdefault((lane.value, name), deque()).append(nbytes)
        loaded = lane is Lane.LOAD and (self.loads_cross_bus or name == Kind.ACTIVATION_UP)
        if lane is Lane.D2H or name.startswith(Kind.MATRIX_DOWN):
            self.totals.d2h_bytes += nbytes
        elif lane is Lane.H2D or loaded or name.startswith(Kind.MATRIX_UP):
            self.totals.h2d_bytes += nbytes
        elif lane in (Lane.DISK_READ, Lane.DISK_LOAD):
            self.totals.disk_read_bytes += nbytes
        elif lane is Lane.DISK_WRITE:
            self.totals.disk_written_bytes += nbytes


class ClockedLanes(Lanes):
    """Lanes some of which, including compute, run on the launching thread, timed by its clock."""

    def __init__(self) -> None:
        super().__init__()
        self._intervals: list[Interval] = []
        self._origin_ms = 0.0
        self._open_spans = 0
        self._computes_since = (0.0, 0.0)
        """Start of the outermost open span, and the exposed time up to then."""

    def _begin_sampling(self) -> None:
        super()._begin_sampling()
        self._intervals, self._origin_ms = [], now_ms()

    def _sampled(self) -> list[Interval]:
        return self._intervals

    def open_span(self, name: str, reads: Sequence[Range], writes: Sequence[Range] = ()) -> Span:
        began_ms = now_ms()
        if self._open_spans == 0:
            self._computes_since = (began_ms, self.totals.exposed_ms)
        self._open_spans += 1
        return Span(name, tuple(reads), tuple(writes), mark=began_ms)

    def close_span(self, span: Span) -> None:
        if not span.closed and isinstance(span.mark, float):
            ended_ms = now_ms()
            self._open_spans -= 1
            # Spans may be nested: only the outermost counts.
            if self._open_spans == 0:
                began_ms, waited_ms = self._computes_since
                waited_ms = self.totals.exposed_ms - waited_ms
                self.totals.busy_ms[Lane.COMPUTE] += ended_ms - began_ms - waited_ms
            if self._samples:
                self._note(Lane.COMPUTE, span.name, span.mark, ended_ms)
        span.closed = True

    def _account(self, lane: Lane, name: str, start_ms: float) -> None:
        """Record the end of an operation."""
        end_ms = now_ms()
        # Compute's operations inside a span are part of the span's time.
        if lane is not Lane.COMPUTE or self._open_spans == 0:
            self.totals.busy_ms[lane] += end_ms - start_ms
        if self._samples:
            self._note(lane, name, start_ms, end_ms)

    def _expose(self, lane: Lane, start_ms: float) -> None:
        """Count the time since `start_ms` as exposed: compute waited for `lane`."""
        end_ms = now_ms()
        self.totals.exposed_ms += end_ms - start_ms
        if self._samples:
            self._note(WAIT, lane.value, start_ms, end_ms)

    def _note(self, row: str, name: str, start_ms: float, end_ms: float) -> None:
        """Record an interval of a sampled step; `row`: the lane, or `WAIT`."""
        start, duration = start_ms - self._origin_ms, end_ms - start_ms
        self._intervals.append(Interval(row, name, start, duration))


def views(reads: Sequence[Range], writes: Sequence[Range]) -> list[Tensor]:
    """Return the tensors that an operation is called with."""
    operands = []
    for range_ in reads:
        operands.append(range_.view)
    for range_ in writes:
        operands.append(range_.view)
    return operands


def now_ms() -> float:
    """Read a monotonic clock, in milliseconds."""
    return time.perf_counter() * 1e3


def copy(source: Tensor, target: Tensor) -> None:
    """Copy (n,) to (n,) of the same dtype: the operation of the transfer lanes. Asynchronous on
    CUDA if the host side is pinned.

    Raises:
        ValueError: the dtypes differ. Such a copy would make a temporary that no launch declares.
    """
    if source.dtype != target.dtype:
        raise ValueError(f"a transfer keeps the dtype: {source.dtype} to {target.dtype}")
    # Returns before the copy is complete: after an event recorded later, both sides may be reused.
    with torch.no_grad():
        target.copy_(source, non_blocking=True)


class _Done(LaneEvent):
    """An event that has occurred before `record` returns, because everything runs at launch."""

    __slots__ = ()


_DONE = _Done()


class SequentialLanes(ClockedLanes):
    """Runs operations at launch. All time outside of compute is exposed: compute waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = self._ended = 0
        """Number of operations of the host lane."""

    def launch(
        self,
        lane: Lane,
        name: str,
        fn: Operation,
        reads: Sequence[Range] = (),
        writes: Sequence[Range] = (),
    ) -> None:
        start_ms, on_host = now_ms(), lane is Lane.HOST
        self._begun += on_host
        fn(*views(reads, writes))
        self._ended += on_host
        self._count(lane, name, writes)
        self._account(lane, name, start_ms)
        if lane is not Lane.COMPUTE:
            self._expose(lane, start_ms)

    # Events and waits are no-ops: launch order is execution order, on a single thread.
    def record(self, lane: Lane) -> LaneEvent:
        return _DONE

    def wait(self, lane: Lane, event: LaneEvent, why: object) -> None:
        if event is not _DONE:
            _Done.own(event)

    def host_wait(self, event: LaneEvent, why: object) -> None:
        # The training thread runs all lanes: its waits are those of a lane.
        self.wait(Lane.HOST, event, why)

    def synchronize(self) -> None:
        """No-op: nothing is ever pending."""

    def host_progress(self) -> HostProgress:
        return HostProgress(self._begun, self._begun, self._ended)

    def abandon(self) -> None:
        """No-op: nothing is ever pending."""

    def close(self) -> None:
        """No-op: nothing is ever pending."""

    def _run_in_order(self, lane: Lane, task: Callable[[], object]) -> None:
        task()
