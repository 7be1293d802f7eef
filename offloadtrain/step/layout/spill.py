"""The state that a save copies, so that the next updates need not wait for its writing.

[Note: Spill]
A save writes buckets in the order of the updates that wait for them, so the last update waits
longest. The *spill* is host memory for the end of that order: the last bytes of state that it
holds. A save copies them into it on the host lane, behind the updates so far, and writes them from
there. The next updates wait for the other writes only, and the last of these ends earlier by the
time that the disk needs for the spill. Which bytes these are follows from sizes alone: a copy at
memory's speed costs less than a choice by how far the disk has come, and one program stands for
every speed of the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

SPILL_BLOCK = 4096
"""Bytes: the unit in which state is cut, a multiple of what disks write without a copy."""


class SpillPart(NamedTuple):
    """The end of one field of a bucket's state.

    Attributes:
        field: its number.
        lo, hi: the values that are copied; `hi` is the field's end.
        offset: the place of the first one in the bucket's spill, in values.
        blocks: of `SPILL_BLOCK`, the room that they take.
    """

    field: int
    lo: int
    hi: int
    offset: int
    blocks: int


Fields = Sequence[tuple[int, int]]
"""(values, bytes of a value) of each field of a bucket."""


def spill(buckets: Iterable[tuple[str, Fields]], limit: int) -> Mapping[str, Sequence[SpillPart]]:
    """Return the bucket's name → the parts of it that are copied.

    Args:
        buckets: in the order in which they are written.
        limit: bytes that the parts of all buckets may take.
    """
    room, spilled = limit // SPILL_BLOCK, {}
    for name, fields in reversed(list(buckets)):
        parts, used = [], 0
        # The last blocks of its fields, the last field first.
        for number, (numel, size) in reversed(list(enumerate(fields))):
            of_field = -(-numel * size // SPILL_BLOCK)
            blocks = min(of_field, room - used)
            if blocks:
                lo = (of_field - blocks) * SPILL_BLOCK // size
                parts.append(SpillPart(number, lo, numel, used * SPILL_BLOCK // size, blocks))
                used += blocks
        if parts:
            spilled[name] = parts[::-1]
            room -= used
    return spilled
