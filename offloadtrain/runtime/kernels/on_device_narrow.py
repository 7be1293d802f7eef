"""Adam over narrow state on a GPU: one kernel, which torch compiles when it first runs.

An operation after the other, decoding and encoding would move a thousand bytes of a parameter and
more; compiled, it moves those of its state. The arithmetic is that of the codecs, the random bits
are those of the host, and results agree with the host's to the rounding of fp32: a compiler may
contract a product and a sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from offloadtrain.runtime.kernels.codec import hashed
from offloadtrain.runtime.kernels.formats import CODECS, cut
from offloadtrain.runtime.kernels.scalars import AdamScalars, Scalars
from offloadtrain.runtime.kernels.state import Layout, State, pieces

_PIECE = 1 << 26
"""Elements of one launch: nothing lies beside the state, and launching takes 50 us."""

_log = logging.getLogger(__name__)


def compiles(scalars: Scalars) -> bool:
    """Tell whether there is a kernel for the rule; says once if Triton, which makes it, is
    missing."""
    return isinstance(scalars, AdamScalars) and _has_compiler()


@cache
def _has_compiler() -> bool:
    if not has_triton():
        _log.warning(
            "Triton is missing, which compiles the update of split16 and int8 on a GPU: it runs an "
            "operation after the other, with 60 to 200 times the traffic. Install triton, or set "
            "state_on = 'host'"
        )
        return False
    return True


def update(state: State, grad: Tensor, layout: Layout, scalars: AdamScalars) -> None:
    """See `kernels.update`; split16 or int8 state, in place."""
    fields = state.format.fields(scalars.moments)
    coefficients = torch.tensor(scalars.coefficients(), device=grad.device)
    rows = [
        (offset + lo, offset + hi, scalars.key(parameter, first + lo), first + lo)
        for offset, numel, parameter, first in layout.rows()
        for lo, hi in pieces(numel, first, _PIECE)
    ]
    # One copy to the device for all of them.
    draws = [[key & 0xFFFFFFFF, key >> 32, element] for _, _, key, element in rows]
    keys = torch.tensor(draws, dtype=torch.int64, device=grad.device).view(-1, 3)
    for (lo, hi, _, _), key in zip(rows, keys, strict=True):
        _compiled()(state.format.name, cut(fields, state, lo, hi), grad[lo:hi], coefficients, key)


@cache
def _compiled() -> Callable[..., None]:
    """Compile on first use: importing what compiles takes seconds."""
    made: Callable[..., None] = torch.compile(adam, dynamic=True, fullgraph=True)
    return made


def adam(name: str, fields: tuple[Tensor, ...], grad: Tensor, c: Tensor, key: Tensor) -> None:
    """One step over a piece of a parameter, in place.

    Args:
        name: of the format.
        grad: (n,) of the working dtype, or fp32.
        c: (10,) fp32, `AdamCoefficients`.
        key: (3,) int64: both halves of the key of the random bits, and the first element's number.
    """
    scale, decay, l2, weight, towards_grad, beta2, weight_sq, size, correction, eps = c.unbind()
    codec = CODECS[name]
    master, exp_avg, exp_avg_sq = codec.load(fields)
    g = grad.float() * scale
    g = torch.where(l2 == 0, g, g + master * l2)
    exp_avg = (g - exp_avg) * weight + torch.where(towards_grad == 0, exp_avg, g)
    exp_avg_sq = exp_avg_sq * beta2 + g * weight_sq * g
    master = master * decay + (exp_avg * size) / (exp_avg_sq.sqrt() / correction + eps)

    def draw() -> Tensor:
        elements = torch.arange(grad.numel(), device=grad.device) + key[2]
        return hashed(elements & 0xFFFFFFFF, key[0], key[1])

    codec.store(fields, (master, exp_avg, exp_avg_sq), draw)
