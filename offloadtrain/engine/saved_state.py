"""The state of a rank as it lies in memory: flat buffers, and the parameters in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offloadtrain.engine.block import Block
from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.runtime.process_group import UNTRAINED
from offloadtrain.step.operations import Written

WORKING = "working"
"""Kind of the weights that forward uses, in update mode "delayed": older ones than the state's."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [lo, hi) of a parameter, in the order of its memory, in a flat buffer.

    Attributes:
        start, count: the values of the buffer that stand for them.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    lo: int
    hi: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class FlatState:
    """One flat buffer of a bucket: a field of its state, the weights that forward uses beside it,
    or those of frozen parameters.

    Attributes:
        kind: the field's name, `WORKING` or `UNTRAINED`.
        dtype: torch's name of it.
        numel: its values, padding included.
        pieces: in the order of the buffer.
    """

    bucket: str
    kind: str
    dtype: str
    numel: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class OwnState:
    """This rank's part of a parameter: elements [lo, hi).

    Attributes:
        stride: of the whole parameter.
        fields: field → (a view of its memory, elements that a value stands for).
    """

    stride: tuple[int, ...]
    lo: int
    hi: int
    fields: dict[str, tuple[Tensor, int]]


class StateWriter(Protocol):
    """Writes the state of a rank, a bucket at a time. It records failures and raises none: a
    checkpoint that fails does not end the run."""

    def write(self, bucket: str, parts: Sequence[tuple[Written, Tensor]]) -> None:
        """Write parts of the flat buffers of a bucket, whose `FlatState`s they number.

        Args:
            parts: each with a tensor that begins with its first value. A window of the file that
                begins in the part is written whole: the tensor goes on behind the part as far as
                the window does. The windows that begin in another part come with that one.
        """
        ...

    def finish(self) -> None:
        """All buckets were written."""
        ...


def whole(buffers: Iterable[Tensor]) -> list[tuple[Written, Tensor]]:
    """Return all of each buffer, as the parts that a `StateWriter` takes."""
    return [(Written(at, 0, flat.numel()), flat) for at, flat in enumerate(buffers)]


def flat_states(blocks: Iterable[Block], rank: int, *, in_use: bool) -> Iterator[FlatState]:
    """Yield the buffers of every bucket: of trained ones each field, of frozen ones the weights.

    Args:
        in_use: behind the fields, the weights that forward uses.
    """
    for block in blocks:
        for bucket in block.buckets:
            for field in bucket.format.fields(bucket.spec.moments):
                dtype = field.dtype or bucket.spec.dtype
                yield _flat(bucket, field.name, dtype, field.per, rank)
            if in_use:
                yield _flat(bucket, WORKING, bucket.spec.dtype, 1, rank)
        for bucket in block.frozen:
            yield _flat(bucket, UNTRAINED, bucket.spec.dtype, 1, rank)


def own_state(bucket: Bucket, slot: Slot) -> OwnState:
    """View this rank's part of a parameter. At rest only while the lanes are empty."""
    if bucket.state:
        pieces = zip(bucket.format.fields(bucket.spec.moments), bucket.state_of(slot), strict=True)
        fields = {field.name: (view, field.per) for field, view in pieces}
    else:
        fields = {UNTRAINED: (bucket.weights_of(slot), 1)}
    return OwnState(slot.stride, *bucket.piece(slot), fields)


def own_weights(bucket: Bucket, slot: Slot) -> OwnState:
    """View this rank's part of the weights that forward uses; see `own_state`."""
    fields = {WORKING: (bucket.weights_of(slot), 1)}
    return OwnState(slot.stride, *bucket.piece(slot), fields)


def _flat(bucket: Bucket, kind: str, dtype: str, per: int, rank: int) -> FlatState:
    pieces = []
    for slot in bucket.slots:
        lo, hi = bucket.piece(slot)
        # A parameter without elements is on every rank; the first one saves it.
        if lo < hi or (slot.numel == 0 and rank == 0):
            first = max(slot.offset + lo - bucket.lo, 0) if lo < hi else 0
            start, end = first // per, -(-(first + hi - lo) // per)
            pieces.append(Piece(slot.name, slot.shape, slot.stride, lo, hi, start, end - start))
    pieces.sort(key=lambda piece: piece.start)
    return FlatState(bucket.name, kind, dtype, -(-bucket.shard_numel // per), tuple(pieces))
