"""Slots and who is in them: loads when they are due, evictions that nobody minds, errors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.step.layout.buffer_table import buffer_table
from offloadtrain.step.layout.step_spec import StepSpec
from offloadtrain.step.program.operations import Dependencies, Enter, Kind, Leave, Operations, Wait
from offloadtrain.step.program.places import BucketRefs
from offloadtrain.step.program.program import Program
from offloadtrain.step.program.streaming import StreamError, Streaming
from offloadtrain.step.proof.drive import steps
from tests import levels
from tests.step.specs import UPDATES, by_step, chain, launches


class Slots:
    """A streaming, and what its operations say of who is where."""

    def __init__(self, spec: StepSpec) -> None:
        table = buffer_table(spec)
        buckets = {
            b.name: [BucketRefs(x, spec, table, 0) for x in b.all_buckets] for b in spec.blocks
        }
        self.order = Dependencies()
        self.streaming = Streaming(spec, table, self.order, buckets)
        self.at: dict[str, int] = {}

    def use(self, block: str, pinned: Collection[str] = ()) -> list[str]:
        self.streaming.use(block, pinned)
        return self.moves()

    def begin(self, pinned: Collection[str] = ()) -> list[str]:
        self.streaming.restart(pinned)
        return self.moves()

    def one_pass(self, blocks: Sequence[str]) -> list[str]:
        result = self.begin()
        for name in blocks:
            result += self.use(name)
        return result

    def moves(self) -> list[str]:
        """+ who enters, - who leaves."""
        result = []
        for op in self.order.take():
            if isinstance(op, Enter):
                assert op.slot not in self.at.values() and op.block not in self.at
                self.at[op.block] = op.slot
                result.append(f"+{op.block}")
            elif isinstance(op, Leave):
                del self.at[op.block]
                result.append(f"-{op.block}")
        assert sorted(self.at) == sorted(self.streaming.resident)
        return result


def streamed(blocks: int, slots: int, ranks: int = 1, **keys: Any) -> StepSpec:
    return chain(blocks, "exact", ranks, working="host", device_slots=slots, **keys)


def waits(operations: Operations) -> list[tuple[str, str]]:
    return [(op.lane.value, op.event.lane.value) for op in operations if isinstance(op, Wait)]


# ---- who is where


@levels.examples(200)
@given(
    blocks=st.integers(1, 5),
    slots=st.integers(1, 4),
    events=st.lists(
        st.tuples(st.sampled_from("uuuuupd"), st.integers(0, 4), st.sets(st.integers(0, 4))),
        max_size=25,
    ),
)
def test_whoever_is_used_is_there_and_whoever_is_pinned_stays(
    blocks: int, slots: int, events: list[tuple[str, int, set[int]]]
) -> None:
    result = Slots(streamed(blocks, slots))
    count = min(slots, blocks)
    for kind, number, pins in events:
        name = f"b{number % blocks}"
        pinned = sorted({f"b{pin % blocks}" for pin in pins} & set(result.at))
        if kind == "d":
            result.streaming.drop(name)
            result.moves()
            assert name not in result.at
        elif kind == "p":
            result.begin(pinned)
            assert set(pinned) <= set(result.at)
        elif name not in result.at and len(pinned) == count:
            before = dict(result.at)
            with pytest.raises(StreamError):
                result.use(name, pinned)
            assert result.moves() == [] and result.at == before
        else:
            result.use(name, pinned)
            assert {name, *pinned} <= set(result.at)
        assert len(result.at) <= count and set(result.at.values()) <= set(range(count))


# ---- errors


def test_no_slot_left_says_who_has_them_and_what_to_set() -> None:
    slots = Slots(streamed(3, 2))
    slots.one_pass(["b1", "b0"])
    with pytest.raises(StreamError) as error:
        slots.use("b2", pinned=["b0", "b1"])
    assert str(error.value) == (
        "'b2' is needed while 'b1' and 'b0' are in use, and there are 2 device slots for streamed "
        "blocks: set device_slots = 3"
    )
    enough = Slots(streamed(3, 3))  # as it says
    enough.one_pass(["b1", "b0"])
    enough.use("b2", pinned=["b0", "b1"])
    assert enough.streaming.resident == ["b1", "b0", "b2"]


# ---- the order between loads and uses


@levels.each("ranks", [1, 2])
def test_a_use_waits_for_the_load_and_for_the_shards_of_others(ranks: int) -> None:
    slots = Slots(streamed(2, 2, ranks))
    slots.streaming.use("b0", ())
    operations = slots.order.take()
    assert waits(operations)[-1] == ("compute", "load" if ranks == 1 else "comm")
    assert len(launches(operations, Kind.ALL_GATHER)) == (ranks > 1)


# ---- in usual steps


@levels.each("mode", UPDATES)
@levels.each("slots", [1, 2, 3, 5])
def test_a_step_loads_as_little_as_it_can(slots: int, mode: str) -> None:
    """Once each for the forward, since all have changed, and again for the backward but for those
    that are still there: as many as there are slots."""
    for blocks in (1, 2, 4):
        spec = chain(blocks, mode, working="host", device_slots=slots)
        third = by_step(steps(Program(spec), 4))[2]
        assert len(launches(third, Kind.LOAD)) == 2 * blocks - min(slots, blocks)
