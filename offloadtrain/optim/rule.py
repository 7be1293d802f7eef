"""The engine's interface to optimizers: the state they keep and the update of one bucket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from offloadtrain.runtime.kernels import Layout
from offloadtrain.step.formats import StateFormat


class UpdateRule(Protocol):
    """An optimizer as the engine sees it. Implementations are frozen dataclasses of
    hyperparameters."""

    @property
    def calls_only_kernels(self) -> bool:
        """`update` calls only `offloadtrain.runtime.kernels`, which run without the GIL."""
        ...

    @property
    def moments(self) -> tuple[str, ...]:
        """State per parameter besides the master weight, e.g. ("exp_avg", …)."""
        ...

    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of a `param_groups` entry."""
        ...

    def check(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError if a group's hyperparameters are out of range."""
        ...

    def update(
        self,
        format: StateFormat,
        state: tuple[Tensor, ...],
        grad: Tensor,
        working: Tensor | None,
        layout: Layout,
        *,
        group: Mapping[str, Any],
        step: int,
        grad_scale: float,
        seed: int,
        out: tuple[Tensor, ...] | None = None,
    ) -> None:
        """Update one bucket; all tensors are host tensors of (numel,).

        Args:
            state: the format's fields for `moments`, updated in place.
            grad: working dtype or fp32; consumed where `working` is the same memory.
            working: receives the new master rounded to its dtype; None if the state contains it.
            layout: the elements of each parameter.
            group: the hyperparameters to use.
            step: optimizer step, 1-based.
            grad_scale: multiplied into each gradient first (unscaling times clipping).
            seed: of stochastic rounding.
            out: memory with the same fields that receives the new state instead of `state`.
        """
        ...

    def set_master(self, format: StateFormat, state: tuple[Tensor, ...], master: Tensor) -> None:
        """Set the master weights from (numel,) fp32; moments do not change."""
        ...

    def convert(
        self,
        source: StateFormat,
        given: tuple[Tensor, ...],
        format: StateFormat,
        state: tuple[Tensor, ...],
    ) -> None:
        """Convert state of another format, rounded to nearest if this one is narrower."""
        ...
