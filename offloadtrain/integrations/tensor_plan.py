"""Models of transformers in parts of their matrices, by the plan that each brings along: `colwise`
divides a linear layer by rows of its weight, `rowwise` by columns (Megatron-LM, arXiv:1909.08053).

Embedding, head and norms stay whole on every rank. A norm of queries or keys sees the heads of its
part only, so that its gradient is summed over the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from offloadtrain.config.errors import ConfigError
from offloadtrain.engine.partition import partition
from offloadtrain.runtime.mesh import DeviceMesh, divide_linears
from offloadtrain.runtime.tensor_parts import kept_by_columns

_DIMS = {"colwise": 0, "rowwise": 1}
"""The dimension of the weight that is divided."""
_PER_HEAD = "replicated_with_grad_allreduce"
_EVERY_LAYER = "layers.*."


def check_plan(model: Any, parts: int) -> None:
    """Raises ConfigError for a model that brings no plan along, or one that is not known here, or
    whose numbers the parts do not divide."""
    asked, name = f"ranks.tensor = {parts}", type(model).__name__
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(f"{asked}: {name} brings no tensor parallel plan along. Leave it out")
    for key, kind in plan.items():
        if not key.startswith(_EVERY_LAYER) or kind not in (*_DIMS, _PER_HEAD):
            raise ConfigError(
                f"{asked}: the tensor parallel plan of {name} has '{key}' = '{kind}', and jobs "
                f"know {', '.join(_DIMS)} and {_PER_HEAD} of its layers. Leave it out"
            )
    for path, module, dim in _linears(model):
        if type(module) is not nn.Linear:
            raise ConfigError(
                f"{asked}: '{path}' of {name} is a {type(module).__name__}, not a plain nn.Linear"
            )
        if module.weight.shape[dim] % parts:
            raise ConfigError(
                f"{asked} does not divide dimension {dim} of '{path}' {list(module.weight.shape)}"
            )
    dropped = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
    if dropped:
        raise ConfigError(
            f"{asked}: attention_dropout = {dropped} of config.json would drop the same places in "
            "the heads of all parts. Set it to 0"
        )


def divided_dims(model: Any) -> dict[str, int]:
    """Return name of a parameter → the dimension that is divided."""
    found: dict[str, int] = {}
    for path, module, dim in _linears(model):
        found[f"{path}.weight"] = dim
        if dim == 0 and module.bias is not None:
            found[f"{path}.bias"] = 0
    return found


def narrowed(model: Any, parts: int) -> None:
    """Make the parameters of a model on the meta device as large as a part of them: of the sizes of
    `divide`, without any rank but this one."""
    for name, dim in divided_dims(model).items() if parts > 1 else ():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        sizes = list(getattr(module, key).shape)
        sizes[dim] //= parts
        setattr(module, key, nn.Parameter(torch.empty(sizes, device="meta")))


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Make the matrices of every layer DTensors, of which this rank keeps its part of what it has.

    Args:
        mesh: its only axis are the ranks that hold the parts.
    """
    plan = _plan(model)
    for _, layer in _layers(model):
        of_kind: dict[str, list[str]] = {kind: [] for kind in (*_DIMS, _PER_HEAD)}
        for name, kind in plan.items():
            of_kind[kind].append(name)
        divide_linears(
            layer, mesh, of_kind["colwise"], of_kind["rowwise"], per_head=of_kind[_PER_HEAD]
        )
        for name in of_kind["rowwise"]:
            kept_by_columns(cast(nn.Linear, layer.get_submodule(name)))


def _plan(model: Any) -> dict[str, str]:
    """Return name of a module in a layer → its kind."""
    plan = model.config.get_text_config().base_model_tp_plan
    return {name.removeprefix(_EVERY_LAYER): kind for name, kind in plan.items()}


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((part.name, part.module) for part in partition(model) if part.repeated)


def _linears(model: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield name, module and divided dimension of what is divided."""
    plan = _plan(model)
    for path, layer in _layers(model):
        for name, kind in plan.items():
            if kind in _DIMS:
                yield f"{path}.{name}", layer.get_submodule(name), _DIMS[kind]
