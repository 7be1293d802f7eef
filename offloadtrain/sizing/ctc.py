"""`ctc_loss` over fake tensors, for which torch has no description: a size depends on values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offloadtrain.sizing.known_values import numbers_of

CTC = torch.ops.aten._ctc_loss.Tensor
CTC_BACKWARD = torch.ops.aten._ctc_loss_backward.Tensor


def ctc_loss(
    log_probs_TBC: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Return the losses, (B,), and the tensor that backward needs: a value per state of the
    alignment; a target of length L has 2 · L + 1 states. If the values of `lengths` are unknown,
    all targets have the largest possible length.

    Args:
        targets: (B, S), or all of them in a row.
        lengths: of the targets, (B,).
    """
    steps, samples, _classes = log_probs_TBC.shape
    known = numbers_of(lengths)
    longest = targets.shape[-1] if known is None else max(known)
    states = log_probs_TBC.new_empty(samples, steps, 2 * longest + 1)
    return log_probs_TBC.new_empty(samples), states


def ctc_loss_backward(_: Tensor, log_probs_TBC: Tensor, *__: Any, **___: Any) -> Tensor:
    """Return the gradient of `log_probs_TBC`."""
    return torch.empty_like(log_probs_TBC)
