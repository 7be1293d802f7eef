"""The recorded programs contain every kind of operation and of memory that an engine uses.

An operation that is in no recorded program is never compared. The covering cases, which every run
of the tests compares, contain all kinds; the other cases need not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any, get_args

import pytest

from offloadtrain.engine.interpreter import Interpreter
from offloadtrain.runtime.lanes import Lane
from offloadtrain.step.layout.buffers import Memory
from offloadtrain.step.program.operations import Kind, Operation, Operations
from tests.oracle.cases import COVERING
from tests.oracle.programs import known
from tests.oracle.runs import recorded

NOT_OF_ENGINES = {Kind.DECIDE}
"""Launched only where a program is driven without a model: an engine waits for the norm instead."""

WHERE: dict[Memory, tuple[tuple[Kind, str], ...]] = {
    Memory.WORKING: (
        (Kind.LOAD, "working"),
        (Kind.ALL_GATHER, "working"),
        (Kind.WEIGHTS_UP, "other working"),
    ),
    Memory.DEVICE_SHARD: ((Kind.LOAD, "shard"), (Kind.LOAD, "other shard")),
    Memory.STAGING: (
        (Kind.REDUCE_SCATTER, "gradient staging"),
        (Kind.REDUCE_SCATTER, "gradients"),  # in ZeRO stage 1
    ),
    Memory.ROUNDED: ((Kind.GRAD_DOWN, "rounded gradients"),),
    Memory.MATRIX: ((Kind.ORTHOGONALIZE, "matrix workspace"),),
    Memory.HOST_STAGING: (
        (Kind.ACCUMULATE, "host staging"),
        (Kind.ADD, "host staging"),
        (Kind.WEIGHTS_UP, "host staging"),
    ),
    Memory.GRADIENT: (
        (Kind.ADAM, "gradient"),
        (Kind.NO_GRADIENT, "gradient"),
        (Kind.ADAM, "other gradient"),
        (Kind.WRITE_GRADIENT, "slot 0: gradient"),
        (Kind.WRITE_GRADIENT, "slot 2: gradient"),
    ),
    Memory.SUM: ((Kind.ROUND_SUM, "gradient sums"), (Kind.ROUND, "gradient sums")),
    Memory.PENDING: ((Kind.WEIGHTS_UP, "pending weights"),),
    Memory.SNAPSHOT: ((Kind.PUBLISH, "weights snapshot"), (Kind.LOAD, "frozen weights")),
    Memory.STATE: (
        (Kind.ADAM, "master"),
        (Kind.ADAM, "exp_avg"),
        (Kind.ADAM, "exp_avg_sq"),
        (Kind.ADAM, "other master"),
        (Kind.ADAM, "other exp_avg"),
        (Kind.ADAM, "other exp_avg_sq"),
        (Kind.ADAM, "weight"),
        (Kind.ADAM, "low"),
        (Kind.ADAM, "slot 0: weight"),
        (Kind.ADAM, "slot 0: low"),
        (Kind.DIRECTION, "momentum_buffer"),
        (Kind.ADAM, "slot 0: master"),
        (Kind.ADAM, "slot 0: exp_avg"),
        (Kind.ADAM, "slot 0: exp_avg_sq"),
        (Kind.ADAM, "slot 1: master"),
        (Kind.ADAM, "slot 2: master"),
        (Kind.CAST, "master"),
    ),
    Memory.STATE_FILE: ((Kind.READ_STATE, "master"), (Kind.WRITE_STATE, "master")),
    Memory.GRADIENT_FILE: ((Kind.READ_GRADIENT, "gradient"), (Kind.WRITE_GRADIENT, "gradient")),
    Memory.WEIGHT_FILE: (
        (Kind.WRITE_WEIGHTS, "streamed weights"),
        (Kind.READ_WEIGHTS, "streamed weights"),
    ),
    Memory.WEIGHT_SLOT: ((Kind.READ_WEIGHTS, "weight slot"), (Kind.LOAD, "weight slot")),
    Memory.NEW_WEIGHTS: ((Kind.WRITE_WEIGHTS, "new weight slot"),),
    Memory.SPILL: ((Kind.SPILL, "checkpoint spill"), (Kind.WRITE, "checkpoint spill")),
    Memory.NORMS: (
        (Kind.NORM, "norms"),
        (Kind.ACCUMULATE, "norms"),
        (Kind.NORMS_DOWN, "norms of the device"),
    ),
    Memory.USED: ((Kind.MARK, "used"),),
    Memory.ACTIVATION: ((Kind.ACTIVATION_DOWN, "block input"), (Kind.ACTIVATION_UP, "block input")),
    Memory.HOST_ACTIVATION: ((Kind.ACTIVATION_DOWN, "host block input"),),
    Memory.KEPT_ACTIVATION: ((Kind.KEEP_INPUT, "kept block input"),),
}
"""Memory → its buffers, each with an operation that accesses it. A buffer's name is without that of
its bucket. Files have the names of host memory: the operation tells them apart."""


def test_every_lane_is_recorded() -> None:
    assert {lane for lane, _, _ in operations()} == set(Lane)


def test_every_kind_is_recorded() -> None:
    recorded = {within(name, [*Kind]) for _, name, _ in operations()}
    assert set(Kind) - recorded == NOT_OF_ENGINES


def test_every_memory_is_recorded() -> None:
    assert set(WHERE) == set(Memory)
    missing = {(kind.value, name) for kind, name in expected()} - touched()
    assert not missing


def test_every_recorded_buffer_is_known() -> None:
    """`WHERE` names every kind of buffer, with an operation that must access it."""
    numbered = re.compile(r"^slot \d+")
    names = {numbered.sub("slot", name) for _, name in expected()}
    assert {numbered.sub("slot", name) for _, name in touched()} <= names


def test_every_operation_that_is_no_launch_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded programs show their effect only: the memory of later launches."""
    kinds_run: set[type] = set()
    run = Interpreter.run

    def noting(self: Interpreter, event: Callable[..., Operations], *args: Any, **kw: Any) -> None:
        def noted() -> Operations:
            operations = event(*args, **kw)
            kinds_run.update(map(type, operations))
            return operations

        run(self, noted)

    monkeypatch.setattr(Interpreter, "run", noting)
    for case in COVERING.values():
        if case.placement in ("streamed, 1 slot", "state on three tiers") or "saved" in case.name:
            recorded(case)
    assert kinds_run == set(get_args(Operation))


