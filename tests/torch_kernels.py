"""The kernels in plain torch: the readable definition of the arithmetic, which tests compare with.

Same bits as the shipped ones, at a tenth of the speed. `LISTED` makes it a backend of
`kernels.use`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from offloadtrain.runtime.kernels import Backend, selection
from offloadtrain.runtime.kernels import read_master as read_masters
from offloadtrain.runtime.kernels.codec import (
    decode_moments,
    fma,
    join,
    join_int8,
    set_master_int8,
    split,
)
from offloadtrain.runtime.kernels.formats import CODECS, draw_bits
from offloadtrain.runtime.kernels.scalars import (
    AdagradScalars,
    AdamScalars,
    BlendScalars,
    LionScalars,
    MomentumScalars,
    Scalars,
    SgdScalars,
    fp32,
    random_key,
)
from offloadtrain.runtime.kernels.state import (
    BLOCK,
    Fp32State,
    Int8State,
    Layout,
    Split16State,
    State,
    blocks,
    pieces,
)
from offloadtrain.step.layout.formats import ADAM_MOMENTS

LISTED = Backend("torch", "-", 0, "the reference of tests")
selection.LOADERS["torch"] = lambda: sys.modules[__name__]


def update(
    state: State,
    out: State,
    grad: Tensor,
    working: Tensor | None,
    layout: Layout | None,
    scalars: Scalars,
) -> None:
    """See `kernels.update`."""
    if isinstance(state, Fp32State):
        _update_fp32(state, out, grad, working, scalars)
        return
    assert layout is not None
    codec = CODECS[state.format.name]
    for offset, numel, parameter, first in layout.rows():
        for lo, hi in pieces(numel, first):
            key, elements = scalars.key(parameter, first + lo), (first + lo, first + hi)
            piece = (offset + lo, offset + hi)
            new = step(to_fp32(_at(state, *piece)), grad[slice(*piece)], scalars)
            codec.store(_at(out, *piece), new, partial(draw_bits, key, elements, grad.device))


def blend(
    state: State, grad: Tensor, target: Tensor, layout: Layout, scalars: BlendScalars
) -> None:
    """See `kernels.blend`."""
    scale, weight, ahead_weight, towards_grad, towards_average, nesterov = scalars.coefficients()
    codec = CODECS[state.format.name]
    # In ascending order: `target` may lie in the front of the gradient's memory, so that what is
    # written was read before.
    for offset, numel, parameter, first in layout.rows():
        for lo, hi in pieces(numel, first):
            piece = slice(offset + lo, offset + hi)
            part = _at(state, piece.start, piece.stop)
            g, (master, old) = grad[piece].float() * scale, to_fp32(part)
            average = fma(g - old, weight, g if towards_grad else old)
            ahead = fma(average - g, ahead_weight, average if towards_average else g)
            target[piece] = ahead if nesterov else average
            key = random_key(scalars.seed, scalars.step, parameter, first + lo)
            elements = (first + lo, first + hi)
            codec.store(part, (master, average), partial(draw_bits, key, elements, grad.device))


def subtract(
    state: State,
    update: Tensor,
    working: Tensor | None,
    layout: Layout,
    decay: float,
    rates: Sequence[float],
) -> None:
    """See `kernels.subtract`."""
    end = update.numel()
    # Backwards: larger elements of `working` that begin in the same place then overwrite only what
    # was read before.
    for (offset, numel, _, _), rate in reversed([*zip(layout.rows(), rates, strict=True)]):
        zero_outside(working, offset + numel, end)
        end = offset
        for lo, hi in reversed([*pieces(numel)]):
            piece = slice(offset + lo, offset + hi)
            part = _at(state, piece.start, piece.stop)
            master = fma(update[piece].float(), -fp32(rate), master_of(part) * fp32(decay))
            set_master(part, master)
            if working is not None:
                working[piece] = master
    zero_outside(working, 0, end)


def zero_outside(working: Tensor | None, lo: int, hi: int) -> None:
    """Zero what is no parameter's, if there are working weights."""
    if working is not None:
        working[lo:hi].zero_()


