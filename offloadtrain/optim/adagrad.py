"""Adagrad on the host, one pass over a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offloadtrain.optim.kernel_rule import KernelRule, check_not_negative
from offloadtrain.runtime import kernels


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
