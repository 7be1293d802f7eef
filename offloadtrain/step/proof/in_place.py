"""The reads of an operation from memory that it also writes.

A write orders an operation behind every earlier access, so a launch does not declare such reads as
well. The prover asks for them: a sum over memory that nobody has filled is wrong in any order.
"""

from __future__ import annotations

from offloadtrain.step.layout.buffers import Memory
from offloadtrain.step.program.operations import Kind, Launch, Ref


def read_in_place(op: Launch, *, ranks: int, rank: int) -> tuple[Ref, ...]:
    """Return the parts of `op.writes` whose earlier contents the operation needs."""
    match op.kind:
        case Kind.REDUCE_SCATTER | Kind.ADD:
            return op.writes
        case Kind.ALL_GATHER:
            return tuple(_shard(ref, ranks, rank) for ref in op.writes)
        case Kind.ACCUMULATE | Kind.MARK if not op.first:
            return op.writes[:1]
        # The matrix; its workspace, which comes second, may hold anything.
        case Kind.ORTHOGONALIZE:
            return op.writes[:1]
        case Kind.DIRECTION | Kind.ADAM if op.update and not op.update.out_of_place:
            return tuple(ref for ref in op.writes if ref.memory is Memory.STATE)
    return ()


def _shard(ref: Ref, ranks: int, rank: int) -> Ref:
    count = (ref.hi - ref.lo) // ranks
    lo = ref.lo + rank * count
    return ref._replace(lo=lo, hi=lo + count)
