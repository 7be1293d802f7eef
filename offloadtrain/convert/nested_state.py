"""Reads model and optimizer from nested dictionaries, as torch loops and FSDP save them.

`read_trees` finds both; the optimizer's state dict is read as Adam's, by parameter names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from offloadtrain.convert.checkpoint import (
    MOMENTS,
    ForeignCheckpoint,
    ForeignError,
    Group,
    LazyTensor,
    ModelTensor,
    check_weights,
    quoted,
    unwrapper,
)

Moments = dict[str, dict[str, LazyTensor]]

_MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
"""Keys that are preferred if there are several models, such as weight averages."""
_MOST_DEPTH = 4
_VALUES = ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")


def read_trees(
    trees: Sequence[Mapping[Any, Any]], wanted: Sequence[ModelTensor]
) -> ForeignCheckpoint:
    """Find the model's weights and the state of one Adam optimizer, in one or two dictionaries.

    Raises:
        ForeignError: one of them is missing, or there are several.
    """
    tables = [table for tree in trees for table in _tables((), tree)]
    weights = _model([(path, table) for path, table in tables if _is_model(table)])
    optimizers = [table for _, table in tables if _is_optimizer(table)]
    if len(optimizers) != 1:
        raise ForeignError(
            f"it holds {len(optimizers) or 'no'} state of an optimizer (a dictionary of "
            "'state' and 'param_groups'); one is needed, in the same file or with --optimizer"
        )
    unwrap = unwrapper(weights, wanted)
    lazies = {
        unwrap(name): value if isinstance(value, LazyTensor) else LazyTensor.of(value)
        for name, value in weights.items()
    }
    # Check weights first: in an incomplete model, an optimizer's numbers refer to other parameters.
    check_weights(lazies, wanted)
    by_name = {
        name: target
        for target in wanted
        for name in (target.name, *target.aliases)
        if target.is_param
    }
    # In checkpoint order, with tied parameters once.
    params = list(dict.fromkeys(by_name[name] for name in lazies if name in by_name))
    moments, step, groups = _adam_state(optimizers[0], params, unwrap)
    return ForeignCheckpoint(lazies, moments, step, groups)


def _tables(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, table) of every model and optimizer, from the top."""
    if len(path) > _MOST_DEPTH:
        return
    if _is_optimizer(value) or _is_model(value):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tables((*path, str(key)), inner)
    elif isinstance(value, list) and len(value) == 1:
        yield from _tables(path, value[0])


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys()


