"""The buffer table: every buffer of a step, by its contents and bucket.

The rows of the table are the only place that defines where a bucket's memory is. The engine
allocates them, its memory map is the table with tensors, the plan and the Ledger add them up, and
the program makes its refs of them. `buffer_table.py` makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import cached_property
from typing import NamedTuple

from offloadtrain.config.units import format_bytes
from offloadtrain.step.layout.formats import ITEMSIZE
from offloadtrain.step.layout.tiers import Tier

ARENA_ALIGN = 512
"""In bytes: disks read and write memory that starts on a multiple of it without a copy."""

STAGGER_BYTES = 4096 + ARENA_ALIGN
"""Bytes between neighbours in the host arena: streams at a distance of exactly a power of two map
to the same cache sets and make Adam up to three times slower."""


class Memory(StrEnum):
    """The kind of contents of a buffer."""

    __hash__ = str.__hash__  # Enum's is a Python function, called at every look-up

    WORKING = "working"
    """Device: a bucket's full weights; for a streamed block, in a slot."""
    DEVICE_SHARD = "device shard"
    """Device: this rank's shard of a bucket that is gathered for its use."""
    STAGING = "staging"
    """Device: a slot for gathered gradients; in ZeRO stage 1, separate memory for each piece."""
    ROUNDED = "rounded"
    """Device: a slot for sums in the dtype that is copied to the host."""
    MATRIX = "matrix"
    """Device: a matrix that is orthogonalized, with its workspace."""
    HOST_STAGING = "host staging"
    """Host: a slot for gradients that are added, and for weights that are uploaded without any
    further wait."""
    GRADIENT = "gradient"
    """Tier of the update: a bucket's gradient of the step, or the fp32 sum of its microbatches; for
    matrices, the bf16 input of the orthogonalization replaces it."""
    SUM = "gradient sum"
    """Device: the fp32 sum of the microbatches of a bucket whose state is on the host."""
    PENDING = "pending"
    """Tier of the update: new weights until their upload, if they wait longer than the gradient's
    memory is free."""
    SNAPSHOT = "snapshot"
    """Host: the weights of the present step, for loads; or the weights of a frozen bucket."""
    STATE = "state"
    """Host or device: the fields of a bucket's state, master weights first; in a host slot if the
    state is on the disk."""
    STATE_FILE = "state file"
    """Disk: the fields of a bucket's state."""
    GRADIENT_FILE = "gradient file"
    """Disk: a bucket's gradient of the step, or the sum of its microbatches so far; `GRADIENT` is
    a host slot then."""
    WEIGHT_FILE = "weight file"
    """Disk: the weights of a streamed bucket, if they are not in the state's file."""
    WEIGHT_SLOT = "weight slot"
    """Host: a slot for weights in transfer from the disk to the device."""
    NEW_WEIGHTS = "new weight slot"
    """Host: a slot for new weights in transfer to the disk."""
    SPILL = "checkpoint spill"
    """Host: copied state, until it is written into a checkpoint."""
    NORMS = "norms"
    """Host or device: the sum of squares of every parameter that was measured there; version 1 of
    the device's sums is their copy on the host."""
    USED = "used experts"
    """Device: a byte for each expert of a bucket, set if it got a gradient in this step."""
    ACTIVATION = "block input"
    """Device: a block's input; copy 0 as forward made it, copy 1 as it was fetched in backward."""
    HOST_ACTIVATION = "host block input"
    """Host: a buffer for a block's input, or for this rank's part of it."""
    KEPT_ACTIVATION = "kept block input"
    """Device: a buffer for this rank's part of a block's input."""


class WeightRoute(Enum):
    """The route of a bucket's new weights from the memory that the update writes to the memory that
    compute, or loads of a streamed bucket, read."""

    UPLOAD = auto()
    """Copied from the host to the device."""
    ON_DEVICE = auto()
    """Within the device: copied, unless the update writes them in place."""
    SNAPSHOT = auto()
    """Copied on the host, to the snapshot that loads read."""
    IN_PLACE = auto()
    """Loads read the memory that the update writes."""
    IN_TURN = auto()
    """Of two memories, loads switch to the one that the update writes."""
    FILE = auto()
    """Written to a file right after the update; then loads switch to it."""


