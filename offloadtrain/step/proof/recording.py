"""The calls to the lanes, in order: of a real run, or of a program that was not run.

The recorder of a real run writes these entries with the addresses of its memory. `trace` writes
them for the operations of a program, at artificial addresses. `prove` takes both.

A write orders an operation after every earlier access, so a launch does not declare reads of the
memory that it writes. `read_in_place` returns these for the prover: a sum over memory that was not
written is wrong in any order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from offloadtrain.step.layout.buffer_table import buffer_table
from offloadtrain.step.layout.buffers import BufferKey, Memory
from offloadtrain.step.layout.formats import ITEMSIZE
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import (
    Allocate,
    Event,
    HostWait,
    Kind,
    Lane,
    Launch,
    Operation,
    Record,
    Ref,
    Wait,
)
from offloadtrain.step.program.operations import Undefined as Undefine


def read_in_place(op: Launch, *, ranks: int, rank: int) -> tuple[Ref, ...]:
    """Return the parts of `op.writes` whose earlier contents the operation needs."""
    match op.kind:
        case Kind.REDUCE_SCATTER | Kind.ADD:
            return op.writes
        case Kind.ALL_GATHER:
            return tuple(_shard(ref, ranks, rank) for ref in op.writes)
        case Kind.ACCUMULATE | Kind.MARK if not op.first:
            return op.writes[:1]
        # The matrix; its workspace, which comes second, may have any contents.
        case Kind.ORTHOGONALIZE:
            return op.writes[:1]
        case Kind.DIRECTION | Kind.ADAM if op.update and not op.update.out_of_place:
            return tuple(ref for ref in op.writes if ref.memory is Memory.STATE)
    return ()


def _shard(ref: Ref, ranks: int, rank: int) -> Ref:
    count = (ref.hi - ref.lo) // ranks
    lo = ref.lo + rank * count
    return ref._replace(lo=lo, hi=lo + count)


@dataclass(frozen=True, slots=True)
class Bytes:
    """An interval of memory, by address: buffers of several dtypes may share it."""

    name: str
    lo: int
    hi: int

    def overlaps(self, other: Bytes) -> bool:
        return self.lo < other.hi and other.lo < self.hi

    def covers(self, other: Bytes) -> bool:
        return self.lo <= other.lo and other.hi <= self.hi

    def without(self, other: Bytes) -> list[Bytes]:
        """Return the parts that `other`, which overlaps it, does not cover."""
        ends = ((self.lo, other.lo), (other.hi, self.hi))
        return [Bytes(self.name, lo, hi) for lo, hi in ends if lo < hi]


@dataclass(frozen=True, slots=True)
class Launched:
    """An operation on a lane."""

    lane: Lane
    name: str
    reads: tuple[Bytes, ...]
    writes: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Event number `event` represents everything that was launched on the lane before."""

    lane: Lane
    event: int


@dataclass(frozen=True, slots=True)
class Waited:
    """Launches on the lane (None: launches of this thread on all lanes) from here on start after
    the event."""

    lane: Lane | None
    event: int
    why: str


@dataclass(frozen=True, slots=True)
class Opened:
    """User code may access these bytes on the compute lane from here on."""

    span: int
    name: str
    reads: tuple[Bytes, ...]
    writes: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of a span."""

    span: int


@dataclass(frozen=True, slots=True)
class Undefined:
    """The contents of these bytes are undefined until they are written."""

    bytes: Bytes


Entry = Launched | Recorded | Waited | Opened | Closed | Undefined


APART_BITS = 40
"""Separate pieces of memory of a traced program start 2^40 bytes apart."""


def trace(spec: StepSpec, operations: Iterable[Operation], rank: int = 0) -> list[Entry]:
    """Record a rank's program as if it had been run, with memory that nothing else shares. The
    reads of an entry include the reads of the memory that the operation writes."""
    entries: list[Entry] = []
    numbers: dict[Event, int] = {}
    at = _Addresses(spec)
    sharing = {b.name: b.ranks for block in spec.blocks for b in block.all_buckets}
    for op in operations:
        match op:
            case Launch():
                # Operations without a bucket (block inputs) belong to all ranks.
                ranks = sharing.get(op.owner, spec.ranks)
                sharing_rank = rank * ranks // spec.ranks
                needed = (*op.reads, *read_in_place(op, ranks=ranks, rank=sharing_rank))
                reads, writes = map(at.bytes, needed), map(at.bytes, op.writes)
                entries.append(Launched(op.lane, op.name, tuple(reads), tuple(writes)))
            case Record():
                numbers[op.event] = len(numbers)
                entries.append(Recorded(op.event.lane, numbers[op.event]))
            case Wait():
                entries.append(Waited(op.lane, numbers[op.event], str(op)))
            case HostWait():
                entries.append(Waited(None, numbers[op.event], str(op.why)))
            case Undefine():
                entries.append(Undefined(at.bytes(op.ref)))
            case Allocate():
                entries += allocated(at.bytes(op.ref))
    return entries


def allocated(memory: Bytes) -> list[Entry]:
    """Return the entries of an allocation: a write on compute whose values must not be read."""
    return [Launched(Lane.COMPUTE, "allocate", (), (memory,)), Undefined(memory)]


class _Addresses:
    """Assigns addresses to every piece of memory; buffers in the same slot share addresses."""

    def __init__(self, spec: StepSpec) -> None:
        self._table = buffer_table(spec)
        self._bases: dict[BufferKey, int] = {}

    def bytes(self, ref: Ref) -> Bytes:
        key, offset = self._table.place(ref.key)
        start = self._bases.setdefault(key, len(self._bases) << APART_BITS) + offset
        lo, hi = (start + at * ITEMSIZE[ref.dtype] for at in (ref.lo, ref.hi))
        return Bytes(f"{ref.memory.value} {ref.owner}", lo, hi)
