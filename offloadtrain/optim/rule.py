"""What the engine needs to know of an optimizer: which state it keeps and how one bucket is
updated."""

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
        """Whether `update` calls only `offloadtrain.runtime.kernels`, which run without Python's
        interpreter lock."""
        ...

    @property
    def moments(self) -> tuple[str, ...]:
        """What is kept per parameter beside the master weight, e.g. ("exp_avg", …)."""
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
        """One step of one bucket, all host tensors of (numel,).

        Args:
            state: the format's fields for `moments`, updated in place.
            grad: working dtype or fp32; consumed where `working` is the same memory.
            working: receives the new master rounded to its dtype; None where the state holds it.
            layout: which elements are which parameter.
            group: the hyperparameters to use.
            step: optimizer step, 1-based.
            grad_scale: multiplied into each gradient first (unscaling times clipping).
            seed: of stochastic rounding.
            out: other memory of the same fields that receives the new state in place of `state`.
        """
        ...

    def set_master(self, format: StateFormat, state: tuple[Tensor, ...], master: Tensor) -> None:
        """Take over (numel,) fp32 master weights; moments stay."""
        ...

    def convert(
        self,
        source: StateFormat,
        given: tuple[Tensor, ...],
        format: StateFormat,
        state: tuple[Tensor, ...],
    ) -> None:
        """Take over state of another format, rounded to nearest where this one is narrower."""
        ...