class BufferKey(NamedTuple):
    """The key of a buffer.

    Attributes:
        bucket: name of its bucket; for a slot that buckets share, the index of the slot; for
            norms, the tier that measures; for a piece of a gradient with separate staging (ZeRO
            stage 1), the bucket and the piece's first element; for a buffer for block inputs, its
            index.
        version: index of the copy of the state, of the version of the weights, or of the sum
            of gradients. For a buffer in a slot, the index of the slot. 1 for the host's copy of
            the device's norms.
        field: for the state, index of the tensor.
    """

    bucket: str | int
    kind: Memory
    version: int = 0
    field: int = 0


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A row of the table: `numel` elements of `dtype`, by torch's name, on a tier.

    Attributes:
        owner: its name in the Ledger.
        name: its name in traces.
        is_weights: weights of a streamed block, which become the model's memory when the optimizer
            is closed.
        on_first_use: it is allocated when it is first used.
        within: for a part of another buffer, the key of that buffer and the offset in it, in
            bytes; such a row has no memory itself.
    """

    owner: str
    numel: int
    dtype: str
    tier: Tier = Tier.HOST
    name: str = ""
    is_weights: bool = False
    on_first_use: bool = False
    within: tuple[BufferKey, int] | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def span_bytes(self) -> int:
        """Bytes in the host arena, including the stagger that separates it from its neighbour."""
        return -(-self.nbytes // ARENA_ALIGN) * ARENA_ALIGN + STAGGER_BYTES


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Buffers of one kind whose number and sizes are known only in a forward.

    Attributes:
        limit: bytes that may be allocated on the tier, including a new buffer; None: no limit.
    """

    owner: str
    tier: Tier
    name: str
    limit: int | None = None

    def buffer(self, nbytes: int) -> BufferSpec:
        """Return the row of a buffer of this size."""
        return BufferSpec(self.owner, nbytes, "uint8", self.tier, self.name)


Rows = Mapping[BufferKey, BufferSpec]


@dataclass(frozen=True)
class BufferTable:
    """Every buffer of a step on one rank.

    Attributes:
        rows: in the order of allocation.
        pools: kind → buffers whose sizes are known only in a forward.
        sources: streamed bucket → the buffers that its loads read, one per version of the weights.
        staging: trained bucket → the kind of memory that its new weights are written to.
        weight_route: trained bucket → the route of its new weights from there.
    """

    rows: Rows
    pools: Mapping[Memory, PoolSpec]
    sources: Mapping[str, tuple[BufferKey, ...]]
    staging: Mapping[str, Memory]
    weight_route: Mapping[str, WeightRoute]

    def allocated(self, tier: Tier) -> dict[BufferKey, BufferSpec]:
        """Return the rows that are allocated on a tier before the first step."""
        return {key: row for key, row in self.rows.items() if row.tier is tier and not_late(row)}

    @cached_property
    def of_bucket(self) -> dict[str | int, dict[BufferKey, BufferSpec]]:
        """Bucket, or slot → its rows."""
        grouped: dict[str | int, dict[BufferKey, BufferSpec]] = {}
        for key, row in self.rows.items():
            grouped.setdefault(key.bucket, {})[key] = row
        return grouped

    def slots(self, kind: Memory) -> int:
        """Return the number of slots of a kind that buckets share."""
        return sum(key.kind is kind and isinstance(key.bucket, int) for key in self.rows)

    def place(self, key: BufferKey) -> tuple[BufferKey, int]:
        """Return the key of the memory that contains a buffer, and its offset there in bytes."""
        row = self.rows.get(key)
        return (key, 0) if row is None or row.within is None else row.within


def not_late(row: BufferSpec) -> bool:
    """Return True if a row is allocated before the first step."""
    return row.within is None and not row.on_first_use


def by_owner(rows: Iterable[BufferSpec]) -> dict[str, int]:
    """Return owner → bytes, in the order of their first rows."""
    owners: dict[str, int] = {}
    for row in rows:
        owners[row.owner] = owners.get(row.owner, 0) + row.nbytes
    return owners


def span_bytes(rows: Iterable[BufferSpec]) -> int:
    """Return the bytes of rows in the host arena."""
    return sum(row.span_bytes for row in rows)


def largest_owners(rows: Iterable[BufferSpec]) -> str:
    """Return the four largest owners in one line."""
    largest = sorted(by_owner(rows).items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{owner} {format_bytes(nbytes)}" for owner, nbytes in largest)
