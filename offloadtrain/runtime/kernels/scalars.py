"""Adam's hyperparameters, and the values that every kernel derives from them: fp32 coefficients,
and the key of the random bits."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class AdamScalars:
    """One step's hyperparameters, in double.

    Attributes:
        step: 1-based.
        decoupled: decay multiplies the master (AdamW) instead of joining the gradient (Adam).
        grad_scale: multiplied into each gradient first; rounded to fp32.
        seed: of stochastic rounding, taken modulo 2^64.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    grad_scale: float = 1.0
    seed: int = 0

    def key(self, parameter: int, element: int) -> int:
        """See `random_key`."""
        return random_key(self.seed, self.step, parameter, element)


def random_key(seed: int, step: int, parameter: int, element: int) -> int:
    """Return the 64-bit key of the random bits around an element of a parameter.

    It depends on seed, step, parameter and the element's number above its low 32 bits.
    """
    of_step = _mix(_mix(seed & _MASK) + step)
    return _mix(_mix(of_step + parameter) + (element >> 32))


def _mix(value: int) -> int:
    """Return the finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The factors of the loop, computed in double and rounded once to fp32.

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
    """Round to the nearest fp32; infinite beyond its range."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded
