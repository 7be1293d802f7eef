"""Parts of what a program has said."""

from __future__ import annotations

from collections.abc import Iterable

from offloadtrain.step.program.operations import Kind, Lane, Launch, Operation, Operations


def launches(operations: Iterable[Operation], *kinds: Kind) -> list[Launch]:
    return [op for op in operations if isinstance(op, Launch) and op.kind in kinds]


def lane(operations: Iterable[Operation], which: Lane) -> list[str]:
    return [op.name for op in operations if isinstance(op, Launch) and op.lane is which]


def by_step(operations: Operations) -> list[Operations]:
    """Each ends with the `DECIDE` of its step; what comes behind the last one is the last."""
    result: list[Operations] = [[]]
    for op in operations:
        result[-1].append(op)
        if isinstance(op, Launch) and op.kind is Kind.DECIDE:
            result.append([])
    return result
