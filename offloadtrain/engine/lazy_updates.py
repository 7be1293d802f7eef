"""Updates of only what has a gradient: experts that got tokens, rows that were looked up.

[Note: Lazy updates]
The parameters that `lazy_updates` names are updated as by LazyAdam and `torch.optim.SparseAdam`:
where the gradient of the step is all zero, weights and moments stay as they are, and nothing
decays. Bias correction counts the optimizer's steps. A parameter is looked at as a whole; one of
three dimensions is a stack of matrices, such as the experts of a layer, and each of them is looked
at by itself. Which are updated is known when the gradient is there, on the host lane, right before
the update: the operations of a step are the same, and only the kernel's reach depends on data. So
its calls are not captured at launch. What is left alone is still copied where an update would have
written it: to the second copy of speculation, and rounded to where new weights are uploaded from.
Among ranks a piece that the border of a shard cuts counts as two.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from torch import Tensor

from offloadtrain.engine.bucket import Bucket, Slot
from offloadtrain.engine.checks import ModelError
from offloadtrain.runtime import kernels
from offloadtrain.runtime.kernels import BLOCK, Layout

State = tuple[Tensor, ...]
Update = Callable[[State, Tensor, Tensor | None, Layout, State | None], object]
"""Updates state by a gradient; gets where rounded weights and new state go, as a rule does."""

_LOOKED_AT_FIRST = 4096
"""Elements: nearly all that has a gradient has one there."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is updated or not as one.

    Attributes:
        lo, end: its elements in the shard, from its start to that of the next piece.
        row: its row of a layout: offset, numel, id, first.
        lazily: it is left alone where its gradient is zero.
    """

    lo: int
    end: int
    row: tuple[int, int, int, int]
    lazily: bool


class LazyBucket:
    """The pieces of a bucket in this rank's shard."""

    def __init__(self, bucket: Bucket, named: Container[Slot]) -> None:
        rows = [
            (row, slot in named)
            for slot, whole in _rows(bucket)
            for row in (_cut(slot, whole) if slot in named else [whole])
        ]
        ends = [row[0] for row, _ in rows[1:]] + [bucket.shard_numel]
        starts = [0, *ends[:-1]]
        self._pieces = [
            _Piece(start, end, row, lazily)
            for start, end, (row, lazily) in zip(starts, ends, rows, strict=True)
        ]

    def update(
        self,
        update: Update,
        state: State,
        grad: Tensor,
        working: Tensor | None,
        out: State | None,
    ) -> None:
        """Update the pieces that have a gradient; copy the others where they would be written."""
        # Before anything is written: new weights may go where the gradient is.
        touched = [not one.lazily or _is_there(grad[one.lo : one.end]) for one in self._pieces]
        runs = groupby(zip(self._pieces, touched, strict=True), key=lambda pair: pair[1])
        for has_gradient, run in runs:
            pieces = [piece for piece, _ in run]
            lo, hi = pieces[0].lo, pieces[-1].end
            held = tuple(_views(state, grad.numel(), lo, hi))
            target = None if out is None else tuple(_views(out, grad.numel(), lo, hi))
            rounded = None if working is None else working[lo:hi]
            if has_gradient:
                update(held, grad[lo:hi], rounded, _layout_of(pieces), target)
                continue
            if target is not None:
                for source, copied in zip(held, target, strict=True):
                    kernels.copy(source, copied)
            if rounded is not None:
                kernels.cast(held[0], rounded)


def lazy_buckets(buckets: Iterable[Bucket], patterns: Sequence[str]) -> dict[str, LazyBucket]:
    """Return the pieces of each bucket whose shard has a parameter that is named.

    Raises:
        ModelError: a stack whose matrices are no whole blocks of state.
    """
    found = {}
    for bucket in buckets:
        held = [slot for slot in bucket.slots if bucket.piece(slot)[0] < bucket.piece(slot)[1]]
        named = [one for one in held if any(fnmatchcase(one.name, p) for p in patterns)]
        if named:
            found[bucket.name] = LazyBucket(bucket, named)
    return found


def _rows(bucket: Bucket) -> Iterator[tuple[Slot, tuple[int, int, int, int]]]:
    """Yield each parameter of the shard with its row of the layout."""
    slots = {slot.index: slot for slot in bucket.slots}
    yield from ((slots[row[2]], row) for row in bucket.layout.rows())


def _cut(slot: Slot, row: tuple[int, int, int, int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the rows of the matrices of a stack, as far as they are in the shard."""
    offset, numel, id, first = row
    each = slot.numel
    if len(slot.shape) == 3 and slot.stride[0] * slot.shape[0] == slot.numel:
        each //= slot.shape[0]
    if each % BLOCK and each < slot.numel:
        raise ModelError(
            f"lazy_updates names '{slot.name}' of {slot.shape[0]} matrices of {each} elements: "
            f"they must be multiples of {BLOCK}, which share one scale in narrow state"
        )
    at = first
    while at < first + numel:
        end = min((at // each + 1) * each, first + numel)
        yield offset + at - first, end - at, id, at
        at = end


def _is_there(grad: Tensor) -> bool:
    """Whether any element is not zero."""
    return bool(grad[:_LOOKED_AT_FIRST].any()) or bool(grad.any())


def _views(fields: Iterable[Tensor], numel: int, lo: int, hi: int) -> Iterator[Tensor]:
    """Yield the part of each field that elements [lo, hi) have; scales have one per block."""
    for field in fields:
        per = numel // field.numel()
        yield field[lo // per : -(-hi // per)]


def _layout_of(pieces: Sequence[_Piece]) -> Layout:
    """Return the layout of a run of pieces, from its start."""
    start = pieces[0].lo
    offsets, numels, ids, firsts = zip(*(piece.row for piece in pieces), strict=True)
    return Layout([offset - start for offset in offsets], numels, ids, firsts)
