"""The update rule of a job, and its parameter groups."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch

from offloadtrain import optim
from offloadtrain.config.job import Config
from offloadtrain.config.sections import OptimConfig

_RULES: dict[str, Any] = {
    "adamw": optim.AdamW,
    "adam": optim.Adam,
    "lion": optim.Lion,
    "sgd": optim.SGD,
    "adagrad": optim.Adagrad,
}
"""Maps the name in a job to a rule. The rule's fields are keys of `OptimConfig` with the same names
and types. A rule with different fields needs a branch in `update_rule`."""


def update_rule(chosen: OptimConfig) -> optim.AnyRule:
    """Return the rule that the job selects."""
    if chosen.name == "muon":
        rest = optim.AdamW(
            lr=chosen.adamw_lr,
            betas=chosen.betas,
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
        )
        return optim.Muon(
            lr=chosen.lr,
            weight_decay=chosen.weight_decay,
            momentum=chosen.muon_momentum,
            adjust_lr_fn=chosen.adjust_lr,
            rest=rest,
        )
    if chosen.name == "lamb":
        return optim.LAMB(
            lr=chosen.lr,
            betas=chosen.betas,
            eps=chosen.eps,
            weight_decay=chosen.weight_decay,
            max_norm=chosen.max_norm or math.inf,
        )
    rule: type[Any] = _RULES[chosen.name]
    made: optim.UpdateRule = rule(
        **{field.name: getattr(chosen, field.name) for field in fields(rule)}
    )
    return made


def decay_groups(model: torch.nn.Module, config: Config) -> list[dict[str, Any]]:
    """Return parameter groups; with "matrices", norms and biases have no decay."""
    params = [param for param in model.parameters() if param.requires_grad]
    if config.optim.decay == "all":
        return [{"params": params}]
    groups: list[dict[str, Any]] = [
        {"params": [param for param in params if param.ndim >= 2]},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
