"""The entries of a step's spec: blocks, their buckets, and the layout of parameters and matrices.

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
"""In elements: at 16 bit every parameter starts on 256 bytes. Misalignment changes a GEMV's
bits."""


def padded(sizes: Sequence[int], ranks: int = 1) -> int:
    """Return the number of elements of a bucket of parameters of these sizes; each parameter and
    each shard is aligned."""
    return _up(sum(_up(size, ALIGN) for size in sizes), ALIGN * ranks)


def placed(sizes: Sequence[int], ranks: int = 1) -> tuple[list[int], int]:
    """Lay out parameters of these sizes so that each is in the shard of a single rank.

    The largest parameters are placed first, each on the rank with the fewest elements, which makes
    shards about even. The rest of a shard is padding.

    Returns:
        The offset of each parameter, and the number of elements of the bucket.
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
    """A matrix that an update needs in full.

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
        """Number of elements that its orthogonalization needs in addition: its Gram matrix, a
        polynomial of the Gram matrix, and the product of the polynomial with this matrix."""
        return self.numel + 2 * min(self.rows, self.columns) ** 2


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Parameters of one block with one working dtype and one set of hyperparameters.

    Attributes:
        numel: number of elements over all shards, including padding.
        params: number of elements without padding.
        dtype: torch's name of the working dtype.
        format: the format of the state.
        ranks: number of ranks that share the bucket.
        moments: names of the update rule's moments, the state in addition to the master weights.
        matrices: matrices, for a rule that needs them in full; each is in the shard of one rank.
        whole_tensors: the rule measures each tensor before it updates it; each is in the shard
            of one rank.
        state_tier: tier of the state.
        sums_on_device: microbatches are summed on the device if the state is updated on the host.
        gradient_on_disk: the gradient is in a file, and on the host only while it has a slot.
        experts: number of experts, which a step skips if unused: see `skipping.py`; 0: none.
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
        """Tier of the gradient and of the update."""
        return Tier.HOST if self.is_on_disk else self.state_tier

    @property
    def is_on_disk(self) -> bool:
        """True if the state is in a file, and on the host only while it has a slot."""
        return self.state_tier is Tier.DISK

    @property
    def shard_numel(self) -> int:
        """Number of elements of this rank's shard."""
        return self.numel // self.ranks

    @property
    def weight_bytes(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the working weights of all shards."""
        return self.numel * self.weight_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard of the working weights."""
        return self.shard_numel * self.weight_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes that a rank sends so that all sharing ranks have the full working weights."""
        return self.shard_bytes * (self.ranks - 1)

    @property
    def field_sizes(self) -> list[tuple[int, int]]:
        """(number of values, bytes per value) for each field of this rank's state."""
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
        again: the block was read before; a module that is tied to it reads it once more.
    """

    block: str
    again: bool = False

    @property
    def owner(self) -> str:
        """Owner name in the launches of its forward and backward."""
        return f"{self.block} (tied)" if self.again else self.block


@dataclass(frozen=True)
class BlockSpec:
    """Parameters that move together: those that one module's forward uses together.

    Attributes:
        buckets: trained buckets.
        frozen: frozen buckets, if the block may be streamed.
        repeated: one of several equal blocks that are used in sequence: it can be streamed.
        leaf: a module outside of lists without children: in ZeRO stage 3 it can be streamed.
        recomputed: its forward is recomputed in backward.
        then: earlier blocks that later modules read once more (tied weights).
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
        """All buckets that a forward of the block reads."""
        return self.buckets + self.frozen

    @cached_property
    def nbytes(self) -> int:
        """Device memory of the working weights; every bucket starts on 256 bytes."""
        return sum(bucket.nbytes for bucket in self.all_buckets)


def readings_of(blocks: Sequence[BlockSpec]) -> tuple[Reading, ...]:
    """Return the blocks that a forward reads, in order."""
    names = {block.name for block in blocks}  # some layers may be left out
    return tuple(
        reading
        for block in blocks
        for reading in (Reading(block.name), *(Reading(name, again=True) for name in block.then))
        if reading.block in names
    )
