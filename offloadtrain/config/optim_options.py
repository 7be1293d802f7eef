"""The [optim] section of a job, and what of it cannot stand together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offloadtrain.config import toml
from offloadtrain.config.offload import OffloadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The update rule and its schedule.

    Attributes:
        name: of the update rule.
        lr: at its highest; under muon, of its matrices.
        betas: of adamw, adam, lion and lamb; under muon, of its adamw.
        eps: of adamw, adam, adagrad and lamb, whose authors use 1e-6; under muon, of its adamw.
        momentum, dampening, nesterov: of sgd, which keeps a buffer unless `momentum` is 0.
        lr_decay: of adagrad: step t uses lr / (1 + (t - 1) * lr_decay), on top of the schedule.
        max_norm: of lamb: bounds the norm of a tensor in its trust ratio; 0: no bound.
        muon_momentum: of muon; nesterov's, always.
        adjust_lr: of muon: "original": lr times sqrt(max(1, rows / columns)); "match_rms_adamw": lr
            times 0.2 * sqrt(max(rows, columns)).
        adamw_lr: under muon, of all that is no matrix of a layer; the schedule's share of it.
        weight_decay: decoupled, a share of `lr`; of sgd and adagrad an L2 term.
        decay: "matrices": weight decay on parameters of two and more dimensions only.
        schedule: of the rate behind the warm-up.
        warmup_steps: linear warm-up from 0, in steps. Where an override of `train.steps` makes the
            run shorter than the file's warm-up, a tenth of it.
        min_lr_ratio: where the schedule ends, as a share of `lr`.
    """

    name: Literal["adamw", "adam", "lion", "sgd", "adagrad", "lamb", "muon"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
    max_norm: float = 0.0
    muon_momentum: float = 0.95
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"
    adamw_lr: float = 3e-4
    weight_decay: float = 0.1
    decay: Literal["matrices", "all"] = "matrices"
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1


_KEYS_OF_RULES = {
    "betas": ("adamw", "adam", "lion", "lamb", "muon"),
    "eps": ("adamw", "adam", "adagrad", "lamb", "muon"),
    "momentum": ("sgd",),
    "dampening": ("sgd",),
    "nesterov": ("sgd",),
    "lr_decay": ("adagrad",),
    "max_norm": ("lamb",),
    "muon_momentum": ("muon",),
    "adjust_lr": ("muon",),
    "adamw_lr": ("muon",),
}
"""Keys of [optim] that only some rules read."""


def contradictions(optim: OptimConfig, offload: OffloadConfig) -> Iterator[str]:
    """Yield a sentence for each broken rule."""
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
    if optim.name == "adagrad" and offload.state.format == "int8":
        yield (
            'offload.state = "int8" cannot keep the sum of optim.name = "adagrad"; use "fp32" or '
            '"split16"'
        )
    if optim.name == "muon" and offload.state.format == "int8":
        yield (
            'offload.state = "int8" rounds masters and moments together, which optim.name = "muon" '
            'writes at two times; use "fp32" or "split16"'
        )
    on_device = offload.state.device_share or offload.state.tier == "auto"
    if optim.name == "muon" and offload.state.format == "split16" and on_device:
        yield (
            'offload.state = "split16" of optim.name = "muon" is for state on the host: the '
            'device\'s kernels for matrices are of fp32 state; use "fp32", or offload.state_on = '
            '"host"'
        )
    if optim.name == "muon" and offload.update == "speculative":
        yield (
            'offload.update = "speculative" needs the gradient of a wrong guess again, over which '
            'optim.name = "muon" orthogonalizes; use "exact" or "delayed"'
        )
