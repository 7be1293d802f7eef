"""The program has no race, no wait too many and no wrong value, whatever a user does."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import (
    Kind,
    Operations,
    Swap,
    Wait,
)
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.updates import Decision, SpeculationPolicy
from offloadtrain.step.proof.drive import steps
from offloadtrain.step.proof.prove import prove_operations
from tests import levels
from tests.step.specs import UPDATES, Case, cases, chain, launches, staging_of
from tests.step.user import ODD, User

STEPS = 3


# ---- any spec, any user


@levels.examples(100)
@given(case=cases())
def test_usual_steps_have_no_race(case: Case) -> None:
    assert prove_operations(case.spec, case.driven(STEPS), case.rank) == []


@levels.examples(250)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_whatever_a_user_does_has_no_race_and_the_right_values(case: Case, seed: int) -> None:
    with staging_of(case.staging):
        user = User(case.spec, case.rank, random.Random(seed))
        for _ in range(4):
            user.step()
            user.between()
        user.check_at_rest()
    assert prove_operations(case.spec, user.done, case.rank) == []


def test_each_odd_thing_is_tried() -> None:
    """In streamed blocks among ranks, and alone in those that stay."""
    tried: set[str] = set()
    for number in range(12):
        mode = sorted(UPDATES)[number % 4]
        streamed: dict[str, Any] = {"working": "host", "zero_stage": 3} if number % 8 < 4 else {}
        spec = chain(3, mode, 2 if streamed else 1, grad_accum_steps=1 + number % 2, **streamed)
        user = User(spec, 0, random.Random(number))
        for _ in range(8):
            user.step()
            user.between()
        tried |= user.tried
        assert prove_operations(spec, user.done) == []
    assert tried == set(ODD)


# ---- waits


def superfluous(spec: StepSpec, operations: Operations, begin: int = 0) -> list[str]:
    """Waits from there on that can be left out, one by one, without a race."""
    result = []
    for index, op in enumerate(operations[begin:], begin):
        if isinstance(op, Wait):
            without = operations[:index] + operations[index + 1 :]
            if not prove_operations(spec, without):
                result.append(f"{op.lane.value} for {op.event.lane.value}: {op}")
    return result


@pytest.mark.parametrize(
    ("mode", "working", "accum", "ranks"),
    levels.array([*UPDATES], ["device", "host"], [1, 2], [1, 2]),
)
def test_of_usual_steps_only_waits_for_code_that_may_be_there_are_not_needed(
    mode: str, working: str, accum: int, ranks: int
) -> None:
    stage = 3 if working == "host" and ranks > 1 else 0
    spec = chain(2, mode, ranks, working=working, grad_accum_steps=accum, zero_stage=stage)
    for why in superfluous(spec, steps(Program(spec), STEPS)):
        assert re.match(
            "h2d for compute: h2d .* overwrites what backward"
            "|load for compute: load .* overwrites what (use of|backward)",
            why,
        )


# ---- a step that is no usual one


def test_a_skipped_step_changes_nothing() -> None:
    for mode in ("exact", "speculative", "delayed"):
        program = Program(chain(2, mode))
        steps(program, 2)
        _gradients_of(program, step=3)
        program.norm()
        operations = program.norm_known(["b0", "b1"], Decision(3, skipped=True))
        assert not launches(operations, Kind.ADAM) and not [
            op for op in operations if isinstance(op, Swap)
        ]
        waited = launches(operations, Kind.WEIGHTS_UP)  # of the step before, in mode "delayed"
        assert bool(waited) == (mode == "delayed")


def test_a_wrong_guess_is_discarded_and_the_update_done_again() -> None:
    program = Program(chain(2, "speculative"))
    steps(program, 2)
    _gradients_of(program, step=3)
    program.norm()
    operations = program.norm_known(["b0", "b1"], Decision(3, coef=0.5))
    assert program.speculation.right is False and program.speculation.buckets == 2
    assert not [op for op in operations if isinstance(op, Swap)]
    updates = [op.update for op in launches(operations, Kind.ADAM)]
    assert [(u.grad_scale, u.out_of_place) for u in updates if u] == [(0.5, False)] * 2


def test_it_guesses_as_long_as_half_of_the_last_guesses_were_right() -> None:
    policy = SpeculationPolicy()
    assert policy.should_speculate()
    for _ in range(SpeculationPolicy.WINDOW):
        policy.add_outcome(False)
        assert not policy.should_speculate()
    assert policy.is_mostly_wrong()
    for right in range(1, SpeculationPolicy.WINDOW + 1):
        policy.add_outcome(True)  # the oldest wrong one is forgotten for it
        assert policy.should_speculate() == (2 * right >= SpeculationPolicy.WINDOW)
        assert policy.is_mostly_wrong() is not policy.should_speculate()


def test_a_bucket_without_a_gradient_is_zero_and_measured() -> None:
    program = Program(chain(2, sizes=(300, 200)))
    done = program.grads_ready("b1", {"b1.1": True}, last=True)
    done += program.norm()
    missing = ["b0.0", "b0.1", "b1.0"]
    assert [op.owner for op in launches(done, Kind.NO_GRADIENT)] == missing
    assert sorted(op.owner for op in launches(done, Kind.NORM)) == [*missing, "b1.1"]


def _gradients_of(program: Program, *, step: int, used: str | None = None) -> None:
    """A whole backward."""
    for item in reversed(program.spec.blocks):
        program.grads_ready(item.name, {bucket.name: True for bucket in item.buckets}, last=True)
        program.grads_complete(item.name, Decision(step, hyperparameters=used))