def expected() -> Iterator[tuple[Kind, str]]:
    return (pair for pairs in WHERE.values() for pair in pairs)


@cache
def touched() -> frozenset[tuple[str, str]]:
    """Return (kind of operation, buffer) of each access."""
    names = {name for _, name in expected()}
    names |= {re.sub("^slot 0", f"slot {slot}", name) for name in names for slot in (1, 2)}
    return frozenset(
        (within(name, [*Kind]), within(each, names) or each)
        for _, name, accesses in operations()
        for each in accesses
    )


@cache
def operations() -> tuple[tuple[Lane, str, tuple[str, ...]], ...]:
    """Return lane, name and buffers of each operation of the covering cases."""
    lines = {line for name in COVERING for line in known()[name].splitlines()}
    return tuple(parsed for line in sorted(lines) if (parsed := parse(line)))


def parse(line: str) -> tuple[Lane, str, tuple[str, ...]] | None:
    """Return lane, name and buffers of a line; None if it describes no operation."""
    head, *parts = line.split(" | ")
    lane, _, name = head.partition(" ")
    if lane not in set(Lane):
        return None
    touched = [part.partition(" ")[2] for part in parts if not part.startswith("after ")]
    accesses = [each for part in touched for each in re.split(r"(?<=\]), ", part)]
    accesses = [each.partition(" in ")[0] for each in accesses]  # not the place's other name
    return Lane(lane), name, tuple(re.sub(r"\[\d*:?\d*\]$", "", each) for each in accesses)


def within(name: str, bases: Collection[str]) -> str:
    """Return the longest of the bases that the name begins with; "" if there is none."""
    fitting = [base for base in bases if re.match(re.escape(base) + r"($|[ \[#])", name)]
    return max(fitting, key=len, default="")
