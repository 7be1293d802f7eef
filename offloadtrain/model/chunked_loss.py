"""The head's product and its cross-entropy together, a part of the vocabulary at a time.

[Note: Parts of the vocabulary]
Logits of 8192 tokens over 128256 classes are 2 GiB in 16 bits, and their gradient as much again.
Here they never exist as a whole. Forward makes the logits of a part of the classes, adds them to a
running logsumexp and drops them; backward makes them a second time: one more product of the head
buys both. Parts of the classes, not of the tokens: each row of the head's weight then gets its
gradient from one product over all tokens, as it does without parts, and only the gradient of the
hidden states is summed over parts, in fp32. The loss scale reaches every product, since gradients
are made in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from offloadtrain.config.data_options import IGNORED
from offloadtrain.config.loss_parts import classes_of_part
from offloadtrain.model.piece_sizes import each, pieces_of_cpu

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
        hidden_ND, weight_VD, bias_V: one floating dtype; logits are rounded to it, as a linear
            layer's are, and everything else is fp32.
        targets_N: int64 class numbers in [0, V), or `IGNORED`.
        divisor: of the sum over counted tokens. Default: their number, so that the loss is their
            mean; without any, 0.
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
            del logits_NP  # before the next part's are made
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
            del grad_NP, rounded_NP  # before the next part's are made
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
    """Return a part's logits (N, P), fp32, rounded to the dtype of the head before."""
    bias_P = None if bias_V is None else bias_V[lo:hi]
    return torch.nn.functional.linear(hidden_ND, weight_VD[lo:hi], bias_P).float()


def _at_targets(logits_NP: Tensor, targets_N: Tensor, lo: int) -> Tensor:
    """Return each token's logit of its target, 0 where another part has it."""
    columns_N = targets_N - lo
    here_N = (columns_N >= 0) & (columns_N < logits_NP.shape[1])
    logits_N1 = logits_NP.gather(1, columns_N.clamp(0, logits_NP.shape[1] - 1)[:, None])
    return logits_N1[:, 0].masked_fill(~here_N, 0.0)


def _subtract_targets(grad_NP: Tensor, targets_N: Tensor, lo: int, amount: float) -> None:
    """Subtract `amount` at each token's target, where this part has it."""
    columns_N = targets_N - lo
    here_N = (columns_N >= 0) & (columns_N < grad_NP.shape[1])
    columns_N1 = columns_N.clamp(0, grad_NP.shape[1] - 1)[:, None]
    grad_NP.scatter_add_(1, columns_N1, here_N[:, None].to(grad_NP.dtype) * -amount)
