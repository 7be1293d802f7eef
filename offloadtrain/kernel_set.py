"""What a set of host kernels is: the arithmetic they all share, without a line of them.

Three sets implement it to the same bits: native (`native/`), `numba_kernels` and `torch_kernels`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

SEGMENT = 2048
"""Elements of one parameter that are squared and added as one halving tree (see `sum_squares`)."""


@dataclass(frozen=True, slots=True)
class AdamScalars:
    """The hyperparameters of one step of one bucket.

    Attributes:
        step: optimizer step, 1-based.
        decoupled: AdamW (weights shrink) instead of Adam with L2 (the gradient grows).
        grad_scale: multiplied into each gradient first, in fp32: unscaling times clipping.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    grad_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AdamConstants:
    """The same for the inner loop. Every field is used after rounding to fp32 once.

    With all products marked `fma` rounded once, one step of one element is

        g = grad * grad_scale
        g = fma(weight, l2, g)                     where l2 is not 0
        exp_avg = fma(lerp, g - exp_avg, lerp_from_grad ? g : exp_avg)
        exp_avg_sq = fma(square * g, g, exp_avg_sq * beta2)
        weight = weight * shrink + (minus_step_size * exp_avg) / (sqrt(exp_avg_sq) / root + eps)

    which is what `torch.optim.AdamW(fused=True)` and `Adam(fused=True)` compute on a CPU with fused
    multiply-adds (ATen/native/cpu/FusedAdamKernel.cpp): its lerp starts from the nearer end.
    """

    grad_scale: float
    l2: float
    lerp: float
    lerp_from_grad: bool
    square: float
    beta2: float
    shrink: float
    minus_step_size: float
    root: float
    eps: float

    @classmethod
    def of(cls, scalars: AdamScalars) -> AdamConstants:
        """In double precision until the end: 1 - beta in fp32 costs a factor of 16 in accuracy."""
        new = 1.0 - scalars.beta1
        from_grad = abs(_fp32(new)) >= 0.5
        return cls(
            grad_scale=scalars.grad_scale,
            l2=0.0 if scalars.decoupled else scalars.weight_decay,
            lerp=_fp32(new) - 1.0 if from_grad else new,
            lerp_from_grad=from_grad,
            square=1.0 - scalars.beta2,
            beta2=scalars.beta2,
            shrink=1.0 - scalars.lr * scalars.weight_decay if scalars.decoupled else 1.0,
            minus_step_size=-(scalars.lr / (1.0 - scalars.beta1**scalars.step)),
            root=math.sqrt(1.0 - scalars.beta2**scalars.step),
            eps=scalars.eps,
        )


class KernelSet(Protocol):
    """Kernels over checked tensors: 1-D, contiguous, on the CPU, of the right dtype and size.

    Arguments are as in `kernels`; `set_threads` bounds the threads of later calls.
    """

    name: str
    isa: str
    threads: int

    def adam(
        self,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        working: Tensor | None,
        constants: AdamConstants,
    ) -> None: ...

    def accumulate(self, total: Tensor, grad: Tensor, first: bool) -> None: ...

    def sum_squares(
        self, flat: Tensor, offsets: Sequence[int], numels: Sequence[int]
    ) -> list[float]: ...

    def cast(self, source: Tensor, target: Tensor) -> None: ...

    def first_touch(self, memory: Tensor) -> None: ...

    def set_threads(self, count: int) -> None: ...


def _fp32(value: float) -> float:
    """Round to the nearest fp32."""
    return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]
