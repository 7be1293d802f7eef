"""The hyperparameters of each rule that has kernels, and the values that every backend
derives from them: fp32 coefficients, and the key of the random bits."""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars(ABC):
    """One step of a rule, with its hyperparameters in double.

    Attributes:
        rule: number of the rule in native/kernels.h.
        moments: names of its moments, the state in addition to the master weights.
        step: 1-based.
        grad_scale: multiplied into each gradient first; rounded to fp32.
        seed: seed of stochastic rounding, modulo 2^64.
    """

    rule: ClassVar[int]
    moments: ClassVar[tuple[str, ...]]

    lr: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0
    seed: int = 0

    @abstractmethod
    def coefficients(self) -> tuple[float, ...]:
        """Return the factors of the loop, computed in double and rounded once to fp32, in the order
        of the rule's class in native/rules.h; the first is the scale of the gradient."""

    def key(self, parameter: int, element: int) -> int:
        """See `random_key`."""
        return random_key(self.seed, self.step, parameter, element)


@lru_cache(maxsize=64)
def coefficients_of(scalars: Scalars) -> tuple[float, ...]:
    """Cached, as all buckets of a step share the result: computing it takes as long as a call."""
    return scalars.coefficients()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamScalars(Scalars):
    """Hyperparameters of Adam.

    1 - beta in fp32 would cost a factor of 16 in accuracy. The moment moves from its old value by
    the weight 1 - beta1 or, if that is 0.5 or more, from the gradient by -beta1, as in torch.

    Attributes:
        decoupled: decay multiplies the master (AdamW) instead of being added to the gradient
            (Adam).
    """

    beta1: float
    beta2: float
    eps: float
    decoupled: bool = True

    rule: ClassVar[int] = 0
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def coefficients(self) -> tuple[float, ...]:
        weight, towards_grad = _lerp(1.0 - self.beta1)
        return (
            fp32(self.grad_scale),
            fp32(1.0 - self.lr * self.weight_decay) if self.decoupled else 1.0,  # master factor
            0.0 if self.decoupled else fp32(self.weight_decay),  # decay in the gradient
            weight,
            float(towards_grad),
            fp32(self.beta2),
            fp32(1.0 - self.beta2),  # weight of the square
            -fp32(self.lr / (1.0 - self.beta1**self.step)),
            fp32(math.sqrt(1.0 - self.beta2**self.step)),
            fp32(self.eps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LionScalars(Scalars):
    beta1: float
    beta2: float

    rule: ClassVar[int] = 1
    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def coefficients(self) -> tuple[float, ...]:
        return (
            fp32(self.grad_scale),
            fp32(1.0 - self.lr * self.weight_decay),  # factor on the master
            fp32(self.beta1),
            fp32(1.0 - self.beta1),
            fp32(self.beta2),
            fp32(1.0 - self.beta2),
            -fp32(self.lr),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdScalars(Scalars):
    """Hyperparameters of SGD without momentum."""

    rule: ClassVar[int] = 2
    moments: ClassVar[tuple[str, ...]] = ()

    def coefficients(self) -> tuple[float, ...]:
        return (
            fp32(self.grad_scale),
            fp32(self.weight_decay),  # decay in the gradient
            -fp32(self.lr),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumScalars(Scalars):
    """Hyperparameters of SGD with momentum. If `momentum` is 0, the buffer is the gradient."""

    momentum: float
    dampening: float
    nesterov: bool

    rule: ClassVar[int] = 3
    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def coefficients(self) -> tuple[float, ...]:
        return (
            fp32(self.grad_scale),
            fp32(self.weight_decay),  # decay in the gradient
            -fp32(self.lr),
            fp32(self.momentum),
            fp32(1.0 - self.dampening),  # weight of the gradient
            float(self.step == 1 or self.momentum == 0.0),  # the buffer is the gradient
            float(self.nesterov),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdagradScalars(Scalars):
    lr_decay: float
    eps: float

    rule: ClassVar[int] = 4
    moments: ClassVar[tuple[str, ...]] = ("sum",)

    def coefficients(self) -> tuple[float, ...]:
        return (
            fp32(self.grad_scale),
            fp32(self.weight_decay),  # decay in the gradient
            fp32(self.lr / (1.0 + (self.step - 1) * self.lr_decay)),
            fp32(self.eps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendScalars:
    """A moving average of gradients, and with nesterov the gradient's lerp towards it, in double.

    Attributes:
        momentum: weight of the past gradients.
        step, grad_scale, seed: see `Scalars`.
    """

    momentum: float
    nesterov: bool
    step: int
    grad_scale: float = 1.0
    seed: int = 0

    def coefficients(self) -> tuple[float, float, float, bool, bool, bool]:
        """Return the scale of the gradient and the weights of the momentum's and Nesterov's lerp,
        rounded once to fp32; whether each lerp starts from its other end; and `nesterov`."""
        weight, towards_grad = _lerp(1.0 - self.momentum)
        ahead, towards_average = _lerp(self.momentum)
        scale = fp32(self.grad_scale)
        return scale, weight, ahead, towards_grad, towards_average, self.nesterov


def _lerp(weight: float) -> tuple[float, bool]:
    """Return the factor of torch's lerp, and whether it starts from the end, which is the case for
    weights of 0.5 or more."""
    rounded = fp32(weight)
    towards_end = not rounded < 0.5
    return fp32(rounded - 1.0) if towards_end else rounded, towards_end


def random_key(seed: int, step: int, parameter: int, element: int) -> int:
    """Return the 64-bit key of the random bits around an element of a parameter.

    It depends on seed, step, parameter and the upper 32 bits of the element's index.
    """
    of_step = _mix(_mix(seed & _MASK) + step)
    return _mix(_mix(of_step + parameter) + (element >> 32))


def _mix(value: int) -> int:
    """Return the finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def fp32(value: float) -> float:
    """Round to the nearest fp32; infinite beyond its range."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded
