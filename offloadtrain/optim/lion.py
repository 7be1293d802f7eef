"""Lion on the host, one pass over a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offloadtrain.optim.kernel_rule import KernelRule, check_betas, check_not_negative
from offloadtrain.runtime import kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Lion(KernelRule):
    """Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated moment, decoupled decay.

    Its steps are larger than Adam's at the same `lr`: the authors use a third to a tenth of it, and
    a decay larger by as much.

    Attributes:
        lr: step size; every element of a weight moves by it, > 0.
        betas: of the interpolation and of the moment, each in [0, 1).
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
