"""Parameter groups: takes torch's forms and puts every trainable parameter in exactly one group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from offloadtrain.engine.checks import ModelError
from offloadtrain.optim import UpdateRule


def normalise_groups(
    model: nn.Module,
    params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
    rule: UpdateRule,
) -> list[dict[str, Any]]:
    """Return `param_groups` with every hyperparameter of the rule filled in and checked.

    Raises:
        ModelError: naming a parameter that is in no group, in two, or not in the model.
        ValueError: for hyperparameters out of range or unknown.
    """
    groups = [{**rule.defaults(), **group} for group in _as_groups(model, params)]
    for group in groups:
        unknown = set(group) - set(rule.defaults()) - {"params", "name", "initial_lr"}
        if unknown:
            raise ValueError(f"unknown keys in a parameter group: {sorted(unknown)}")
        rule.check(group)
    _check_membership(model, [group["params"] for group in groups])
    return groups


def _as_groups(
    model: nn.Module, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    if params is None:
        params = (p for p in model.parameters() if p.requires_grad and p.numel())
    given: list[Any] = list(params)
    if given and isinstance(given[0], dict):
        return [{**group, "params": _listed(group["params"])} for group in given]
    return [{"params": _listed(given)}]


def _listed(params: Any) -> list[nn.Parameter]:
    listed: list[nn.Parameter] = [params] if isinstance(params, nn.Parameter) else list(params)
    return [param for param in listed if param.requires_grad and param.numel()]


def _check_membership(model: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> None:
    names = {p: name for name, p in model.named_parameters()}
    counts: dict[nn.Parameter, int] = {}
    for param in (param for group in groups for param in group):
        if param not in names:
            raise ModelError(
                f"a parameter of shape {tuple(param.shape)} in `params` is not in the model"
            )
        counts[param] = counts.get(param, 0) + 1
    for param, name in names.items():
        if not (param.requires_grad and param.numel()):
            continue
        if counts.get(param, 0) != 1:
            where = "no group" if param not in counts else f"{counts[param]} groups"
            raise ModelError(
                f"trainable parameter '{name}' is in {where} of `params`: put it into exactly one, "
                "or freeze it with requires_grad_(False)"
            )
