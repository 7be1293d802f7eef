"""The kernels for GPU memory, in torch, for optimizer state that is not offloaded.

Adam and SGD are torch's fused kernels, so that a run has the bits of
`torch.optim.AdamW(fused=True)` on that device; Lion and Adagrad are the operations of a loop over
one tensor. Work is launched on the current stream without waits. Sums of squares of a flat buffer
follow [Note: The norm] within a segment; segments are added pairwise instead of in order, which
avoids a wait for the device. Sums of separate gradients are torch's, in one pass over them: in
fp64, over fixed chunks, equal in every run on one device.

Adam over narrow state is a single kernel for all adjacent parameters of a bucket, which torch
compiles at its first run; a small kernel before it computes the key of each block's random bits.
torch operations that decode and encode would move 500 to 1,000 bytes per parameter; the compiled
kernel moves only the bytes of the state. The arithmetic is that of the codecs, the random bits are
those of the host, and results agree with the host's to the rounding of fp32: a compiler may
contract a product and a sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FunctionType

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from offloadtrain.runtime.kernels.codec import halves, hashed
from offloadtrain.runtime.kernels.formats import CODECS, cut, zeros
from offloadtrain.runtime.kernels.scalars import (
    AdagradScalars,
    AdamScalars,
    BlendScalars,
    LionScalars,
    MomentumScalars,
    Scalars,
    SgdScalars,
)
from offloadtrain.runtime.kernels.state import BLOCK, Fp32State, Layout, State, pieces
from offloadtrain.step.layout.formats import StateFormat

_log = logging.getLogger(__name__)

_PIECE = 1 << 22
"""Elements widened at once; temporaries take up to 28 bytes each."""

_UPDATE_PIECE = 1 << 24
"""Elements of fp32 state updated at once; temporaries take up to 8 bytes each."""

_SEGMENT = 2048


def update(state: Fp32State, grad: Tensor, working: Tensor | None, scalars: Scalars) -> None:
    """See `kernels.update`; fp32 state, in place."""
    step = _STEPS[type(scalars)]
    for lo, hi in pieces(grad.numel(), size=_UPDATE_PIECE):
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
    if not s.momentum:  # turned off in a group: CUDA's kernel rejects a buffer then
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
        # In ascending order, as `target` may be at the front of the gradient's memory.
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
    # In descending order, as larger elements of `working` may start at the address of `update`.
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
    torch._foreach_mul_(norms, norms)
    # Views, not an index: a tensor of ids would be copied to the device, for every new set of
    # parameters with a gradient, and the launching thread would wait until compute is done.
    torch._foreach_copy_([squares[id] for id, _ in tensors], norms)


def _sum(values: Tensor) -> Tensor:
    """Return the sum of squares, () fp64."""
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


# Narrow state.

_NARROW_PIECE = 1 << 28
"""Maximum number of elements per launch. Its values per block take 32 MiB."""

_TRIAL = 1 << 22
"""Number of zeros that the kernel is compiled with: more bytes than a GPU caches."""


def compiles(scalars: Scalars) -> bool:
    """Return True if there is a kernel for the rule; warns once if Triton, which compiles it, is
    missing."""
    return isinstance(scalars, AdamScalars) and _has_compiler()


@cache
def _has_compiler() -> bool:
    if not has_triton():
        _log.warning(
            "Triton is missing, which compiles the update of split16 and int8 on a GPU: the update "
            "is not compiled and moves 30 to 80 times the bytes. Install triton, or set "
            "state_on = 'host'"
        )
        return False
    return True


def update_narrow(state: State, grad: Tensor, layout: Layout, scalars: AdamScalars) -> None:
    """See `kernels.update`; split16 or int8 state of complete blocks, in place."""
    fields = state.format.fields(scalars.moments)
    update_blocks = _compiled(state.format, state[0].dtype, grad.dtype, grad.device)
    coefficients = torch.tensor(scalars.coefficients(), dtype=torch.float32, device="cpu")
    coefficients = _copied(coefficients, grad.device)
    for run in _runs(layout):
        lo, hi = run[0][0], -(-run[-1][1] // BLOCK) * BLOCK
        if hi > grad.numel():
            raise ValueError(f"buffers of {grad.numel()} elements end within a block of {BLOCK}")
        rows = [
            (start - lo, end - lo, halves(first - start + lo)[0], *halves(scalars.key(id, first)))
            for start, end, id, first in run
        ]
        # With an additional empty row, as torch would compile separately for a single row.
        table = torch.tensor([*rows, (0,) * 5], dtype=torch.int32, device="cpu").T.contiguous()
        part, keys = cut(fields, state, lo, hi), _copied(table, grad.device)
        blocks = (hi - lo) // BLOCK
        scales = update_blocks(state.format.name, part, grad[lo:hi], coefficients, keys, blocks)
        if scales:
            torch._foreach_copy_(part[-len(scales) :], scales)


def _runs(layout: Layout) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield the rows of one launch: start, end, parameter and index of the first element,
    with less than a block between them."""
    run: list[tuple[int, int, int, int]] = []
    for offset, numel, parameter, first in layout.rows():
        for lo, hi in pieces(numel, first, _NARROW_PIECE):
            start, end = offset + lo, offset + hi
            if run and (start - run[-1][1] >= BLOCK or end - run[0][0] > _NARROW_PIECE):
                yield run
                run = []
            run.append((start, end, parameter, first + lo))
    if run:
        yield run


