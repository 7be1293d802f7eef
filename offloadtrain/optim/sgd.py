"""SGD on the host, one pass over a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offloadtrain.optim.kernel_rule import KernelRule, check_not_negative
from offloadtrain.runtime import kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD(KernelRule):
    """SGD with momentum, dampening and Nesterov's form as torch has them.

    The bits are those of `torch.optim.SGD(fused=True)` on the CPU. The buffer is kept if `momentum`
    of the rule is not 0; a parameter group may then turn it off, or change it.

    Attributes:
        lr: step size, > 0.
        momentum: decay of the buffer, >= 0; 0: there is no buffer.
        dampening: 1 - dampening of each gradient but the first enters the buffer.
        weight_decay: an L2 term of the gradient, >= 0.
        nesterov: needs momentum and no dampening.
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
