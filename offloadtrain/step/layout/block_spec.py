"""What a step's spec lists: blocks, their buckets, the layout of parameters and matrices in them.

Sizes are of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from offloadtrain.step.layout.formats import ITEMSIZE, StateFormat
from offloadtrain.step.layout.tiers import Tier

ALIGN = 128
"""Elements: every parameter starts on 256 bytes at 16 bit. Misalignment changes a GEMV's bits."""


def padded(sizes: Sequence[int], ranks: int = 1) -> int:
    """Return the elements of a bucket of parameters of these sizes, each aligned, and every shard
    too."""
    return _up(sum(_up(size, ALIGN) for size in sizes), ALIGN * ranks)


def placed(sizes: Sequence[int], ranks: int = 1) -> tuple[list[int], int]:
    """Lay out parameters of these sizes so that each lies in the shard of one rank.

    The largest parameters come first, each to the rank that has least: shards as even as that makes
    them. The rest of a shard is padding.

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


class MatrixSpec(NamedTuple):
    """A matrix that is updated as a whole.

    Attributes:
        offset: its first element in the bucket.
    """

    offset: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def workspace_numel(self) -> int:
        """Elements that its orthogonalization needs in addition: its Gram matrix, a polynomial of
        that, and its product with this one."""
        return self.numel + 2 * min(self.rows, self.columns) ** 2


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Parameters of one block with one working dtype and one set of hyperparameters.

    Attributes:
        numel: elements of the whole, padding included.
        params: elements without padding.
        dtype: that of the working weights, by torch's name.
        format: the format of the state.
        ranks: the number of ranks that share it.
        moments: the state that its update rule keeps besides the master weights.
        matrices: of a rule that needs them whole; each in the shard of one rank.
        whole_tensors: of a rule that measures each tensor before it updates it; each in the shard
            of one rank.
        state_tier: where the state lies.
        sums_on_device: microbatches are summed on the device if the state is updated on the host.
        gradient_on_disk: the gradient is in a file, and on the host only while a slot holds it.
        experts: what a step skips one by one where it is unused; see `skipping.py`. 0: nothing.
    """

    name: str
    numel: int
    params: int
    dtype: str
    format: StateFormat
    ranks: int = 1
    moments: tuple[str, ...] = ()
    matrices: tuple[MatrixSpec, ...] = ()
    whole_tensors: bool = False
    state_tier: Tier = Tier.HOST
    sums_on_device: bool = False
    gradient_on_disk: bool = False
    experts: int = 0

    @property
    def update_tier(self) -> Tier:
        """Where the gradient lies and the state is updated."""
        return Tier.HOST if self.is_on_disk else self.state_tier

    @property
    def is_on_disk(self) -> bool:
        """The state is in a file, and on the host only while a slot holds it."""
        return self.state_tier is Tier.DISK

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's shard, and of each buffer of its state."""
        return self.numel // self.ranks

    @property
    def weight_bytes(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole's working weights."""
        return self.numel * self.weight_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard of the working weights."""
        return self.shard_numel * self.weight_bytes

    @property
    def gathered_bytes(self) -> int:
        """What a rank sends so that all that share it have the whole's working weights."""
        return self.shard_bytes * (self.ranks - 1)

    @property
    def field_sizes(self) -> list[tuple[int, int]]:
        """(values, bytes of a value) of each field of this rank's state."""
        return [
            (field.numel(self.shard_numel), ITEMSIZE[field.dtype or self.dtype])
            for field in self.format.fields(self.moments)
        ]

    def matrices_of(self, rank: int) -> list[MatrixSpec]:
        """Return the matrices in a rank's shard."""
        first = rank * self.shard_numel
        return [
            matrix for matrix in self.matrices if first <= matrix.offset < first + self.shard_numel
        ]


class Reading(NamedTuple):
    """A block's place in a forward.

    Attributes:
        again: the block has had its own place; a module that is tied to it reads it once more.
    """

    block: str
    again: bool = False

    @property
    def owner(self) -> str:
        """What the launches of its forward and backward work on."""
        return f"{self.block} (tied)" if self.again else self.block


@dataclass(frozen=True)
class BlockSpec:
    """Parameters that move together: those that one module's forward uses as one.

    Attributes:
        buckets: the trained ones.
        frozen: the frozen ones, where the block may be streamed.
        repeated: one of several alike that are used one after the other: it can be streamed.
        leaf: a module outside of lists that has no children: in ZeRO stage 3 it can be streamed.
        recomputed: its forward runs again in backward.
        then: blocks before it that modules after it read once more (tied weights).
    """

    name: str
    buckets: tuple[BucketSpec, ...]
    frozen: tuple[BucketSpec, ...] = ()
    repeated: bool = False
    leaf: bool = False
    recomputed: bool = False
    then: tuple[str, ...] = ()

    @property
    def all_buckets(self) -> tuple[BucketSpec, ...]:
        """All that a forward of the block reads."""
        return self.buckets + self.frozen

    @cached_property
    def nbytes(self) -> int:
        """Device memory of the working weights; every bucket starts on 256 bytes."""
        return sum(bucket.nbytes for bucket in self.all_buckets)


def readings_of(blocks: Sequence[BlockSpec]) -> tuple[Reading, ...]:
    """Return what a forward reads, in order."""
    names = {block.name for block in blocks}  # some layers may be left out
    return tuple(
        reading
        for block in blocks
        for reading in (Reading(block.name), *(Reading(name, again=True) for name in block.then))
        if reading.block in names
    )
