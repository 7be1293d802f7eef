"""What runs on each lane in a usual step, in which order, and who waits for whom."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given

from offloadtrain.step.program.modes import Decision
from offloadtrain.step.program.operations import (
    HostWait,
    Kind,
    Lane,
    Launch,
    Record,
    Renew,
    Swap,
    Wait,
)
from offloadtrain.step.program.program import Program
from offloadtrain.step.proof.drive import steps
from tests import levels
from tests.step.launched import by_step, lane, launches
from tests.step.specs import PIECES, UPDATES, Case, cases, chain, staging_of

STEPS = 3


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", UPDATES)
def test_the_thread_waits_for_the_norm_and_for_nothing_else(
    mode: str, ranks: int, accum: int
) -> None:
    found = steps(Program(chain(2, mode, ranks, grad_accum_steps=accum)), STEPS)
    waits = [op.why for op in found if isinstance(op, HostWait)]
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


def test_the_next_forward_waits_for_each_block_on_its_own() -> None:
    program = Program(chain(3))
    done = steps(program, 1)
    record_of = {}
    for before, op in itertools.pairwise(done):
        if isinstance(op, Record) and before in launches(done, Kind.WEIGHTS_UP):
            assert isinstance(before, Launch)
            record_of[before.owner] = op.event
    for number in range(3):
        found = program.use(f"b{number}")
        assert [op.event for op in found if isinstance(op, Wait)] == [record_of[f"b{number}.0"]]


@pytest.mark.parametrize("accum", [1, 2])
def test_exact_updates_in_forward_order_once_the_norm_is_known(accum: int) -> None:
    spec = chain(3, sizes=(300, 200), grad_accum_steps=accum)
    found = by_step(steps(Program(spec), STEPS))
    assert not launches(found[0], Kind.ADAM, Kind.WEIGHTS_UP)
    in_order = [f"b{block}.{bucket}" for block in range(3) for bucket in range(2)]
    for step in found[1:]:
        # Each upload is launched in front of the next Adam, and so runs beside it.
        way_up = launches(step, Kind.ADAM, Kind.WEIGHTS_UP)
        assert [op.name for op in way_up] == [
            f"{kind} {owner}" for owner in in_order for kind in ("adam", "h2d")
        ]


def test_gradients_leave_last_block_first_and_are_measured_as_they_come() -> None:
    found = by_step(steps(Program(chain(3)), 2))
    for step in found[:2]:
        names = [f"b{number}.0" for number in (2, 1, 0)]
        assert [op.owner for op in launches(step, Kind.GATHER)] == names
        assert lane(step, Lane.D2H) == [*(f"d2h {name}" for name in names), "norms down"]
        assert [op.owner for op in launches(step, Kind.NORM)] == names
        done = [op.name for op in step if isinstance(op, Launch)]
        assert done.index("norm b1.0") < done.index("backward b0")


def test_microbatches_are_summed_and_the_last_one_is_squared_meanwhile() -> None:
    found = by_step(steps(Program(chain(2, grad_accum_steps=3)), 1))[0]
    sums = launches(found, Kind.ACCUMULATE)
    assert [op.owner for op in sums] == ["b1.0", "b0.0"] * 3
    assert [op.first for op in sums] == [True] * 2 + [False] * 4
    squared = [any(ref.memory.value == "norms" for ref in op.writes) for op in sums]
    assert squared == [False] * 4 + [True] * 2
    assert not launches(found, Kind.NORM)


def test_a_bucket_larger_than_staging_goes_down_in_pieces() -> None:
    with staging_of(PIECES):
        spec = chain(1, sizes=(1000,))
        found = by_step(steps(Program(spec), 1))[0]
        pieces = spec.pieces(spec.buckets[0])
    assert len(pieces) > 2
    for kind in (Kind.GATHER, Kind.GRAD_DOWN):
        assert [(op.lo, op.hi) for op in launches(found, kind)] == pieces


@pytest.mark.parametrize("mode", ["early", "speculative"])
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


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("working", ["device", "host"])
@pytest.mark.parametrize("mode", ["exact", "early", "speculative"])
def test_no_weights_change_between_forward_and_step(mode: str, working: str, accum: int) -> None:
    spec = chain(3, mode, working=working, grad_accum_steps=accum)
    for step in by_step(steps(Program(spec), STEPS)):
        begun = False
        for op in step:
            begun |= isinstance(op, Launch) and op.kind is Kind.FORWARD
            changes = isinstance(op, Launch) and op.kind in (Kind.WEIGHTS_UP, Kind.PUBLISH)
            assert not (begun and (changes or isinstance(op, Swap | Renew)))


def test_delayed_weights_go_up_behind_their_backward_in_the_next_step() -> None:
    found = by_step(steps(Program(chain(3, "delayed", warmup_steps=1)), 4))
    assert not launches(found[0], Kind.ADAM)
    # The warm-up's own update, and no other: the second step's comes with the third.
    for number, expected in ((1, 1), (2, 1), (3, 1)):
        assert len(launches(found[number], Kind.ADAM)) == 3 * expected
    assert [op.owner for op in launches(found[1], Kind.ADAM)] == ["b0.0", "b1.0", "b2.0"]
    for step in found[2:4]:
        assert [op.owner for op in launches(step, Kind.ADAM)] == ["b2.0", "b1.0", "b0.0"]
        done = [op.name for op in step if isinstance(op, Launch)]
        for number in range(3):
            assert done.index(f"h2d b{number}.0") > done.index(f"backward b{number}")
        assert done.index("h2d b2.0") < done.index("backward b1")


def test_delayed_among_ranks_goes_up_at_the_next_step_in_forward_order() -> None:
    found = by_step(steps(Program(chain(3, "delayed", 2)), STEPS))
    assert not launches(found[1], Kind.WEIGHTS_UP)
    for step in found[2:]:
        way_up = [f"h2d b{number}.0" for number in range(3)]
        assert lane(step, Lane.H2D) == way_up
        assert [op.owner for op in launches(step, Kind.ALL_GATHER)] == ["b0.0", "b1.0", "b2.0"]


@levels.examples(60)
@given(case=cases(most_blocks=3))
def test_collectives_have_one_order_on_all_ranks(case: Case) -> None:
    expected = lane(case.driven(2), Lane.COMM)
    for rank in range(case.spec.ranks):
        assert lane(replace(case, rank=rank).driven(2), Lane.COMM) == expected
