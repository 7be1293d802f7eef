"""The state of a rank in memory: flat buffers, and the parameters in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.runtime.process_group import ALONE, UNTRAINED, Ranks
from offloadtrain.runtime.tensor_parts import PartError, Range, Share, is_divided
from offloadtrain.step.program.operations import Written

WORKING = "working"
"""Kind of the weights that forward uses; in update mode "delayed" they are older than the
state's."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of matrices: see [Note: Parts of matrices] in `runtime.tensor_parts`.

    Attributes:
        ranks: the ranks that hold the other parts. The first saves parameters that all hold in
            full.
        shares: share of this rank for every DTensor parameter.
    """

    ranks: Ranks = ALONE
    shares: Mapping[nn.Parameter, Share] = field(default_factory=dict)

    def share(self, slot: Slot) -> Share:
        """Return this rank's share of a parameter."""
        full_share = Share(slot.shape, slot.stride, (Range(0, 0, slot.numel),))
        return self.shares.get(slot.param, full_share)

    def saves(self, slot: Slot) -> bool:
        """Return True if this rank saves its share of a parameter."""
        return self.ranks.rank == 0 or is_divided(slot.param)

    def held(self, bucket: Bucket, slot: Slot) -> list[Range]:
        """Return the ranges of a parameter that are in this rank's shard of a bucket; a single
        range, which may be empty, if there is none."""
        lo, hi = bucket.piece(slot)
        ranges = [part.within(lo, hi) for part in self.share(slot).ranges]
        return [part for part in ranges if part.length] or ranges[:1]

    def check(self, bucket: Bucket, slot: Slot) -> None:
        """Raises PartError for a part of a matrix if a value of its state covers several elements,
        whose order depends on the mesh."""
        fields = bucket.format.fields(bucket.spec.moments)
        if self.share(slot).is_part and any(state_field.per > 1 for state_field in fields):
            raise PartError(
                f"state = '{bucket.format.name}' of '{slot.name}', a part of a matrix: its scales "
                "stand for blocks of elements, which another mesh orders differently, so that it "
                "could not read a checkpoint. Use state = 'fp32' or 'split16'"
            )


WHOLE = Parts()
"""No parameter is divided."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [lo, hi) of a parameter, in the order of its memory, in a flat buffer.

    Attributes:
        shape, stride: those of the full parameter.
        start, count: the values of the buffer for these elements.
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
    """A flat buffer of a bucket: a field of its state, the weights that forward uses,
    or frozen weights.

    Attributes:
        kind: the field's name, `WORKING` or `UNTRAINED`.
        dtype: torch's name of the dtype.
        numel: number of values, including padding.
        pieces: in the order of the buffer.
    """

    bucket: str
    kind: str
    dtype: str
    numel: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class OwnState:
    """A range of a parameter that this rank holds: elements [lo, hi).

    Attributes:
        stride: stride of the full parameter.
        fields: field → (a view of its memory, number of elements per value).
    """

    stride: tuple[int, ...]
    lo: int
    hi: int
    fields: dict[str, tuple[Tensor, int]]


class StateWriter(Protocol):
    """Writes the state of a rank, bucket by bucket. It records failures and does not raise: a
    failed checkpoint must not end the run."""

    def write(self, bucket: str, parts: Sequence[tuple[Written, Tensor]]) -> None:
        """Write parts of the flat buffers of a bucket; `Written` has the number of a `FlatState`.

        Args:
            parts: each with a tensor that starts with its first value. A window of the file that
                starts in the part is written completely: the tensor extends beyond the part to the
                end of the window. Windows that start in another part are written with that part.
        """

    def finish(self) -> None:
        """All buckets were written."""


def whole(buffers: Iterable[Tensor]) -> list[tuple[Written, Tensor]]:
    """Return all of each buffer, as the parts that a `StateWriter` takes."""
    return [(Written(at, 0, flat.numel()), flat) for at, flat in enumerate(buffers)]


def flat_states(
    buckets: Iterable[Bucket], rank: int, *, in_use: bool, parts: Parts = WHOLE
) -> Iterator[FlatState]:
    """Yield the buffers of every bucket: each field of trained buckets, the weights of frozen
    buckets.

    Args:
        in_use: also yield, after the fields, the weights that forward uses.

    Raises:
        PartError: a part of a matrix is in a format that only this mesh could read.
    """
    for bucket in buckets:
        if not bucket.is_trained:
            yield _flat(bucket, UNTRAINED, bucket.spec.dtype, 1, rank, parts)
            continue
        for state_field in bucket.format.fields(bucket.spec.moments):
            dtype = state_field.dtype or bucket.spec.dtype
            yield _flat(bucket, state_field.name, dtype, state_field.per, rank, parts)
        if in_use:
            yield _flat(bucket, WORKING, bucket.spec.dtype, 1, rank, parts)


def own_state(bucket: Bucket, slot: Slot, parts: Parts = WHOLE) -> list[OwnState]:
    """View this rank's share of a parameter. Complete only while the lanes are idle."""
    if bucket.state:
        pieces = zip(bucket.format.fields(bucket.spec.moments), bucket.state_of(slot), strict=True)
        fields = {state_field.name: (view, state_field.per) for state_field, view in pieces}
    else:
        fields = {UNTRAINED: (bucket.weights_of(slot), 1)}
    return _cut_into_ranges(bucket, slot, fields, parts)


def own_weights(bucket: Bucket, slot: Slot, parts: Parts = WHOLE) -> list[OwnState]:
    """View this rank's share of the weights that forward uses; see `own_state`."""
    return _cut_into_ranges(bucket, slot, {WORKING: (bucket.weights_of(slot), 1)}, parts)


def _cut_into_ranges(
    bucket: Bucket, slot: Slot, fields: Mapping[str, tuple[Tensor, int]], parts: Parts
) -> list[OwnState]:
    """Cut views of this rank's complete share of a parameter into its ranges."""
    (first, _), states = bucket.piece(slot), []
    stride = parts.share(slot).stride
    for part in parts.held(bucket, slot):
        lo, hi = part.lo - first, part.lo + part.length - first
        cut = {kind: (view[lo // per : -(-hi // per)], per) for kind, (view, per) in fields.items()}
        states.append(OwnState(stride, part.at, part.at + part.length, cut))
    return states


def _flat(bucket: Bucket, kind: str, dtype: str, per: int, rank: int, parts: Parts) -> FlatState:
    pieces = []
    for slot in filter(parts.saves, bucket.slots):
        parts.check(bucket, slot)
        share = parts.share(slot)
        for part in parts.held(bucket, slot):
            # A parameter without elements is on every rank; rank 0 saves it.
            if part.length or (slot.numel == 0 and rank == 0):
                first = slot.offset + part.lo - bucket.lo if part.length else 0
                start, end = first // per, -(-(first + part.length) // per)
                at = (part.at, part.at + part.length, start, end - start)
                pieces.append(Piece(slot.name, share.shape, share.stride, *at))
    pieces.sort(key=lambda piece: piece.start)
    return FlatState(bucket.name, kind, dtype, -(-bucket.shard_numel // per), tuple(pieces))
