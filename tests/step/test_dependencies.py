"""Waits follow from reads and writes: all that are needed, and none beside."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from offloadtrain.step.layout.buffers import Memory
from offloadtrain.step.program.operations import (
    Dependencies,
    Kind,
    Lane,
    Launch,
    Operations,
    Ref,
    Wait,
)
from offloadtrain.step.proof.prove import prove_operations
from tests import levels
from tests.step.specs import chain

SPEC = chain(1)
"""For the addresses of memory that is named by itself."""


def memory(name: str, copy: int = 0) -> Ref:
    return Ref(Memory.STATE, name, copy, 0, 4, "float32")


def launch(
    order: Dependencies,
    lane: Lane,
    name: str,
    reads: str = "",
    writes: str = "",
    late: bool = False,
) -> None:
    """`reads`, `writes`: a letter for each piece of memory."""
    op = Launch(Kind.ADD, lane, name, tuple(map(memory, reads)), tuple(map(memory, writes)))
    order.launch(op, late=late)


def waits(operations: Operations) -> list[tuple[str, str]]:
    """(who, for whom) in order."""
    return [(op.lane.value, op.event.lane.value) for op in operations if isinstance(op, Wait)]


def test_an_event_that_is_recorded_late_knows_what_its_lane_has_learned_since() -> None:
    order = Dependencies()
    launch(order, Lane.COMPUTE, "x", reads="b", writes="a")
    launch(order, Lane.D2H, "y", reads="b", late=True)
    launch(order, Lane.D2H, "y", writes="a")
    order.take()
    launch(order, Lane.HOST, "z", writes="b")
    assert waits(order.take()) == [("host", "d2h")]


def test_nobody_waits_for_what_was_before_every_lane_was_empty() -> None:
    order = Dependencies()
    for lane, writes in ((Lane.D2H, "a"), (Lane.HOST, "b"), (Lane.COMM, "c")):
        launch(order, lane, "x", writes=writes)
    order.synchronized()
    launch(order, Lane.COMPUTE, "y", reads="abc")
    assert waits(order.take()) == []
    launch(order, Lane.HOST, "z", writes="a")
    assert waits(order.take()) == [("host", "compute")]


def test_code_that_is_not_launched() -> None:
    order = Dependencies()
    launch(order, Lane.H2D, "x", writes="a")
    order.needs(Lane.COMPUTE, [memory("a")], "somebody")
    operations = order.take()
    assert waits(operations) == [("compute", "h2d")]
    assert [str(op) for op in operations if isinstance(op, Wait)] == [
        "somebody reads what add x writes"
    ]
    order.was_read([memory("a")], order.record(Lane.COMPUTE, "somebody"))
    launch(order, Lane.H2D, "y", writes="a")
    assert waits(order.take()) == [("h2d", "compute")]


def test_memory_that_becomes_other_memory() -> None:
    """A slot: its first writer waits for all who used it as something else."""
    order = Dependencies()
    launch(order, Lane.LOAD, "x", writes="a")
    launch(order, Lane.COMPUTE, "y", reads="a")
    launch(order, Lane.HOST, "y", reads="b")
    order.take()
    order.reuse(map(memory, "cd"), of=map(memory, "ab"))
    launch(order, Lane.LOAD, "z", writes="c")
    assert set(waits(order.take())) == {("load", "compute"), ("load", "host")}
    launch(order, Lane.LOAD, "z", writes="d")
    assert waits(order.take()) == []
    assert order.last_write(memory("a")) is None
    launch(order, Lane.COMM, "z", writes="a")  # somewhere else by now
    assert waits(order.take()) == []


def test_of_memory_that_becomes_other_memory_the_last_use_of_each_lane_counts() -> None:
    order = Dependencies()
    launch(order, Lane.COMPUTE, "x", reads="b")
    launch(order, Lane.COMPUTE, "y", reads="a")
    last = order.record(Lane.COMPUTE, "somebody")
    order.was_read([memory("b")], last)
    order.reuse([memory("c")], of=map(memory, "ba"))
    order.take()
    launch(order, Lane.LOAD, "z", writes="c")
    assert [op.event for op in order.take() if isinstance(op, Wait)] == [last]


Told = tuple[Lane, bool, str, str] | Lane
_NAMES = st.text("abcd", max_size=2)


@levels.examples(400)
@example(
    [
        # Recorded late, the first one would stand for all three.
        (Lane.D2H, True, "", "b"),
        (Lane.D2H, False, "", "a"),
        (Lane.D2H, False, "a", ""),
        (Lane.COMPUTE, False, "a", "ba"),
    ]
)
@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from(list(Lane)),
                st.sampled_from([False, False, True]),
                _NAMES,
                _NAMES,
            ),
            st.sampled_from(list(Lane)),
        ),
        max_size=14,
    )
)
def test_any_launches_have_no_race_and_no_wait_too_many(events: Sequence[Told]) -> None:
    """A lane alone stands for a wait of the thread for it."""
    order = Dependencies()
    for event in events:
        if isinstance(event, tuple):
            lane, late, reads, writes = event
            launch(order, lane, "x", reads, writes, late)
        else:
            order.host_wait(order.record(event, "somebody"), "the thread")
    operations = order.take()
    assert prove_operations(SPEC, operations) == []
    for index, op in enumerate(operations):
        if isinstance(op, Wait):
            assert prove_operations(SPEC, operations[:index] + operations[index + 1 :])
