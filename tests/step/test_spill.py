"""A save copies the end of what it writes, as much as the spill holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offloadtrain.hardware.direct_io import BLOCK
from offloadtrain.step.layout.step_spec import SPILL_BLOCK, Fields, SpillPart, spill

FIELDS = st.lists(st.tuples(st.integers(0, 9000), st.sampled_from([1, 2, 4])), max_size=4)


def test_a_field_is_cut_where_disks_need_no_copy() -> None:
    assert SPILL_BLOCK % BLOCK == 0


def test_the_last_bytes_are_copied() -> None:
    buckets = [("first", [(2048, 4)]), ("last", [(4096, 4), (1000, 2), (1024, 4)])]
    result = spill(buckets, 5 * SPILL_BLOCK + 100)
    assert result == {
        "last": [
            SpillPart(0, 1024, 4096, 2048, 3),
            SpillPart(1, 0, 1000, 2048, 1),
            SpillPart(2, 0, 1024, 0, 1),
        ]
    }
    assert spill(buckets, 7 * SPILL_BLOCK)["first"] == [SpillPart(0, 1024, 2048, 0, 1)]
    assert spill(buckets, SPILL_BLOCK - 1) == {}


@given(st.lists(FIELDS, max_size=5), st.integers(0, 60 * SPILL_BLOCK))
def test_parts_lie_apart_and_use_the_room(buckets: list[Fields], limit: int) -> None:
    result = spill([(str(number), fields) for number, fields in enumerate(buckets)], limit)
    num_blocks, left = 0, 0
    for number, fields in enumerate(buckets):
        parts = {part.field: part for part in result.get(str(number), ())}
        for field, (numel, size) in enumerate(fields):
            part = parts.pop(field, None)
            # What is left of a field lies in front of what is copied, and nothing behind it is
            # left: the copied parts are the end of all that is written.
            rest = numel if part is None else part.lo
            assert not (rest and left < 0)
            if part is not None:
                assert part.hi == numel and part.lo * size % SPILL_BLOCK == 0
                assert 0 < (numel - part.lo) * size <= part.blocks * SPILL_BLOCK
                left = -1
            num_blocks += 0 if part is None else part.blocks
        assert not parts
        places = sorted((p.offset * fields[p.field][1], p) for p in result.get(str(number), ()))
        ends = [at + part.blocks * SPILL_BLOCK for at, part in places]
        assert [at for at, _ in places] == [0, *ends[:-1]][: len(places)]
    every = sum(-(-numel * size // SPILL_BLOCK) for fields in buckets for numel, size in fields)
    assert num_blocks == min(every, limit // SPILL_BLOCK)