def _is_model(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    return all(
        isinstance(item, Tensor | LazyTensor) and isinstance(k, str) for k, item in value.items()
    )


def _model(models: Sequence[tuple[tuple[str, ...], Any]]) -> Mapping[str, Any]:
    preferred = [entry for entry in models if entry[0] and entry[0][-1] in _MODEL_KEYS]
    chosen = preferred if len(models) > 1 else models
    if len(chosen) != 1:
        keys = ", ".join(".".join(path) or "the top" for path, _ in models)
        raise ForeignError(
            f"it holds {len(models) or 'no'} dictionary of weights{f' ({keys})' if keys else ''}; "
            f"one is needed, under {', '.join(map(repr, _MODEL_KEYS))}"
        )
    table: Mapping[str, Any] = chosen[0][1]
    return table


def _adam_state(
    optimizer: Mapping[str, Any], params: Sequence[ModelTensor], unwrap: Callable[[str], str]
) -> tuple[Moments, int, list[Group]]:
    """Return (moments by name, step, groups).

    Args:
        params: the parameters in the order in which the optimizer received them.

    Raises:
        ForeignError: it is not Adam's, names are ambiguous, or parameters differ in their steps.
    """
    groups = hyperparameters(optimizer["param_groups"])
    by_key = _names_by_key(groups, optimizer["state"], params, unwrap)
    moments: Moments = {}
    steps: dict[str, float] = {}
    for key, entry in optimizer["state"].items():
        if key not in by_key:
            raise ForeignError(f"the optimizer's state '{key}' is of no parameter in its groups")
        moments[by_key[key]] = _moments(by_key[key], entry)
        steps[by_key[key]] = number(entry.get("step", groups[0].get("step")))
    named = [
        Group(tuple(by_key[key] for key in group["params"]), values_of(group)) for group in groups
    ]
    return moments, one_step(steps), named


def hyperparameters(groups: Any) -> list[dict[str, Any]]:
    """Check the groups of an optimizer, and return them as a list.

    Raises:
        ForeignError: they need an update other than Adam's.
    """
    listed = [groups[key] for key in sorted(groups)] if isinstance(groups, Mapping) else groups
    if not listed or not all(isinstance(group, Mapping) for group in listed):
        raise ForeignError("the optimizer's 'param_groups' are not a list of dictionaries")
    for group in listed:
        if unsupported := [key for key in ("amsgrad", "maximize") if group.get(key)]:
            raise ForeignError(
                f"the optimizer has {unsupported[0]} = True, which no job can go on with"
            )
    return [dict(group) for group in listed]


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that an update depends on."""
    values = {key: group[key] for key in _VALUES if group.get(key) is not None}
    return {
        key: [number(item) for item in value] if isinstance(value, list | tuple) else number(value)
        for key, value in values.items()
    }


def one_step(steps: Mapping[str, float]) -> int:
    """Return the common step of all parameters.

    Raises:
        ForeignError: there is no state, or steps differ; jobs update all parameters together.
    """
    if not steps:
        raise ForeignError(
            "the optimizer has no state yet; to begin with its weights alone, make a folder of "
            "transformers and name it in model.hf"
        )
    for name, step in steps.items():
        if not (1 <= step < 1 << 53 and step.is_integer()):
            raise ForeignError(f"'{name}' is at step {step:g}, which is not a number of steps")
    last = max(steps.values())
    for name, step in steps.items():
        if step != last:
            raise ForeignError(
                f"'{name}' is at step {step:g} and others are at {last:g}; all parameters step "
                "together here"
            )
    return int(last)


def number(value: Any) -> float:
    """Return a plain number, or a tensor with one element, as a float.

    Raises:
        ForeignError: it is neither.
    """
    value = value.read() if isinstance(value, LazyTensor) else value
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, bool | int | float):
        return float(value)
    raise ForeignError(f"the optimizer has {type(value).__name__} where a number is expected")


def _moments(name: str, entry: Any) -> dict[str, LazyTensor]:
    keys = set(entry) - {"step"} if isinstance(entry, Mapping) else set()
    if keys != set(MOMENTS):
        raise ForeignError(
            f"'{name}' has the state {', '.join(sorted(map(str, keys))) or 'nothing'}; Adam's is "
            f"{', '.join(MOMENTS)}"
        )
    values = {key: entry[key] for key in MOMENTS}
    if not all(isinstance(value, Tensor | LazyTensor) for value in values.values()):
        raise ForeignError(f"'{name}' has state that is not a tensor")
    return {
        key: value if isinstance(value, LazyTensor) else LazyTensor.of(value)
        for key, value in values.items()
    }


def _names_by_key(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    params: Sequence[ModelTensor],
    unwrap: Callable[[str], str],
) -> dict[Any, str]:
    """Return state key → parameter name; keys are names, or numbers in the order of the groups."""
    keys = [list(group["params"]) for group in groups]
    flat = [key for of_group in keys for key in of_group]
    if all(isinstance(key, str) for key in flat):
        return {key: unwrap(key) for key in flat}
    named = [group.get("param_names") for group in groups]
    if all(
        isinstance(of_group, list) and len(of_group) == len(k)
        for of_group, k in zip(named, keys, strict=True)
    ):
        pairs = zip(flat, (name for of_group in named for name in of_group or ()), strict=True)
        return {key: unwrap(str(name)) for key, name in pairs}
    order = _in_order([len(of_group) for of_group in keys], params)
    names_by_key = dict(zip(flat, order, strict=True))
    _check_shapes(names_by_key, state, params)
    return names_by_key


def _in_order(sizes: Sequence[int], params: Sequence[ModelTensor]) -> list[str]:
    """Return the names of numbered parameters: all of the model, or all trained ones. Of two
    groups, one has parameters with weight decay (two and more dimensions) and one the others.

    Raises:
        ForeignError: the sizes match neither, or two groups of equal size are ambiguous.
    """
    for candidates in (params, [param for param in params if param.trained]):
        matrices = [param.name for param in candidates if len(param.shape) >= 2]
        vectors = [param.name for param in candidates if len(param.shape) < 2]
        orders: dict[tuple[int, ...], list[str]] = {
            (len(candidates),): [param.name for param in candidates]
        }
        if len(matrices) != len(vectors):
            orders[len(matrices), len(vectors)] = matrices + vectors
            orders[len(vectors), len(matrices)] = vectors + matrices
        if tuple(sizes) in orders:
            return orders[tuple(sizes)]
    raise ForeignError(
        f"the optimizer numbers its parameters, in groups of {', '.join(map(str, sizes))}, and "
        "their names are not certain: save it from torch.optim.AdamW(model.named_parameters()), "
        "which keeps names"
    )


def _check_shapes(
    names_by_key: Mapping[Any, str], state: Mapping[Any, Any], params: Sequence[ModelTensor]
) -> None:
    shapes = {param.name: param.shape for param in params}
    wrong = [
        name
        for key, name in names_by_key.items()
        if isinstance(state.get(key), Mapping)
        and any(tuple(state[key][m].shape) != shapes[name] for m in MOMENTS if m in state[key])
    ]
    if wrong:
        raise ForeignError(
            f"moments are of other shapes than {quoted(wrong)}: the optimizer has its parameters "
            "in another order; save it from torch.optim.AdamW(model.named_parameters()), which "
            "keeps names"
        )
