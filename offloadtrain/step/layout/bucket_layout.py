"""The layout of parameters in a bucket, and its division among ranks."""

from __future__ import annotations

from collections.abc import Sequence

ALIGN = 128
"""Elements: every parameter starts on 256 bytes at 16 bit. Misalignment changes a GEMV's bits."""


def padded(sizes: Sequence[int], ranks: int = 1) -> int:
    """Return the elements of a bucket of parameters of these sizes, each aligned, and every shard
    too."""
    return _up(sum(_up(size, ALIGN) for size in sizes), ALIGN * ranks)


def placed(sizes: Sequence[int], ranks: int = 1) -> tuple[list[int], int]:
    """Lay out parameters of these sizes so that each lies in the shard of one rank.

    The largest parameters come first, each to the rank that has least: shards as even as that makes
    them. What is left of a shard is padding.

    Returns:
        The offset of each, and the elements of the bucket.
    """
    filled, where = [0] * ranks, {}
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        rank = filled.index(min(filled))
        where[number] = (rank, filled[rank])
        filled[rank] += _up(sizes[number], ALIGN)
    shard = max(filled)
    offsets = [where[number][0] * shard + where[number][1] for number in range(len(sizes))]
    return offsets, shard * ranks


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
