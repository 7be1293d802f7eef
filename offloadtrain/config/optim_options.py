"""The [optim] section of a job, and what of it cannot stand together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offloadtrain.config import toml


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The update rule and its schedule.

    Attributes:
        betas: of adamw, adam and lion.
        eps: of adamw, adam and adagrad.
        momentum, dampening, nesterov: of sgd, which keeps a buffer unless `momentum` is 0.
        lr_decay: of adagrad: step t uses lr / (1 + (t - 1) * lr_decay), on top of the schedule.
        decay: "matrices": weight decay on parameters of two and more dimensions only.
        warmup_steps: linear warm-up from 0, in steps. Where an override of `train.steps` makes the
            run shorter than the file's warm-up, a tenth of it.
        min_lr_ratio: where the schedule ends, as a share of `lr`.
    """

    name: Literal["adamw", "adam", "lion", "sgd", "adagrad"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
    weight_decay: float = 0.1
    decay: Literal["matrices", "all"] = "matrices"
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1


_KEYS_OF_RULES = {
    "betas": ("adamw", "adam", "lion"),
    "eps": ("adamw", "adam", "adagrad"),
    "momentum": ("sgd",),
    "dampening": ("sgd",),
    "nesterov": ("sgd",),
    "lr_decay": ("adagrad",),
}
"""Keys of [optim] that only some rules read."""


def contradictions(optim: OptimConfig, state: str) -> Iterator[str]:
    """Yield a sentence for each broken rule. `state`: the format of the host state."""
    name = toml.shown(optim.name)
    for key, rules in _KEYS_OF_RULES.items():
        value = getattr(optim, key)
        if optim.name not in rules and value != getattr(OptimConfig(), key):
            yield (
                f"optim.{key} = {toml.shown(value)} is not used by optim.name = {name}, only by "
                f"{', '.join(rules)}; leave it out"
            )
    if optim.nesterov and not (optim.momentum and optim.dampening == 0.0):
        yield "optim.nesterov = true needs optim.momentum above 0 and optim.dampening = 0.0"
    if optim.name == "adagrad" and state == "int8":
        yield (
            'offload.state = "int8" cannot keep the sum of optim.name = "adagrad"; use "fp32" or '
            '"split16"'
        )
