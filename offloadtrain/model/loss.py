"""Cross-entropy in fp32, a piece at a time: of logits, or of hidden states and the head's weight.

`torch.nn.functional.cross_entropy` on `logits.float()` saves two fp32 copies of the logits for
backward: 8 GiB with 8192 tokens and a vocabulary of 128256. This module saves only the original
logits for backward, which recomputes the softmax, and makes fp32 copies of only a few rows at a
time.

[Note: Parts of the vocabulary]
Logits of 8192 tokens over 128256 classes take 2 GiB in 16 bits, and their gradient takes the same.
`linear_cross_entropy` never stores all of them. Forward computes the logits of a part of the
classes, adds them to a running logsumexp and frees them. Backward computes them again, at the cost
of one more product of the head. The parts divide the classes and not the tokens. Therefore each row
of the head's weight gets its gradient from one product over all tokens, as without parts, and only
the gradient of the hidden states is summed over parts, in fp32. The loss scale reaches every
product, because backward computes the gradients.

[Note: Pieces in a trace]
Fake tensors of a trace are on the CPU. They may stand for tensors of another device, where pieces
have a different size. A trace also need not run every piece: all pieces except the last do the same
work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from offloadtrain.config.loss_parts import classes_of_part
from offloadtrain.config.sections import IGNORED

Piece = TypeVar("Piece")

_stands_for_cpu: ContextVar[bool] = ContextVar("the CPU's tensors are the CPU's", default=True)


def pieces_of_cpu(tensor: Tensor) -> bool:
    """Return True if the loss of this tensor uses the piece size of a CPU."""
    return tensor.device.type == "cpu" and _stands_for_cpu.get()


@contextmanager
def cpu_stands_for(*, on_cpu: bool) -> Iterator[None]:
    """Treat the CPU tensors of this thread as tensors of another device, unless `on_cpu`."""
    token = _stands_for_cpu.set(on_cpu)
    try:
        yield
    finally:
        _stands_for_cpu.reset(token)


class Few(Protocol):
    """Replaces a loop over pieces. All pieces except the last have the same size."""

    def each(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        """Yield some of the pieces; the results of the skipped pieces would be freed after each
        piece."""

    def made(self, pieces: Sequence[Piece], make: Callable[[Piece], Tensor]) -> list[Tensor]:
        """Return a tensor for every piece."""


_few: ContextVar[Few | None] = ContextVar("every piece runs", default=None)


def each(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces of a loss; all pieces except the last have the same size."""
    few = _few.get()
    yield from pieces if few is None else few.each(list(pieces))


def made_of_each(pieces: Iterable[Piece], make: Callable[[Piece], Tensor]) -> list[Tensor]:
    """Apply `make` to the pieces of a loss. All pieces except the last have the same size."""
    few = _few.get()
    return [make(piece) for piece in pieces] if few is None else few.made(list(pieces), make)


@contextmanager
def few_stand_for_all(few: Few) -> Iterator[None]:
    """Let `few` choose the pieces that run in this thread."""
    token = _few.set(few)
    try:
        yield
    finally:
        _few.reset(token)


# Shape suffixes: N tokens, V vocab_size, R rows in work at a time.