def _copied(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it. `values` may be freed then: CUDA has read memory
    that is not page-locked when the call returns."""
    return values.to(device, non_blocking=True)


@cache
def _compiled(
    format: StateFormat, weights: torch.dtype, grads: torch.dtype, device: torch.device
) -> Callable[..., list[Tensor]]:
    """Compile on first use, with zeros: the compiler times variants of a kernel on copies of its
    outputs.

    torch counts the variants of a code object and rejects a ninth. Parameters of a single block
    need another variant, so each format and dtype has a separate code object.
    """
    _log.info(
        "Compiling the update of %s state on the device, for weights in %s and gradients in %s: "
        "the first update takes some seconds longer",
        format.name,
        *(str(dtype).removeprefix("torch.") for dtype in (weights, grads)),
    )
    code = narrow_adam.__code__.replace(co_name=f"narrow_adam_{format.name}")
    function = FunctionType(code, narrow_adam.__globals__)
    compiled: Callable[..., list[Tensor]] = torch.compile(function, dynamic=True, fullgraph=True)
    fields = zeros(format, AdamScalars.moments, _TRIAL, weights, device)
    grad = torch.zeros(_TRIAL, dtype=grads, device=device)
    c = torch.zeros(10, dtype=torch.float32, device=device)
    rows = torch.zeros(5, 2, dtype=torch.int32, device=device)
    compiled(format.name, fields, grad, c, rows, _TRIAL // BLOCK)
    return compiled


def narrow_adam(
    name: str, fields: tuple[Tensor, ...], grad: Tensor, c: Tensor, rows: Tensor, blocks: int
) -> list[Tensor]:
    """Run one step over adjacent parameters, in place except for the scales.

    The compiler does not fuse a kernel that reads a block's scale for each of its elements and
    writes it once: it would write moments in fp32 and read them again.

    Args:
        name: name of the format.
        fields: fields of complete blocks.
        grad: (blocks * BLOCK,) in the working dtype, or fp32.
        c: (10,) fp32, `AdamScalars.coefficients`.
        rows: (5, n) int32, for each parameter: its first element, the element after its last, the
            difference between an element's index and position, both halves of its random key.

    Returns:
        The new scales, (blocks,) fp32 for each moment that has scales.
    """
    scale, decay, l2, weight, towards_grad, beta2, weight_sq, size, correction, eps = c.unbind()
    begin, end, *of_rows = rows.unbind()
    starts = BLOCK * torch.arange(blocks, dtype=torch.int32, device=grad.device).unsqueeze(1)
    is_row = (begin <= starts) & (starts < end)
    # Sums in which all summands but one are 0, instead of an index: the compiler computes them
    # once per block, not per element, and checks no bounds.
    end, shift, low, high = [
        torch.where(is_row, x, 0).sum(1, dtype=torch.int32).repeat_interleave(BLOCK)
        for x in (end, *of_rows)
    ]
    position = torch.arange(blocks * BLOCK, dtype=torch.int32, device=grad.device)
    inside = position < end
    codec = CODECS[name]
    master, exp_avg, exp_avg_sq = codec.load(fields)
    g = grad.float() * scale
    g = torch.where(l2 == 0, g, g + master * l2)
    exp_avg = (g - exp_avg) * weight + torch.where(towards_grad == 0, exp_avg, g)
    exp_avg_sq = exp_avg_sq * beta2 + g * weight_sq * g
    master = master * decay + (exp_avg * size) / (exp_avg_sq.sqrt() / correction + eps)
    # The end of a parameter's last block does not affect the block's scale, and stays unchanged.
    moments = [torch.where(inside, moment, 0.0) for moment in (exp_avg, exp_avg_sq)]
    new = tuple([torch.empty_like(field) for field in fields])
    codec.store(new, (master, *moments), lambda: hashed(position + shift, low, high))
    scales = []
    for field, value in zip(fields, new, strict=True):
        if field.numel() == blocks:
            scales.append(value)
        else:
            field.copy_(torch.where(inside, value, field))
    return scales
