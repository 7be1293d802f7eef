"""Parameter groups: accepts torch's forms and puts every trainable parameter in exactly one
group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from offloadtrain.config.errors import ModelError
from offloadtrain.engine.partition import partition
from offloadtrain.optim import AnyRule, MatrixRule, rule_of

_OF_ANY_RULE = {"params", "name", "initial_lr"}


def normalise_groups(
    model: nn.Module,
    params: Iterable[Any] | None,
    rule: AnyRule,
) -> list[dict[str, Any]]:
    """Return `param_groups` with every hyperparameter of their rule filled in and checked.

    Under a `MatrixRule`, a group without `group_key` is split into matrices and other parameters.

    Args:
        params: parameters, (name, parameter) or groups of either; None: all trained ones.

    Raises:
        ModelError: a parameter is in no group, in two, or not in the model; or a parameter in a
            group of matrices is not a matrix.
        ValueError: for hyperparameters out of range or unknown.
    """
    if params is None:
        params = (p for p in model.parameters() if p.requires_grad and p.numel())
    items: list[Any] = list(params)
    if not (items and isinstance(items[0], dict)):
        items = [{"params": items}]
    user_groups = [{**group, "params": listed(group["params"])} for group in items]
    check_trained(model, user_groups)
    return completed_groups(model, user_groups, rule, are_all=True)


def completed_groups(
    model: nn.Module, user_groups: Sequence[dict[str, Any]], rule: AnyRule, *, are_all: bool
) -> list[dict[str, Any]]:
    """Return groups with every hyperparameter of their rule filled in and checked.

    Under a `MatrixRule`, a group without `group_key` is split into matrices and other parameters.

    Args:
        are_all: there are no other groups.

    Raises:
        ModelError: a parameter in a group of matrices is not a matrix; or there is no matrix.
        ValueError: for hyperparameters out of range or unknown.
    """
    divided = [*user_groups]
    if isinstance(rule, MatrixRule):
        hidden = hidden_matrices(model)
        labelled = (
            [group] if rule.group_key in group else _halves(group, hidden, rule)
            for group in user_groups
        )
        divided = [*chain.from_iterable(labelled)]
        _check_matrices(model, divided, rule, are_all=are_all)
    groups = [{**rule_of(rule, group).defaults(), **group} for group in divided]
    for group in groups:
        group_rule = rule_of(rule, group)
        unknown = set(group) - set(group_rule.defaults()) - _OF_ANY_RULE
        if isinstance(rule, MatrixRule):
            unknown -= {rule.group_key}
        if unknown:
            raise ValueError(
                f"unknown keys in a parameter group: {sorted(unknown)}, and "
                f"{type(group_rule).__name__} has {sorted(group_rule.defaults())}. For keys that "
                "are your own, set optimizer.param_groups[i][key] after offload()"
            )
        group_rule.check(group)
    return groups


def _check_matrices(
    model: nn.Module, groups: Sequence[dict[str, Any]], rule: MatrixRule, *, are_all: bool
) -> None:
    """Raises ModelError if no group has a matrix, or a group of matrices has another parameter."""
    key = rule.group_key
    matrices = [param for group in groups if group[key] for param in group["params"]]
    if are_all and not matrices:
        raise ModelError(
            f"{type(rule).__name__} found no hidden matrix, a 2-D parameter in a list of layers: "
            f"give it groups, params=[{{'params': …, '{key}': True}}, …]"
        )
    names = {param: name for name, param in model.named_parameters()}
    for param in matrices:
        if param.ndim != 2:
            raise ModelError(
                f"'{names[param]}' of shape {tuple(param.shape)} is in a group with {key} = True "
                f"and is not a matrix: set {key} = False for it"
            )


def _halves(
    group: dict[str, Any], hidden: set[nn.Parameter], rule: MatrixRule
) -> list[dict[str, Any]]:
    """Split a group, without hyperparameters that only the other rule has."""
    halves = []
    for is_matrix, own_rule, other in ((True, rule, rule.rest), (False, rule.rest, rule)):
        foreign = set(other.defaults()) - set(own_rule.defaults())
        params = [param for param in group["params"] if (param in hidden) == is_matrix]
        if params:
            options = {name: value for name, value in group.items() if name not in foreign}
            halves.append({**options, "params": params, rule.group_key: is_matrix})
    return halves


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the 2-D parameters that are used only by layers of a list, except embeddings."""
    parts = partition(model)
    inside = {param for part in parts if part.repeated for _, param in part.parameters}
    outside = {param for part in parts if not part.repeated for _, param in part.parameters}
    tables = {
        param
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for param in module.parameters(recurse=False)
    }
    return {param for param in inside - outside - tables if param.ndim == 2}


def listed(params: Any) -> list[nn.Parameter]:
    """Return the parameters of a group as a list, without empty parameters and without names."""
    entries = [params] if isinstance(params, nn.Parameter) else list(params)
    as_list = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    return [param for param in as_list if param.numel()]


def check_groups(model: nn.Module, groups: Sequence[dict[str, Any]], rule: AnyRule) -> None:
    """Check `param_groups`, which the user may have changed directly.

    Raises:
        ModelError: as `check_trained`; or a group lacks a hyperparameter, or a group of matrices
            has another parameter.
    """
    check_trained(model, groups)
    key = {rule.group_key} if isinstance(rule, MatrixRule) else set()
    for number, group in enumerate(groups):
        names = key | (set() if key - group.keys() else rule_of(rule, group).defaults().keys())
        if missing := sorted(names - group.keys()):
            raise ModelError(
                f"param_groups[{number}] has no '{missing[0]}': add groups by "
                "optimizer.add_param_group({'params': …})"
            )
    if isinstance(rule, MatrixRule):
        _check_matrices(model, groups, rule, are_all=False)


def check_trained(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ModelError unless each trainable parameter is in exactly one group."""
    names = {p: name for name, p in model.named_parameters()}
    counts: dict[nn.Parameter, int] = {}
    for param in (param for group in groups for param in group["params"]):
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
                "after offload() by optimizer.add_param_group({'params': …}) or "
                "optimizer.param_groups[0]['params'].append(…), or freeze it with "
                "requires_grad_(False)"
            )
