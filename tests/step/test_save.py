"""A checkpoint is written beside the next steps: only the next update of a bucket waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from offloadtrain.step.drive import steps
from offloadtrain.step.operations import Kind, Lane, Launch, Operation, Operations, Wait
from offloadtrain.step.program import Program
from offloadtrain.step.prove import prove_operations
from offloadtrain.step.spec import StepSpec
from tests.step.specs import UPDATES, chain

PLACED: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": {"working": "host"},
    "state on the device": {"state_on": "device"},
    "narrow": {"state": "int8"},
    "microbatches": {"grad_accum_steps": 2},
}


CASES = pytest.mark.parametrize(
    ("update", "placed"),
    [
        (update, placed)
        for update in UPDATES
        for placed in PLACED
        if placed != "state on the device" or update in ("exact", "early")
    ],
)


def driven(spec: StepSpec, rank: int = 0) -> Operations:
    return steps(Program(spec, rank), 5, saved={2, 3})


def made(update: str, placed: str, ranks: int = 1, **options: Any) -> StepSpec:
    return chain(3, update, ranks, sizes=(300, 200), **PLACED[placed], **options)


@CASES
def test_a_save_has_no_race(update: str, placed: str) -> None:
    spec = made(update, placed)
    assert prove_operations(spec, driven(spec)) == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("update", UPDATES)
def test_a_save_among_ranks_has_no_race(update: str, stage: int) -> None:
    spec = made(update, "resident", 2, zero_stage=stage)
    for rank in (0, 1):
        assert prove_operations(spec, driven(spec, rank)) == []


@pytest.mark.parametrize("update", UPDATES)
def test_each_wait_of_a_save_is_needed(update: str) -> None:
    spec = made(update, "resident")
    operations = driven(spec)
    waits = [op for op in operations if isinstance(op, Wait) and _of_writes(op)]
    # In mode "delayed" the upload waits, over the weights that are written, and Adam for that.
    waiting = Lane.H2D if update == "delayed" else Lane.HOST
    assert {(op.lane, op.event.lane) for op in waits} == {
        (Lane.WRITE, Lane.HOST),
        (waiting, Lane.WRITE),
    }
    for left_out in waits:
        kept: list[Operation] = [op for op in operations if op is not left_out]
        assert {fault.kind for fault in prove_operations(spec, kept)} == {"race"}


def _of_writes(op: Wait) -> bool:
    return Lane.WRITE in (op.lane, op.event.lane)


@CASES
def test_only_the_update_of_a_bucket_waits_for_its_write(update: str, placed: str) -> None:
    spec = made(update, placed)
    # In mode "delayed" its upload waits, too, which replaces the weights that are written.
    uploads = (Kind.WEIGHTS_UP, Kind.PUBLISH) if update == "delayed" else ()
    kinds = (Kind.ADAM, *uploads)
    for op in driven(spec):
        if isinstance(op, Wait) and op.event.lane is Lane.WRITE:
            assert isinstance(op.who, Launch) and op.who.kind in kinds
            assert op.event.kind is Kind.WRITE and op.event.owner == op.who.owner


@pytest.mark.parametrize("update", UPDATES)
def test_writes_are_in_the_order_of_the_updates_that_wait_for_them(update: str) -> None:
    operations = driven(made(update, "resident"))
    launches = [op for op in operations if isinstance(op, Launch)]
    first = next(at for at, op in enumerate(launches) if op.kind is Kind.WRITE)
    written = [op.owner for op in launches if op.kind is Kind.WRITE][:6]
    updated = [op.owner for op in launches[first:] if op.kind is Kind.ADAM][:6]
    blocks = [owner.split(".")[0] for owner in written]
    assert blocks == [owner.split(".")[0] for owner in updated]
