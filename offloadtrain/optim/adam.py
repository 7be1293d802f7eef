"""Adam and AdamW on the host, one pass over a bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NoReturn, Self

from torch import Tensor

from offloadtrain.runtime import kernels
from offloadtrain.step.formats import StateFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
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
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

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

    def __post_init__(self) -> None:
        self.check(asdict(self))

    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of a `param_groups` entry."""
        return asdict(self)

    def check(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError if a group's hyperparameters are out of range."""
        for key, low in (("lr", 0.0), ("eps", 0.0), ("weight_decay", 0.0)):
            value = float(group[key])
            if not (math.isfinite(value) and value >= low):
                raise ValueError(f"{key} = {value} is not a number of at least {low}")
        if len(group["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
            raise ValueError(f"betas = {group['betas']} are not two numbers in [0, 1)")

    def calls_only_kernels(self, format: StateFormat) -> bool:
        """Where Adam has a kernel of its own."""
        return format.name in _STATES

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
        beta1, beta2 = group["betas"]
        scalars = kernels.AdamScalars(
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
        if format.name not in _STATES:
            self._update_by_codec(format, state, grad, working, layout, scalars, out)
            return
        target = None if out is None else _packed(format, out)
        kernels.adam(
            _packed(format, state), grad, scalars, working=working, layout=layout, out=target
        )

    def _update_by_codec(
        self,
        format: StateFormat,
        state: tuple[Tensor, ...],
        grad: Tensor,
        working: Tensor | None,
        layout: kernels.Layout,
        scalars: kernels.AdamScalars,
        out: tuple[Tensor, ...] | None,
    ) -> None:
        """The fp32 kernel over the values of a format that has none of its own."""
        scaled = replace(scalars, grad_scale=1.0)
        kernels.update_by_codec(
            format,
            self.moments,
            state,
            grad,
            working,
            layout,
            lambda master, moments, g: kernels.adam(kernels.Fp32State(master, *moments), g, scaled),
            step=scalars.step,
            grad_scale=scalars.grad_scale,
            seed=scalars.seed,
            out=out,
        )

    def set_master(self, format: StateFormat, state: tuple[Tensor, ...], master: Tensor) -> None:
        """See `UpdateRule.set_master`."""
        if format.name not in _STATES:
            kernels.set_master_by_codec(format, state, master)
            return
        kernels.set_master(_packed(format, state), master)

    def convert(
        self,
        source: StateFormat,
        given: tuple[Tensor, ...],
        format: StateFormat,
        state: tuple[Tensor, ...],
    ) -> None:
        """See `UpdateRule.convert`."""
        kernels.convert_by_codec(source, given, format, state)


def _usage(rule: type[Adam]) -> str:
    return f"ot.offload(model, ot.{rule.__name__}(lr=…))"


_STATES: dict[str, type[kernels.State]] = {
    "fp32": kernels.Fp32State,
    "split16": kernels.Split16State,
    "int8": kernels.Int8State,
}


def _packed(format: StateFormat, tensors: tuple[Tensor, ...]) -> kernels.State:
    return _STATES[format.name](*tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2).

    The bits are those of `torch.optim.AdamW(fused=True)` on the CPU.
    """

    weight_decay: float = 1e-2

    decoupled: ClassVar[bool] = True
