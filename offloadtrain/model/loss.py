"""Cross-entropy in fp32 over logits of any floating dtype, a few rows at a time.

`torch.nn.functional.cross_entropy` on `logits.float()` holds two fp32 copies of the logits for
backward: with 8192 tokens and a vocabulary of 128256 that is 8 GiB. Here only the original logits
are saved for backward, which recomputes the softmax, and fp32 copies exist for a few rows at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from offloadtrain.config.data_options import IGNORED
from offloadtrain.model.piece_sizes import each, made_of_each, pieces_of_cpu

# Shape suffixes: N tokens, V vocab_size, R rows in work at a time.

_ROWS_BYTES_CPU = 4 * 1024**2  # fits in the cache, and the allocator reuses it
_ROWS_BYTES_DEVICE = 64 * 1024**2  # long enough to hide the launch of a kernel


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, divisor: float | None = None) -> Tensor:
    """Return the sum over N of logsumexp(logits) - logits[target] / divisor, an fp32 scalar.

    Args:
        logits_NV: any floating dtype; the gradient comes back in the same dtype.
        targets_N: int64 class numbers in [0, V); with a divisor also `IGNORED`.
        divisor: default: N, so that the loss is the mean, and no target may be `IGNORED`.
    """
    loss = _CrossEntropy.apply(logits_NV, targets_N, divisor)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, divisor: float | None) -> Tensor:
        ctx.save_for_backward(logits_NV, targets_N)
        ctx.divisor = divisor

        def sum_of(rows: slice) -> Tensor:
            return F.cross_entropy(logits_NV[rows].float(), targets_N[rows], reduction="sum")

        sums = made_of_each(_row_ranges(logits_NV), sum_of)
        return torch.stack(sums).sum() / (divisor or targets_N.numel())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        """d loss / d logits = (softmax(logits) - onehot(target)) / divisor, or 0."""
        logits_NV, targets_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        scale = grad_loss / (ctx.divisor or targets_N.numel())
        for rows in each(_row_ranges(logits_NV)):
            grad_RV = torch.softmax(logits_NV[rows], dim=1, dtype=torch.float32)
            every_row = torch.arange(grad_RV.shape[0], device=grad_RV.device)
            grad_RV[every_row, targets_N[rows].clamp(min=0)] -= 1.0
            if ctx.divisor is not None:
                grad_RV.masked_fill_((targets_N[rows] == IGNORED)[:, None], 0.0)
            grad_NV[rows] = grad_RV.mul_(scale)
            del grad_RV  # before the next chunk's logits are widened
        return grad_NV, None, None


def _row_ranges(logits_NV: Tensor) -> Iterator[slice]:
    num_rows, vocab_size = logits_NV.shape
    rows_bytes = _ROWS_BYTES_CPU if pieces_of_cpu(logits_NV) else _ROWS_BYTES_DEVICE
    step = max(1, rows_bytes // (4 * vocab_size))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