_ROWS_BYTES_CPU = 4 * 1024**2  # fits in the cache, and the allocator reuses it
_ROWS_BYTES_DEVICE = 64 * 1024**2  # long enough to hide the launch of a kernel


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, divisor: float | None = None) -> Tensor:
    """Return the sum over N of logsumexp(logits) - logits[target] / divisor, an fp32 scalar.

    Args:
        logits_NV: any floating dtype; the gradient has the same dtype.
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


# Shape suffixes: N tokens, D width, V classes, P classes of one part.


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None = None,
    *,
    divisor: Tensor | float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of hidden · weightᵀ + bias, an fp32 scalar.

    Per token: logsumexp - (1 - s)·logit[target] - s·mean(logits) + z·logsumexp², with s the label
    smoothing (Szegedy et al. 2016) and z the weight of the z-loss (Chowdhery et al. 2022).

    Args:
        hidden_ND, weight_VD, bias_V: one floating dtype; logits are rounded to it, as in a linear
            layer, and everything else is fp32.
        targets_N: int64 class numbers in [0, V), or `IGNORED`.
        divisor: divides the sum over counted tokens. Default: the number of counted tokens, so that
            the loss is the mean, or 0 without counted tokens.
    """
    options = (divisor, label_smoothing, z_loss)
    loss = _LinearCrossEntropy.apply(hidden_ND, weight_VD, bias_V, targets_N, *options)  # type: ignore[no-untyped-call]
    return cast(Tensor, loss)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        divisor: Tensor | float | None,
        smoothing: float,
        z_loss: float,
    ) -> Tensor:
        counted_N = targets_N != IGNORED
        if divisor is None:
            divisor = counted_N.sum().clamp(min=1)
        sum_N = torch.full(targets_N.shape, float("-inf"), device=hidden_ND.device)
        right_N, all_N = torch.zeros_like(sum_N), torch.zeros_like(sum_N)
        for lo, hi in each(parts(hidden_ND, weight_VD)):
            logits_NP = _logits(hidden_ND, weight_VD, bias_V, lo, hi)
            sum_N = torch.logaddexp(sum_N, torch.logsumexp(logits_NP, 1))
            right_N += _at_targets(logits_NP, targets_N, lo)
            if smoothing:
                all_N += logits_NP.sum(1)
            del logits_NP  # before the logits of the next part exist
        losses_N = sum_N - (1 - smoothing) * right_N - smoothing / len(weight_VD) * all_N
        losses_N += z_loss * sum_N.square()
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, sum_N)
        ctx.options = (divisor, smoothing, z_loss)
        return losses_N.masked_fill_(~counted_N, 0.0).sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, sum_N = ctx.saved_tensors
        divisor, smoothing, z_loss = ctx.options
        scale_N = (grad_loss / divisor).expand(sum_N.shape).masked_fill(targets_N == IGNORED, 0.0)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if wants_hidden else None
        grad_VD = torch.empty_like(weight_VD) if wants_weight else None
        grad_V = torch.empty_like(bias_V) if wants_bias else None
        for lo, hi in each(parts(hidden_ND, weight_VD)):
            grad_NP = _logits(hidden_ND, weight_VD, bias_V, lo, hi).sub_(sum_N[:, None]).exp_()
            if z_loss:
                grad_NP *= (1 + 2 * z_loss * sum_N)[:, None]
            _subtract_targets(grad_NP, targets_N, lo, 1 - smoothing)
            if smoothing:
                grad_NP -= smoothing / len(weight_VD)
            grad_NP *= scale_N[:, None]
            if grad_V is not None:
                grad_V[lo:hi] = grad_NP.sum(0)
            rounded_NP = grad_NP.to(hidden_ND.dtype)
            if grad_VD is not None:
                torch.mm(rounded_NP.T, hidden_ND, out=grad_VD[lo:hi])
            if grad_ND is not None:
                grad_ND += rounded_NP @ weight_VD[lo:hi]
            del grad_NP, rounded_NP  # before the gradients of the next part exist
        grad_hidden = None if grad_ND is None else grad_ND.to(hidden_ND.dtype)
        return grad_hidden, grad_VD, grad_V, None, None, None, None


def parts(hidden_ND: Tensor, weight_VD: Tensor) -> Iterator[tuple[int, int]]:
    """Yield [lo, hi) of the classes of each part."""
    step = classes_of_part(len(hidden_ND), on_cpu=pieces_of_cpu(hidden_ND))
    for lo in range(0, len(weight_VD), step):
        yield lo, min(lo + step, len(weight_VD))


def _logits(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, lo: int, hi: int
) -> Tensor:
    """Return the logits of a part, (N, P), in fp32 after rounding to the dtype of the head."""
    bias_P = None if bias_V is None else bias_V[lo:hi]
    return torch.nn.functional.linear(hidden_ND, weight_VD[lo:hi], bias_P).float()


def _at_targets(logits_NP: Tensor, targets_N: Tensor, lo: int) -> Tensor:
    """Return the target logit of each token, 0 if the target is in another part."""
    columns_N = targets_N - lo
    here_N = (columns_N >= 0) & (columns_N < logits_NP.shape[1])
    logits_N1 = logits_NP.gather(1, columns_N.clamp(0, logits_NP.shape[1] - 1)[:, None])
    return logits_N1[:, 0].masked_fill(~here_N, 0.0)


def _subtract_targets(grad_NP: Tensor, targets_N: Tensor, lo: int, amount: float) -> None:
    """Subtract `amount` at the target of each token if the target is in this part."""
    columns_N = targets_N - lo
    here_N = (columns_N >= 0) & (columns_N < grad_NP.shape[1])
    columns_N1 = columns_N.clamp(0, grad_NP.shape[1] - 1)[:, None]
    grad_NP.scatter_add_(1, columns_N1, here_N[:, None].to(grad_NP.dtype) * -amount)
