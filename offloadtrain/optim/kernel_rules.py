"""The rules that have CPU kernels. Each makes one pass over a bucket."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, Self, cast

from torch import Tensor

from offloadtrain.optim.rule import CodecRule
from offloadtrain.runtime import kernels
from offloadtrain.step.layout.formats import StateFormat


class KeywordsOnly:
    """A rule that explains its use if it is called like one of torch's optimizers."""

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse parameters, which torch's optimizers take: pass them to `offload` instead."""
        if args:
            raise TypeError(
                f"{cls.__name__} is an update rule: it takes hyperparameters by name and no "
                f"parameters. Make the optimizer of a model with optimizer = {_usage(cls)}"
            )
        return object.__new__(cls)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse calls: some trainers (optimizer_cls_and_kwargs) call an optimizer class."""
        name = type(self).__name__
        raise TypeError(
            f"{name} is an update rule, not an optimizer class: give the trainer "
            f"{_usage(type(self))} as its optimizer (optimizers = (optimizer, None))"
        )


class KernelRule(KeywordsOnly, CodecRule, ABC):
    """An `UpdateRule` whose step is a kernel: a frozen dataclass of hyperparameters that makes one
    pass over a bucket."""

    __slots__ = ()

    def __post_init__(self) -> None:
        self.check(self.defaults())

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """State per parameter in addition to the master weight."""

    @abstractmethod
    def scalars(
        self, group: Mapping[str, Any], *, step: int, grad_scale: float, seed: int
    ) -> kernels.Scalars:
        """Return the kernel's hyperparameters for one step."""

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a group's hyperparameters are out of range."""

    def calls_only_kernels(self, format: StateFormat) -> bool:
        """Return True if there is a kernel for the format."""
        return format.name in kernels.STATES

    def update(
        self,
        format: StateFormat,
        state: tuple[Tensor, ...],
        grad: Tensor,
        working: Tensor | None,
        layout: kernels.Layout,
        *,
        group: Mapping[str, Any],
        step: int,
        grad_scale: float,
        seed: int,
        out: tuple[Tensor, ...] | None = None,
    ) -> None:
        """Update one bucket; see `UpdateRule.update`."""
        scalars = self.scalars(group, step=step, grad_scale=grad_scale, seed=seed)
        # On a GPU some rules have no kernel for narrow state: torch decodes and encodes the state
        # then.
        slow = grad.is_cuda and format.holds_weight and not kernels.compiles(scalars)
        if format.name not in kernels.STATES or slow:
            self._update_by_codec(format, state, grad, working, layout, scalars, out)
            return
        target = None if out is None else _packed(format, out)
        kernels.update(
            _packed(format, state), grad, scalars, working=working, layout=layout, out=target
        )

    def _update_by_codec(
        self,
        format: StateFormat,
        state: tuple[Tensor, ...],
        grad: Tensor,
        working: Tensor | None,
        layout: kernels.Layout,
        scalars: kernels.Scalars,
        out: tuple[Tensor, ...] | None,
    ) -> None:
        """Run the fp32 kernel on the values of a format that has no kernel."""
        scaled = replace(cast(Any, scalars), grad_scale=1.0)
        kernels.update_by_codec(
            format,
            self.moments,
            state,
            grad,
            working,
            layout,
            lambda master, moments, g: kernels.update(
                kernels.Fp32State((master, *moments)), g, scaled
            ),
            step=scalars.step,
            grad_scale=scalars.grad_scale,
            seed=scalars.seed,
            out=out,
        )

    def set_master(self, format: StateFormat, state: tuple[Tensor, ...], master: Tensor) -> None:
        """See `UpdateRule.set_master`."""
        if format.name not in kernels.STATES:
            super().set_master(format, state, master)
            return
        kernels.set_master(_packed(format, state), master)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(KernelRule):
    """Adam (Kingma & Ba 2015, algorithm 1) with weight decay as an L2 term of the gradient.

    The bits are those of `torch.optim.Adam(fused=True)` on the CPU.

    Attributes:
        lr: step size, dimensionless, > 0.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment, > 0.
        weight_decay: >= 0.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    decoupled: ClassVar[bool] = False

    @property
    def moments(self) -> tuple[str, ...]:
        return kernels.AdamScalars.moments

    def check(self, group: Mapping[str, Any]) -> None:
        check_not_negative(group, ("lr", "eps", "weight_decay"))
        check_betas(group)

    def scalars(
        self, group: Mapping[str, Any], *, step: int, grad_scale: float, seed: int
    ) -> kernels.AdamScalars:
        beta1, beta2 = group["betas"]
        return kernels.AdamScalars(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            decoupled=self.decoupled,
            grad_scale=grad_scale,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

    The bits are those of `torch.optim.AdamW(fused=True)` on the CPU.
    """

    weight_decay: float = 1e-2

    decoupled: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(KernelRule):
    """SGD with momentum, dampening and Nesterov's form as torch has them.

    The bits are those of `torch.optim.SGD(fused=True)` on the CPU. The rule stores a buffer if its
    `momentum` is not 0. A parameter group may then set momentum to 0 or change it.

    Attributes:
        lr: step size, > 0.
        momentum: decay of the buffer, >= 0; 0: there is no buffer.
        dampening: all gradients except the first enter the buffer with weight 1 - dampening.
        weight_decay: an L2 term of the gradient, >= 0.
        nesterov: needs momentum, and dampening = 0.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    @property
    def moments(self) -> tuple[str, ...]:
        return (kernels.MomentumScalars if self.momentum else kernels.SgdScalars).moments

    def check(self, group: Mapping[str, Any]) -> None:
        check_not_negative(group, ("lr", "momentum", "weight_decay"))
        if not float(group["dampening"]) <= 1.0:
            raise ValueError(f"dampening = {group['dampening']} is not a number of at most 1.0")
        if group["nesterov"] and not (group["momentum"] and group["dampening"] == 0.0):
            raise ValueError("nesterov needs a momentum and dampening = 0.0")
        if group["momentum"] and not self.momentum:
            raise ValueError(
                f"momentum = {group['momentum']} in a group of a rule without momentum, which "
                "keeps no buffer: give SGD(momentum=…), and 0.0 to the other groups"
            )

    def scalars(
        self, group: Mapping[str, Any], *, step: int, grad_scale: float, seed: int
    ) -> kernels.Scalars:
        common = {
            "lr": float(group["lr"]),
            "weight_decay": group["weight_decay"],
            "step": step,
            "grad_scale": grad_scale,
            "seed": seed,
        }
        if not self.momentum:
            return kernels.SgdScalars(**common)
        return kernels.MomentumScalars(
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            **common,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion(KernelRule):
    """Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated moment, decoupled decay.

    Its steps are larger than Adam's at the same `lr`. The authors use a rate that is 3 to 10 times
    smaller, and a decay that is larger by the same factor.

    Attributes:
        lr: step size, > 0. Every element of a weight changes by this amount.
        betas: decay of the interpolation and of the moment, each in [0, 1).
        weight_decay: >= 0.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    @property
    def moments(self) -> tuple[str, ...]:
        return kernels.LionScalars.moments

    def check(self, group: Mapping[str, Any]) -> None:
        check_not_negative(group, ("lr", "weight_decay"))
        check_betas(group)

    def scalars(
        self, group: Mapping[str, Any], *, step: int, grad_scale: float, seed: int
    ) -> kernels.LionScalars:
        beta1, beta2 = group["betas"]
        return kernels.LionScalars(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            step=step,
            grad_scale=grad_scale,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(KernelRule):
    """Adagrad (Duchi et al. 2011): the sum of all squared gradients, which starts at 0.

    The bits are those of `torch.optim.Adagrad(fused=True)` on the CPU.

    Attributes:
        lr: step size, > 0.
        lr_decay: step t uses lr / (1 + (t - 1) * lr_decay), >= 0.
        weight_decay: an L2 term of the gradient, >= 0.
        eps: added to the root of the sum, >= 0.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    eps: float = 1e-10

    @property
    def moments(self) -> tuple[str, ...]:
        return kernels.AdagradScalars.moments

    def check(self, group: Mapping[str, Any]) -> None:
        check_not_negative(group, ("lr", "lr_decay", "weight_decay", "eps"))

    def scalars(
        self, group: Mapping[str, Any], *, step: int, grad_scale: float, seed: int
    ) -> kernels.AdagradScalars:
        return kernels.AdagradScalars(
            lr=float(group["lr"]),
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            grad_scale=grad_scale,
            seed=seed,
        )


def check_not_negative(group: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise ValueError if one of the values is not a number of at least 0."""
    for key in keys:
        value = float(group[key])
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{key} = {value} is not a number of at least 0.0")


def check_betas(group: Mapping[str, Any]) -> None:
    """Raise ValueError if the values are not two numbers in [0, 1)."""
    if len(group["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"betas = {group['betas']} are not two numbers in [0, 1)")


def _usage(rule: type[KeywordsOnly]) -> str:
    return f"ot.offload(model, ot.{rule.__name__}(lr=…))"


def _packed(format: StateFormat, tensors: tuple[Tensor, ...]) -> kernels.State:
    return kernels.STATES[format.name](tensors)