def _at(state: State, lo: int, hi: int) -> State:
    """Elements [lo, hi) of every field; lo is a block's start if there are scales."""
    if isinstance(state, Int8State):
        scales = (x[lo // BLOCK : blocks(hi)] for x in state.scales)
        return Int8State((*(x[lo:hi] for x in (*state[:2], *state.codes)), *scales))
    return type(state)(x[lo:hi] for x in state)


def _update_fp32(
    state: Fp32State, out: State, grad: Tensor, working: Tensor | None, scalars: Scalars
) -> None:
    for lo, hi in pieces(grad.numel()):
        new = step(_at(state, lo, hi), grad[lo:hi], scalars)
        for target, value in zip(out, new, strict=True):
            target[lo:hi] = value
        if working is not None:
            working[lo:hi] = new[0]


def step(values: Sequence[Tensor], grad: Tensor, scalars: Scalars) -> tuple[Tensor, ...]:
    """One step of a rule: (n,) fp32 master and moments, in new memory."""
    scale, *rest = scalars.coefficients()
    return _STEPS[type(scalars)](rest, grad.float() * scale, *values)


def _adam(
    c: Sequence[float], g: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor
) -> tuple[Tensor, ...]:
    decay, l2, weight, towards_grad, beta2, weight_sq, step_size, correction, eps = c
    g = _decayed(g, master, l2)
    m = fma(g - exp_avg, weight, g if towards_grad else exp_avg)
    v = fma(g * weight_sq, g, exp_avg_sq * beta2)
    return master * decay + (m * step_size) / (_root(v) / correction + eps), m, v


def _lion(c: Sequence[float], g: Tensor, master: Tensor, exp_avg: Tensor) -> tuple[Tensor, ...]:
    decay, beta1, weight1, beta2, weight2, negative_lr = c
    towards = fma(g, weight1, exp_avg * beta1)
    return master * decay + towards.sign() * negative_lr, fma(g, weight2, exp_avg * beta2)


def _sgd(c: Sequence[float], g: Tensor, master: Tensor) -> tuple[Tensor, ...]:
    l2, negative_lr = c
    return (fma(_decayed(g, master, l2), negative_lr, master),)


def _momentum(c: Sequence[float], g: Tensor, master: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    l2, negative_lr, momentum, weight, first, nesterov = c
    g = _decayed(g, master, l2)
    m = g if first else fma(g, weight, buffer * momentum)
    u = fma(m, momentum, g) if nesterov else m
    return fma(u, negative_lr, master), m


def _adagrad(c: Sequence[float], g: Tensor, master: Tensor, sum: Tensor) -> tuple[Tensor, ...]:
    l2, lr, eps = c
    g = _decayed(g, master, l2)
    total = fma(g, g, sum)
    return master - (g * lr) / (_root(total) + eps), total


_STEPS: dict[type, Callable[..., tuple[Tensor, ...]]] = {
    AdamScalars: _adam,
    LionScalars: _lion,
    SgdScalars: _sgd,
    MomentumScalars: _momentum,
    AdagradScalars: _adagrad,
}


def _decayed(g: Tensor, master: Tensor, l2: float) -> Tensor:
    return g if l2 == 0.0 else fma(master, l2, g)


def _root(values: Tensor) -> Tensor:
    """numpy's root is correctly rounded, torch's is not always."""
    return torch.from_numpy(np.sqrt(values.numpy()))


def master_of(state: State) -> Tensor:
    """The master weights as (n,) fp32: a view for fp32 state, new memory otherwise."""
    if isinstance(state, Fp32State):
        return state.master
    if isinstance(state, Split16State):
        return join(state.weight, state.low)
    assert isinstance(state, Int8State)
    return join_int8(state.weight, state.correction)


def set_master(state: State, master: Tensor) -> None:
    """Set the master weights from (n,) fp32, rounded to nearest if the format is narrower."""
    if isinstance(state, Fp32State):
        state.master.copy_(master)
    elif isinstance(state, Split16State):
        weight, low = split(master)
        state.weight.copy_(weight)
        state.low.copy_(low)
    else:
        assert isinstance(state, Int8State)
        set_master_int8(state, master, torch.full(master.shape, 0x80, device=master.device))


def to_fp32(state: State) -> Fp32State:
    """The state's values in fp32: views for fp32 state, new memory otherwise."""
    if isinstance(state, Fp32State):
        return state
    if isinstance(state, Split16State):
        return Fp32State((master_of(state), *(moment.float() for moment in state[2:])))
    assert isinstance(state, Int8State)
    return Fp32State((master_of(state), *decode_moments(state)))


def decoded_master(state: State) -> Tensor:
    """The master weights as (n,) fp32, decoded by the active kernels."""
    target = torch.empty(state[0].numel())
    read_masters(state.format, ADAM_MOMENTS, state, target)
    return target
