"""Adam's hyperparameters, and the fp32 coefficients that every kernel derives from them alike."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdamScalars:
    """One step's hyperparameters, in double.

    Attributes:
        step: 1-based.
        decoupled: decay multiplies the master (AdamW) instead of joining the gradient (Adam).
        grad_scale: multiplied into each gradient first; rounded to fp32.
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
class Coefficients:
    """What the loop multiplies by: computed in double, each rounded once to fp32.

    1 - beta in fp32 would cost a factor of 16 in accuracy. The moment moves from its old value by
    the weight 1 - beta1 or, where that is 0.5 or more, from the gradient by -beta1, as in torch.
    """

    grad_scale: float
    decay: float
    l2: float
    exp_avg_weight: float
    towards_grad: bool
    beta2: float
    exp_avg_sq_weight: float
    negative_step_size: float
    bias_correction2_sqrt: float
    eps: float

    @classmethod
    def of(cls, s: AdamScalars) -> Coefficients:
        weight = fp32(1.0 - s.beta1)
        towards_grad = not weight < 0.5
        return cls(
            grad_scale=fp32(s.grad_scale),
            decay=fp32(1.0 - s.lr * s.weight_decay) if s.decoupled else 1.0,
            l2=0.0 if s.decoupled else fp32(s.weight_decay),
            exp_avg_weight=fp32(weight - 1.0) if towards_grad else weight,
            towards_grad=towards_grad,
            beta2=fp32(s.beta2),
            exp_avg_sq_weight=fp32(1.0 - s.beta2),
            negative_step_size=-fp32(s.lr / (1.0 - s.beta1**s.step)),
            bias_correction2_sqrt=fp32(math.sqrt(1.0 - s.beta2**s.step)),
            eps=fp32(s.eps),
        )


def fp32(value: float) -> float:
    """Rounded to the nearest fp32; beyond its range, infinite."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded
