"""Adam and AdamW on the host, one pass over a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from offloadtrain.optim.kernel_rule import KernelRule, check_betas, check_not_negative
from offloadtrain.runtime import kernels


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
