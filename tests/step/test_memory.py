"""What a program touches is what was asked for; and the rules that decide on it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.config.errors import DeviceMemoryError, HostMemoryError
from offloadtrain.config.offload import OffloadConfig
from offloadtrain.step.layout import buffer_table
from offloadtrain.step.layout.block_spec import ALIGN, padded, placed
from offloadtrain.step.layout.buffer_table import arena_rows, device_owners
from offloadtrain.step.layout.buffers import BufferTable, span_bytes
from offloadtrain.step.layout.formats import ITEMSIZE
from offloadtrain.step.layout.placement import HEADROOM, check_host_limit, with_second_copies
from offloadtrain.step.layout.step_spec import LAYER_SLOTS_MOST, STAGING_SLOTS_MOST, StepSpec
from offloadtrain.step.program.operations import Launch, Operations, Ref, Undefined
from tests import levels
from tests.step.specs import Case, block, cases, chain, laid_out, staging_of
from tests.step.user import User


def refs(operations: Operations) -> set[Ref]:
    result: set[Ref] = set()
    for op in operations:
        if isinstance(op, Launch):
            result |= {*op.reads, *op.writes}
        elif isinstance(op, Undefined):
            result.add(op.ref)
    return result


def check(table: BufferTable, ref: Ref) -> None:
    """A ref is within its row, and a row that lies in another one is within that."""
    row = table.rows[ref.key]
    assert ref.hi * ITEMSIZE[ref.dtype] <= row.nbytes
    if isinstance(ref.key.bucket, str) and row.dtype != "uint8":
        assert ref.dtype == row.dtype
    if row.within is not None:
        parent, offset = row.within
        assert offset % ITEMSIZE[row.dtype] == 0
        assert offset + row.nbytes <= table.rows[parent].nbytes


@levels.examples(150)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_nothing_is_touched_that_was_not_asked_for(case: Case, seed: int) -> None:
    with staging_of(case.staging):
        user = User(case.spec, case.rank, random.Random(seed))
        for _ in range(3):
            user.step()
            user.between()
        table = buffer_table.buffer_table(case.spec)
        for ref in refs(user.done + case.driven(2, saved={1})):
            check(table, ref)


@levels.examples(150)
@given(case=cases())
def test_nothing_is_asked_for_that_is_not_touched(case: Case) -> None:
    """Of what belongs to a bucket; by usual steps."""
    with staging_of(case.staging):
        done = User(case.spec, case.rank, random.Random(0), always=()).done
        done += case.driven(4 + case.spec.config.warmup_steps, saved={2})
        touched = {ref.key for ref in refs(done)}
        table = buffer_table.buffer_table(case.spec)
        names = case.spec.block_of
        for key, row in table.rows.items():
            if key.bucket in names and row.within is None:
                assert key in touched


@levels.examples(150)
@given(case=cases())
def test_pieces_cover_a_shard_and_fit_a_slot(case: Case) -> None:
    spec = case.spec
    with staging_of(case.staging):
        for bucket in spec.buckets:
            pieces = spec.pieces(bucket)
            assert [lo for lo, _ in pieces] == [0, *(hi for _, hi in pieces[:-1])]
            assert pieces[-1][1] == bucket.shard_numel
            for lo, hi in pieces:
                assert lo % ALIGN == 0 and lo < hi
                needed = (hi - lo) * spec.ranks * spec.reduced_bytes(bucket)
                assert needed <= spec.staging_bytes
        assert 2 <= spec.staging_slots <= LAYER_SLOTS_MOST


def test_slots_for_gathered_gradients_hold_a_layer() -> None:
    """And one piece of the layer before it. What is outside of the layers comes once: it waits."""
    config = OffloadConfig()

    def slots(layer: int, outside: int) -> int:
        blocks = [
            block("embedding", config, sizes=(outside,), repeated=False),
            *(block(f"layer {number}", config, sizes=(layer,)) for number in range(2)),
        ]
        with staging_of(64 << 10):  # a piece of 32,768 parameters in 16 bits
            return laid_out(blocks, config).staging_slots

    assert slots(layer=20 << 15, outside=1 << 15) == 21
    assert slots(layer=40 << 15, outside=1 << 15) == LAYER_SLOTS_MOST
    assert slots(layer=2 << 15, outside=20 << 15) == STAGING_SLOTS_MOST
    assert slots(layer=12 << 15, outside=20 << 15) == 13
    assert slots(layer=1 << 10, outside=1 << 10) == 2


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5), st.integers(1, 8))
def test_every_parameter_and_every_shard_is_aligned(sizes: list[int], ranks: int) -> None:
    numel = padded(sizes, ranks)
    assert numel % ranks == 0 and numel // ranks % ALIGN == 0
    assert sum(sizes) <= numel < sum(sizes) + ALIGN * (len(sizes) + ranks)


# ---- second copies


def speculative(**keys: Any) -> StepSpec:
    return replace(chain(4, "speculative", **keys), second_copies=frozenset())


def test_the_last_blocks_have_second_copies_as_far_as_the_limit_goes() -> None:
    item = span_bytes(arena_rows(speculative()))
    names = ["b3", "b2", "b1", "b0"]
    copied: list[set[str]] = []
    for limit in range(item, 3 * item, item // 16):
        spec = with_second_copies(speculative(host_memory_limit=limit), 0)
        result = set(spec.second_copies)
        assert result == set(names[: len(result)])
        assert span_bytes(arena_rows(spec)) <= limit
        if len(result) < 4:  # one more is one too many
            more = replace(spec, second_copies=frozenset(names[: len(result) + 1]))
            assert span_bytes(arena_rows(more)) > limit
        copied.append(result)
    assert copied[0] == set() and copied[-1] == set(names)
    assert copied == sorted(copied, key=len)


def test_without_a_limit_the_machine_keeps_some_memory() -> None:
    spec = speculative()
    all_copied = replace(spec, second_copies=frozenset(b.name for b in spec.blocks))
    needed = span_bytes(arena_rows(all_copied))
    assert with_second_copies(spec, int(needed / HEADROOM) + 2) == all_copied
    assert with_second_copies(spec, needed) != all_copied
    exact = chain(4)
    assert with_second_copies(exact, 1 << 40) == exact


# ---- limits


def test_a_host_limit_that_holds_not_one_copy_says_what_is_largest() -> None:
    needed = span_bytes(arena_rows(chain(2)))
    check_host_limit(chain(2, host_memory_limit=needed))
    with pytest.raises(HostMemoryError) as error:
        check_host_limit(chain(2, host_memory_limit=needed - 1))
    assert "Largest: master weights 3.0 KiB, exp_avg 3.0 KiB, exp_avg_sq 3.0 KiB, gradients" in str(
        error.value
    )
    norms = span_bytes(arena_rows(chain(2, state_on="device")))
    assert norms < 8192
    check_host_limit(chain(2, state_on="device", host_memory_limit=norms))


def resident(spec: StepSpec) -> list[int]:
    """Numbers of the blocks that stay."""
    return [i for i, item in enumerate(spec.blocks) if item.name not in spec.streamed]


@pytest.mark.parametrize(
    ("requested", "expected"),
    [(0, []), (1, [3]), (2, [1, 4]), (3, [1, 3, 5]), (6, [0, 1, 2, 3, 4, 5]), (9, list(range(6)))],
)
def test_blocks_that_stay_are_spread_evenly(requested: int, expected: list[int]) -> None:
    assert resident(chain(6, working="host", resident_blocks=requested)) == expected


def test_as_many_blocks_stay_as_the_device_limit_has_room_for() -> None:
    config: dict[str, Any] = {"working": "host", "device_slots": 2}
    none = sum(device_owners(chain(6, **config)).values())
    size = chain(6).blocks[0].nbytes
    for stay in range(4):
        for spare in (0, size - 1):
            spec = chain(6, **config, device_memory_limit=none + stay * size + spare)
            assert len(resident(spec)) == stay
            assert sum(device_owners(spec).values()) <= none + stay * size
    all_stay = chain(6, **config, device_memory_limit=none + 4 * size)
    assert len(resident(all_stay)) == 6  # without slots
    with pytest.raises(DeviceMemoryError, match="Raise it, or set device_slots = 1"):
        chain(6, **config, device_memory_limit=none - 1)
    with pytest.raises(DeviceMemoryError, match=r"resident_blocks = 3, and .* has room for 2"):
        chain(6, **config, device_memory_limit=none + 2 * size, resident_blocks=3)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=9), st.integers(1, 8))
def test_whole_parameters_are_each_in_one_shard(sizes: list[int], ranks: int) -> None:
    offsets, numel = placed(sizes, ranks)
    shard, end = numel // ranks, 0
    assert numel % (ranks * ALIGN) == 0
    for offset, size in sorted(zip(offsets, sizes, strict=True)):
        assert offset % ALIGN == 0 and offset >= end
        end = offset + size
        assert offset // shard == (end - 1) // shard
    # At most one parameter more than an even share.
    aligned = [-(-size // ALIGN) * ALIGN for size in sizes]
    assert shard <= sum(aligned) // ranks + max(aligned)
    if ranks == 1:
        assert numel == padded(sizes)
