"""What the engine needs to know of an optimizer: which state it keeps and how one bucket is
updated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class UpdateRule(Protocol):
    """An optimizer as the engine sees it. Implementations are frozen dataclasses of
    hyperparameters."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The fp32 tensors kept per parameter beside the master weight, e.g. ("exp_avg", …)."""
        ...

    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of a `param_groups` entry."""
        ...

    def check(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError if a group's hyperparameters are out of range."""
        ...

    def update(
        self,
        grad: Tensor,
        master: Tensor,
        state: tuple[Tensor, ...],
        working: Tensor,
        *,
        group: Mapping[str, Any],
        step: int,
        grad_scale: float,
    ) -> None:
        """One step of one bucket, all host tensors of (numel,).

        Args:
            grad: working dtype or fp32; consumed where `working` is the same memory.
            master: fp32, updated in place.
            state: fp32 each, in the order of `state_names`, updated in place.
            working: receives the new master rounded to its dtype.
            group: the hyperparameters to use.
            step: optimizer step, 1-based.
            grad_scale: multiplied into each gradient first (unscaling times clipping).
        """
        ...
