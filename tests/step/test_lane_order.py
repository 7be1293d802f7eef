"""What runs on each lane in a usual step, in which order, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from offloadtrain.step.program.operations import (
    HostWait,
    Kind,
    Lane,
    Launch,
    Record,
    Renew,
    Swap,
)
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.updates import Decision
from offloadtrain.step.proof.drive import steps
from tests import levels
from tests.step.specs import (
    PIECES,
    UPDATES,
    Case,
    by_step,
    cases,
    chain,
    lane,
    launches,
    staging_of,
)

STEPS = 3


@pytest.mark.parametrize(("mode", "ranks", "accum"), levels.array([*UPDATES], [1, 2], [1, 3]))
def test_the_thread_waits_for_the_norm_and_for_nothing_else(
    mode: str, ranks: int, accum: int
) -> None:
    operations = steps(Program(chain(2, mode, ranks, grad_accum_steps=accum)), STEPS)
    waits = [op.why for op in operations if isinstance(op, HostWait)]
    first = [] if ranks == 1 else ["the first gradients' sums"]
    assert waits == first + ["the gradient norm"] * STEPS


def test_the_thread_does_not_wait_for_updates_inside_backward() -> None:
    """The norm's event is recorded in front of them where they come last; among ranks, as a
    single one measures on compute, which updates nothing."""
    program = Program(chain(2, "early", ranks=2))
    done = steps(program, 1)
    done += program.grads_ready("b1", {"b1.0": True}, last=True)
    done += program.grads_ready("b0", {"b0.0": True}, last=True)
    done += program.grads_complete("b0", Decision(2))
    done += program.norm()
    event = [op.event for op in done if isinstance(op, HostWait)][-1]
    recorded = next(i for i, op in enumerate(done) if isinstance(op, Record) and op.event is event)
    updated = done.index(launches(done, Kind.ADAM)[-1])
    assert recorded < updated


def test_a_bucket_larger_than_staging_goes_down_in_pieces() -> None:
    with staging_of(PIECES):
        spec = chain(1, sizes=(1000,))
        result = by_step(steps(Program(spec), 1))[0]
        pieces = spec.pieces(spec.buckets[0])
    assert len(pieces) > 2
    for kind in (Kind.GATHER, Kind.GRAD_DOWN):
        assert [(op.lo, op.hi) for op in launches(result, kind)] == pieces


@levels.each("mode", ["early", "speculative"])
def test_adam_inside_backward_from_the_second_one_on(mode: str) -> None:
    spec = chain(3, mode)
    first, second, third, _ = by_step(steps(Program(spec), STEPS))
    assert not launches(first, Kind.ADAM)  # which shows what delivers
    forward = [f"b{number}.0" for number in range(3)]
    for step, before in ((second, forward), (third, [])):
        updated = [op.owner for op in launches(step, Kind.ADAM)]
        assert updated == before + forward[::-1]
        done = [op.name for op in step if isinstance(op, Launch)]
        assert done.index("adam b1.0", done.index("backward b2")) < done.index("backward b0")
        for op in launches(step, Kind.ADAM)[len(before) :]:
            assert op.update is not None
            assert op.update.out_of_place == (mode == "speculative")


@pytest.mark.parametrize(
    ("mode", "working", "accum"),
    levels.array(["exact", "early", "speculative"], ["device", "host"], [1, 2]),
)
def test_no_weights_change_between_forward_and_step(mode: str, working: str, accum: int) -> None:
    spec = chain(3, mode, working=working, grad_accum_steps=accum)
    for step in by_step(steps(Program(spec), STEPS)):
        begun = False
        for op in step:
            begun |= isinstance(op, Launch) and op.kind is Kind.FORWARD
            changes = isinstance(op, Launch) and op.kind in (Kind.WEIGHTS_UP, Kind.PUBLISH)
            assert not (begun and (changes or isinstance(op, Swap | Renew)))


@levels.examples(60)
@given(case=cases(most_blocks=3))
def test_collectives_have_one_order_on_all_ranks(case: Case) -> None:
    expected = lane(case.driven(2), Lane.COMM)
    for rank in range(case.spec.ranks):
        assert lane(replace(case, rank=rank).driven(2), Lane.COMM) == expected
