"""Model and optimizer in a nested dictionary, as torch's own loops and FSDP save them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from offloadtrain.integrations.foreign.adam import OrderedParam, adam_state
from offloadtrain.integrations.foreign.found import ForeignError, Found, Lazy, Wanted
from offloadtrain.integrations.foreign.match import check_weights
from offloadtrain.integrations.foreign.names import Names

_MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
"""Preferred where there are several models, such as averages of weights."""
_MOST_DEPTH = 4


def found_in(trees: Sequence[Mapping[Any, Any]], wanted: Sequence[Wanted]) -> Found:
    """Find the model's weights and the state of one Adam, in one dictionary or in two.

    Raises:
        ForeignError: there is none of them, or more than one.
    """
    tables = [table for tree in trees for table in _tables((), tree)]
    weights = _model([(path, table) for path, table in tables if _is_model(table)])
    optimizers = [table for _, table in tables if _is_optimizer(table)]
    if len(optimizers) != 1:
        raise ForeignError(
            f"it holds {len(optimizers) or 'no'} state of an optimizer (a dictionary of "
            "'state' and 'param_groups'); one is needed, in the same file or with --optimizer"
        )
    names = Names(list(weights), wanted)
    lazies = {
        names.own(name): value if isinstance(value, Lazy) else Lazy.of(value)
        for name, value in weights.items()
    }
    # First: what is left of a model numbers its parameters otherwise.
    check_weights(lazies, wanted)
    moments, step, groups = adam_state(optimizers[0], _params(lazies, wanted), names)
    return Found(lazies, moments, step, groups)


def _tables(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every model and optimizer, from the top."""
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
    return all(isinstance(item, Tensor | Lazy) and isinstance(k, str) for k, item in value.items())


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


def _params(weights: Mapping[str, Lazy], wanted: Sequence[Wanted]) -> list[OrderedParam]:
    """Return the model's parameters in the order of the source, a tied one once."""
    known = {
        name: target
        for target in wanted
        for name in (target.name, *target.aliases)
        if target.is_param
    }
    in_order = dict.fromkeys(known[name] for name in weights if name in known)
    return [OrderedParam(target.name, target.shape, target.trained) for target in in_order]
