"""The kernels for GPU memory, in torch, for optimizer state that is not offloaded.

Adam and SGD are torch's own fused ones, so that a run has the bits of
`torch.optim.AdamW(fused=True)` on that device; Lion and Adagrad are the operations of a loop over
one tensor. Work goes to the current stream and nothing waits. Sums of squares of a flat buffer
follow [Note: The norm] within a segment; segments are added pairwise and not in order, which avoids
a wait for the device. Those of gradients that lie apart are torch's, in one pass over them: in
fp64, over fixed chunks, the same in every run on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from offloadtrain.runtime.kernels.scalars import (
    AdagradScalars,
    AdamScalars,
    BlendScalars,
    LionScalars,
    MomentumScalars,
    Scalars,
    SgdScalars,
)
from offloadtrain.runtime.kernels.state import Fp32State, Layout, State

_PIECE = 1 << 22
"""Elements widened at once; temporaries take up to 28 bytes each."""

_SEGMENT = 2048


def update(state: Fp32State, grad: Tensor, working: Tensor | None, scalars: Scalars) -> None:
    """See `kernels.update`; fp32 state, in place."""
    step = _STEPS[type(scalars)]
    for lo, hi in _pieces(grad.numel()):
        g = grad[lo:hi].float() * scalars.grad_scale
        fields = [field[lo:hi] for field in state]
        step(scalars, g, *fields)
        if working is not None:
            working[lo:hi].copy_(fields[0])


def _adam(s: AdamScalars, g: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    fused = torch._fused_adamw_ if s.decoupled else torch._fused_adam_
    fused(
        [master],
        [g],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), float(s.step), dtype=torch.float32, device=g.device)],
        lr=s.lr,
        beta1=s.beta1,
        beta2=s.beta2,
        weight_decay=s.weight_decay,
        eps=s.eps,
        amsgrad=False,
        maximize=False,
    )


def _lion(s: LionScalars, g: Tensor, master: Tensor, exp_avg: Tensor) -> None:
    towards = (exp_avg * s.beta1).add_(g, alpha=1.0 - s.beta1)
    master.mul_(1.0 - s.lr * s.weight_decay).add_(towards.sign_(), alpha=-s.lr)
    exp_avg.mul_(s.beta2).add_(g, alpha=1.0 - s.beta2)


def _sgd(s: SgdScalars | MomentumScalars, g: Tensor, master: Tensor) -> None:
    torch._fused_sgd_(
        [master],
        [g],
        [],
        weight_decay=s.weight_decay,
        momentum=0.0,
        lr=s.lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _momentum(s: MomentumScalars, g: Tensor, master: Tensor, buffer: Tensor) -> None:
    if not s.momentum:  # turned off in a group: CUDA's kernel refuses a buffer then
        _sgd(s, g, master)
        return
    torch._fused_sgd_(
        [master],
        [g],
        [buffer],
        weight_decay=s.weight_decay,
        momentum=s.momentum,
        lr=s.lr,
        dampening=s.dampening,
        nesterov=s.nesterov,
        maximize=False,
        is_first_step=s.step == 1,
    )


def _adagrad(s: AdagradScalars, g: Tensor, master: Tensor, sum: Tensor) -> None:
    if s.weight_decay:
        g.add_(master, alpha=s.weight_decay)
    sum.addcmul_(g, g)
    rate = s.lr / (1.0 + (s.step - 1) * s.lr_decay)
    master.addcdiv_(g, sum.sqrt().add_(s.eps), value=-rate)


_STEPS: dict[type[Scalars], Callable[..., None]] = {
    AdamScalars: _adam,
    LionScalars: _lion,
    SgdScalars: _sgd,
    MomentumScalars: _momentum,
    AdagradScalars: _adagrad,
}


def blend(
    state: State, grad: Tensor, target: Tensor, layout: Layout, scalars: BlendScalars
) -> None:
    """See `kernels.blend`; fp32 state."""
    _, average = state
    for offset, numel, _, _ in layout.rows():
        # In ascending order, as `target` may lie in the front of the gradient's memory.
        for lo, hi in _pieces(numel):
            piece = slice(offset + lo, offset + hi)
            g = grad[piece].float() * scalars.grad_scale
            old = average[piece].lerp_(g, 1 - scalars.momentum)
            target[piece] = g.lerp_(old, scalars.momentum) if scalars.nesterov else old


def subtract(
    state: State,
    update: Tensor,
    working: Tensor | None,
    layout: Layout,
    decay: float,
    rates: Sequence[float],
) -> None:
    """See `kernels.subtract`; fp32 state."""
    master, _ = state
    end = update.numel()
    # Backwards, as larger elements of `working` may begin where `update` does.
    for (offset, numel, _, _), rate in reversed([*zip(layout.rows(), rates, strict=True)]):
        if working is not None:
            working[offset + numel : end].zero_()
        end = offset
        for lo, hi in reversed([*_pieces(numel)]):
            piece = slice(offset + lo, offset + hi)
            change = update[piece].float()
            new = master[piece].mul_(decay).add_(change, alpha=-rate)
            if working is not None:
                working[piece] = new
    if working is not None:
        working[:end].zero_()


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


def sum_squares_each(tensors: Sequence[tuple[int, Tensor]], squares: Tensor) -> None:
    """See `kernels.sum_squares_each`."""
    norms = torch._foreach_norm([flat for _, flat in tensors], 2, dtype=torch.float64)
    squares[_index(tuple(id for id, _ in tensors), squares.device)] = torch.stack(norms).square_()


@lru_cache(maxsize=4096)
def _index(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Keep the ids there: copying them in every step would stop the launching thread."""
    return torch.tensor(ids, device="cpu").to(device)


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
