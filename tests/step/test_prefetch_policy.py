"""Decisions over the order of use: pure functions, held to exhaustive search."""

from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.engine.gradients import ReduceOrder
from offloadtrain.step.program.streaming import (
    AccessOrder,
    victim,
)


def fewest_loads(uses: tuple[int, ...], slots: int) -> int:
    """By trying every eviction."""

    @cache
    def best(position: int, loaded: frozenset[int]) -> int:
        if position == len(uses):
            return 0
        block = uses[position]
        if block in loaded:
            return best(position + 1, loaded)
        if len(loaded) < slots:
            return 1 + best(position + 1, loaded | {block})
        return 1 + min(best(position + 1, loaded - {out} | {block}) for out in loaded)

    return best(0, frozenset())


def loads_by_victim(uses: tuple[int, ...], slots: int) -> int:
    loaded: set[int] = set()
    loads = 0
    for position, block in enumerate(uses):
        if block not in loaded:
            loads += 1
            if len(loaded) >= slots:
                loaded.discard(victim(loaded, uses[position + 1 :]) or 0)
            loaded.add(block)
    return loads


@given(st.lists(st.integers(1, 5), max_size=10).map(tuple), st.integers(1, 4))
def test_the_block_needed_last_goes_and_nothing_is_loaded_in_vain(
    uses: tuple[int, ...], slots: int
) -> None:
    assert loads_by_victim(uses, slots) == fewest_loads(uses, slots)


def pass_through(cursor: AccessOrder, uses: list[int]) -> bool:
    """Whether it left the order that was known before."""
    for block in uses:
        cursor.used(block)
    differs = cursor.differs
    cursor.restart()
    return differs


def test_the_order_is_what_the_last_pass_was_seen_to_be() -> None:
    cursor = AccessOrder()
    assert not pass_through(cursor, [0, 1, 2, 2, 1, 0])
    assert cursor.future == [0, 1, 2, 1, 0]
    cursor.used(0)
    cursor.used(0)
    assert cursor.future == [1, 2, 1, 0]
    cursor.used(2)  # 1 is left out by this pass
    assert cursor.future == [1, 0] and cursor.missed == 0


def test_an_evaluation_forgets_nothing_and_is_no_other_order() -> None:
    cursor = AccessOrder()
    assert not pass_through(cursor, [0, 1, 2])
    assert not pass_through(cursor, [0, 1, 2, 1, 0])  # longer than the one before
    assert not pass_through(cursor, [0, 1, 2])
    assert cursor.future == [0, 1, 2, 1, 0]


def test_another_order_is_told_and_taken_over() -> None:
    cursor = AccessOrder()
    pass_through(cursor, [0, 1, 2, 1, 0])
    assert pass_through(cursor, [2, 1, 0, 1, 2])
    assert cursor.future == [2, 1, 0, 1, 2]


@given(ready=st.permutations(range(6)), order=st.permutations(range(6)))
def test_turns_are_taken_in_the_agreed_order(ready: list[int], order: list[int]) -> None:
    turns = ReduceOrder(order)
    turns_taken: list[int] = []
    for number, block in enumerate(ready):
        turns_taken += turns.ready(block)
        assert turns_taken == order[: len(turns_taken)]
        assert turns.remaining == order[len(turns_taken) :]
        assert set(turns_taken) <= set(ready[: number + 1])
        waiting = order[len(turns_taken)] if len(turns_taken) < 6 else None
        assert waiting not in ready[: number + 1]  # nobody waits without a reason
    assert turns_taken == order and list(turns.ready_blocks) == ready
    turns.restart()
    assert turns.remaining == order and not turns.ready_blocks
