"""The kernels for GPU memory, in torch, for optimizer state that is not offloaded.

Adam is torch's own fused one, so that a run has the bits of `torch.optim.AdamW(fused=True)` on that
device. Work goes to the current stream and nothing waits. Sums of squares follow [Note: The norm]
within a segment; segments are added pairwise and not in order, which avoids a wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from offloadtrain.runtime.kernels.scalars import AdamScalars
from offloadtrain.runtime.kernels.state import Fp32State, Layout

_PIECE = 1 << 22
"""Elements widened at once; temporaries take up to 28 bytes each."""

_SEGMENT = 2048


def adam(state: Fp32State, grad: Tensor, working: Tensor | None, scalars: AdamScalars) -> None:
    """See `kernels.adam`; fp32 state, in place."""
    fused = torch._fused_adamw_ if scalars.decoupled else torch._fused_adam_
    step = torch.full((), float(scalars.step), device=grad.device)
    for lo, hi in _pieces(grad.numel()):
        g = grad[lo:hi].float() * scalars.grad_scale
        master, exp_avg, exp_avg_sq = (field[lo:hi] for field in state)
        fused(
            [master],
            [g],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step],
            lr=scalars.lr,
            beta1=scalars.beta1,
            beta2=scalars.beta2,
            weight_decay=scalars.weight_decay,
            eps=scalars.eps,
            amsgrad=False,
            maximize=False,
        )
        if working is not None:
            working[lo:hi].copy_(master)


def accumulate(total: Tensor, grad: Tensor, first: bool) -> None:
    """See `kernels.accumulate`."""
    if first:
        total.copy_(grad)
    else:
        total.add_(grad)


def sum_squares(flat: Tensor, layout: Layout, squares: Tensor) -> None:
    """See `kernels.sum_squares_many`."""
    for offset, numel, parameter, _ in layout.rows():
        squares[parameter] = _sum(flat[offset : offset + numel])


def _sum(values: Tensor) -> Tensor:
    """() fp64."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for lo, hi in _pieces(values.numel()):
        tree = values[lo:hi].double().square()
        tree = torch.nn.functional.pad(tree, (0, -tree.numel() % _SEGMENT)).view(-1, _SEGMENT)
        while tree.shape[1] > 1:
            half = tree.shape[1] // 2
            tree = tree[:, :half] + tree[:, half:]
        total = total + tree.sum()
    return total


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    for lo in range(0, numel, _PIECE):
        yield lo, min(lo + _PIECE, numel)
