"""What runs on each lane in a usual step, in which order, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from offloadtrain.step.program.operations import (
    HostWait,
    Kind,
    Lane,
    Record,
)
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.updates import Decision
from offloadtrain.step.proof.drive import steps
from tests import levels
from tests.step.specs import (
    UPDATES,
    Case,
    cases,
    chain,
    lane,
    launches,
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


@levels.examples(60)
@given(case=cases(most_blocks=3))
def test_collectives_have_one_order_on_all_ranks(case: Case) -> None:
    expected = lane(case.driven(2), Lane.COMM)
    for rank in range(case.spec.ranks):
        assert lane(replace(case, rank=rank).driven(2), Lane.COMM) == expected
