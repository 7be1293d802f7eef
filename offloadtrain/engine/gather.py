"""A bucket's gradients as flat pieces: what autograd delivered, in the order of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadtrain.engine.bucket import Slot
from offloadtrain.step.spec import ALIGN

Delivered = Sequence[tuple[Slot, Tensor]]
"""Parameters of a bucket, in its order, with the gradients that they received."""


def pieces(numel: int, most: int) -> list[tuple[int, int]]:
    """Ranges [lo, hi) of so many elements with at most `most` each; one where that is enough."""
    step = most // ALIGN * ALIGN
    return [(lo, min(lo + step, numel)) for lo in range(0, numel, step)] or [(0, 0)]


def fill(flat: Tensor, lo: int, delivered: Delivered) -> None:
    """Write elements [lo, lo + len(flat)) of a bucket's gradient, zero where there is none.

    Args:
        flat: device, (n,), working dtype.
    """
    hi, end = lo + flat.numel(), lo
    targets, sources = [], []
    with torch.no_grad():
        for slot, grad in delivered:
            first, last = max(lo, slot.offset), min(hi, slot.offset + slot.numel)
            if first >= last:
                continue
            if first > end:
                flat[end - lo : first - lo].zero_()
            target, whole = flat[first - lo : last - lo], last - first == slot.numel
            targets.append(slot.shaped(target) if whole else target)
            sources.append(grad if whole else _part(slot, grad, first, last))
            end = last
        if end < hi:
            flat[end - lo :].zero_()
        if targets:
            torch._foreach_copy_(targets, sources)


def _part(slot: Slot, grad: Tensor, first: int, last: int) -> Tensor:
    if grad.stride() == slot.stride:
        flat = torch.as_strided(grad, (slot.numel,), (1,), grad.storage_offset())
    else:
        flat = torch.empty(slot.numel, dtype=grad.dtype, device=grad.device)
        slot.shaped(flat).copy_(grad)
    return flat[first - slot.offset : last - slot.offset]
