"""The common part of rules that have CPU kernels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self, cast

from torch import Tensor

from offloadtrain.optim.rule import CodecRule
from offloadtrain.runtime import kernels
from offloadtrain.step.layout.formats import StateFormat


class KeywordsOnly:
    """A rule that says what to write instead where it is taken for one of torch's optimizers."""

    __slots__ = ()

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse parameters, as torch's optimizers take; `offload` takes them."""
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
    """An `UpdateRule` whose step is a kernel: frozen dataclasses of hyperparameters, one pass over
    a bucket."""

    __slots__ = ()

    def __post_init__(self) -> None:
        self.check(self.defaults())

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """State per parameter besides the master weight."""

    @abstractmethod
    def scalars(
        self, group: Mapping[str, Any], *, step: int, grad_scale: float, seed: int
    ) -> kernels.Scalars:
        """One step's hyperparameters for the kernel."""

    @abstractmethod
    def check(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError if a group's hyperparameters are out of range."""

    def calls_only_kernels(self, format: StateFormat) -> bool:
        """Tell whether there is a kernel for the format."""
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
        # On a GPU not every rule has a kernel for narrow state: torch decodes and encodes it then.
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
        """The fp32 kernel over the values of a format that has none of its own."""
        scaled = replace(cast(Any, scalars), grad_scale=1.0)
        kernels.update_by_codec(
            format,
            self.moments,
            state,
            grad,
            working,
            layout,
            lambda master, moments, g: kernels.update(
                kernels.Fp32State(master, *moments), g, scaled
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


def check_not_negative(group: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raises ValueError unless each is a number of at least 0."""
    for key in keys:
        value = float(group[key])
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{key} = {value} is not a number of at least 0.0")


def check_betas(group: Mapping[str, Any]) -> None:
    """Raises ValueError unless they are two numbers in [0, 1)."""
    if len(group["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"betas = {group['betas']} are not two numbers in [0, 1)")


def _usage(rule: type[KeywordsOnly]) -> str:
    return f"ot.offload(model, ot.{rule.__name__}(lr=…))"


def _packed(format: StateFormat, tensors: tuple[Tensor, ...]) -> kernels.State:
    return kernels.STATES[format.name](*tensors)
