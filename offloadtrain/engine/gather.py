"""A bucket's gradients, from where autograd left them, into a flat piece of staging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offloadtrain.engine.bucket import Slot

Delivered = Sequence[tuple[Slot, Tensor]]
"""Parameters of a bucket, in its order, with the gradients that they received."""


class Targets(NamedTuple):
    """The places of some parameters' gradients in one piece of staging.

    Attributes:
        views: a view of staging for each copy.
        sources: for each copy, the place of its gradient among those delivered, and of a part
            [first, last) of it; None for the whole.
        gaps: what no gradient is written to.
    """

    views: list[Tensor]
    sources: list[tuple[int, tuple[int, int] | None]]
    gaps: list[Tensor]


def targets_of(flat: Tensor, starts: Sequence[int], slots: Sequence[Slot]) -> Targets:
    """Make the views for gradients of `slots`, one rank's part after another.

    Args:
        flat: (ranks · n,) on the device, working dtype, or fp32 where ranks sum in fp32.
        starts: for each rank, the first of its n elements in the bucket.
    """
    targets, count = Targets([], [], []), flat.numel() // len(starts)
    for rank, lo in enumerate(starts):
        piece = flat[rank * count : (rank + 1) * count]
        # Elements [lo, hi) of the bucket; those before `end` have their views.
        hi, end = lo + piece.numel(), lo
        for number, slot in enumerate(slots):
            first, last = max(lo, slot.offset), min(hi, slot.offset + slot.numel)
            if first >= last:
                continue
            if first > end:
                targets.gaps.append(piece[end - lo : first - lo])
            view, is_complete = piece[first - lo : last - lo], last - first == slot.numel
            targets.views.append(slot.shaped(view) if is_complete else view)
            cut = None if is_complete else (first - slot.offset, last - slot.offset)
            targets.sources.append((number, cut))
            end = last
        if end < hi:
            targets.gaps.append(piece[end - lo :])
    return targets


def fill(targets: Targets, delivered: Delivered) -> None:
    """Copy the gradients to their places, and zeros between them."""
    sources = [
        delivered[number][1] if cut is None else flat_gradient(*delivered[number])[slice(*cut)]
        for number, cut in targets.sources
    ]
    with torch.no_grad():
        if targets.gaps:
            torch._foreach_zero_(targets.gaps)
        if sources:
            torch._foreach_copy_(targets.views, sources)


def flat_gradient(slot: Slot, grad: Tensor) -> Tensor:
    """Return a gradient as (numel,) in the order of the parameter's memory: a view where it has
    that order, otherwise a copy."""
    if grad.stride() == slot.stride:
        return torch.as_strided(grad, (slot.numel,), (1,), grad.storage_offset())
    flat = torch.empty(slot.numel, dtype=grad.dtype, device=grad.device)
    slot.shaped(flat).copy_(grad)
    return flat
