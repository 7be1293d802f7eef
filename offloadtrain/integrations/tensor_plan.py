"""Models of transformers in parts of their matrices, by the plan that each brings along.

[Note: Kinds of a plan]
`colwise` divides a linear layer by its outputs, `rowwise` by its inputs (Megatron-LM,
arXiv:1909.08053): heads and hidden units between the two are divided. `colwise_gather_output` and
`rowwise_split_input` divide the weights alike, and nothing between them: outputs are gathered, and
inputs are cut. So models train whose code between two matrices needs all of it, as norms over all
heads do (OLMo 2), or slices of queries, keys and values (Phi-3). As this is right for any linear
layer, models without a plan are divided so: each linear layer of their layers by its outputs.

Experts are tensors of three axes, each of whose matrices is divided (`moe_tp_experts`): every part
computes some hidden units of all experts. A `packed` one is two matrices, gate and value, each of
which is divided. Embedding, head and norms stay whole on every rank. A norm of queries or keys sees
the heads of its part only, so that its gradient is summed over the parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from offloadtrain.config.errors import ConfigError
from offloadtrain.engine.partition import partition
from offloadtrain.integrations.tensor_trial import problem_of
from offloadtrain.runtime.mesh import DeviceMesh
from offloadtrain.runtime.tensor_parts import FUSED_ROWS
from offloadtrain.runtime.tensor_styles import (
    divide_linear,
    divide_parameter,
    divided_dim,
    norm_each_head,
    run_with_parts,
    stand_alone,
    sum_last_backward,
    sum_over_parts,
)

_GATHERED, _CUT = "colwise_gather_output", "rowwise_split_input"
_LINEAR = {
    "colwise": (True, False),
    "rowwise": (False, False),
    _GATHERED: (True, True),
    "colwise_rep": (True, True),
    _CUT: (False, True),
    "rowwise_rep": (False, True),
}
"""Kind → `outputs` and `whole` of `divide_linear`."""

_TENSOR = {
    "colwise": (-2, 1),
    "rowwise": (-1, 1),
    "packed_colwise": (-2, 2),
    "packed_rowwise": (-1, 2),
}
"""Kind of a parameter → its divided dimension, and how many matrices are behind each other."""

_PER_HEAD, _LATENT = "replicated_with_grad_allreduce", "mla_kv_a_proj"
_EXPERTS, _OWN, _SUMMED = "moe_tp_experts", "local_params", "all_reduce"
_MODULE = (_PER_HEAD, _LATENT, _EXPERTS, _OWN, _SUMMED)

_WHOLE = ("replicate", "embedding_rowwise", "embedding_colwise")
"""Kinds of what gets and hands on whole tensors, which may stay whole."""

_EVERY_LAYER = "layers.*."


class _Entry(NamedTuple):
    """What a plan says of a module of a layer, or of a parameter that a module owns.

    Attributes:
        param: its name in the module; "": the module is meant.
    """

    path: str
    module: Any
    kind: str
    param: str = ""


def check_plan(model: Any, parts: int) -> None:
    """Raises ConfigError for a model whose plan is not known here, or whose numbers the parts do
    not divide."""
    asked, name = f"ranks.tensor = {parts}", type(model).__name__
    for key, kind in (_brought(model) or {}).items():
        if not _is_known(key, kind):
            known = ", ".join(dict.fromkeys((*_LINEAR, *_TENSOR, *_MODULE, *_WHOLE)))
            raise ConfigError(
                f"{asked}: the tensor parallel plan of {name} has '{key}' = '{kind}', and jobs "
                f"know {known} of its layers. Leave it out"
            )
    entries = list(_entries(model, parts))
    for one in entries:
        if why := _problem(one, entries, parts):
            raise ConfigError(f"{asked}: {why} in {name}. Leave it out")
    if not divided_dims(model, parts):
        raise ConfigError(f"{asked}: {name} has no linear layer that can be divided. Leave it out")
    if why := _trial(model, entries, parts):
        raise ConfigError(f"{asked}: {name}: {why}. Leave it out")
    dropped = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
    if dropped and any(one.kind == "colwise" and not one.param for one in entries):
        raise ConfigError(
            f"{asked}: attention_dropout = {dropped} of config.json would drop the same places in "
            "the heads of all parts. Set it to 0"
        )


def _is_known(key: str, kind: str) -> bool:
    if key.startswith(_EVERY_LAYER):
        return kind in (*_LINEAR, *_TENSOR, *_MODULE, *_WHOLE)
    return kind in (*_WHOLE, _GATHERED, _CUT)  # may stay whole


def _problem(one: _Entry, entries: list[_Entry], parts: int) -> str:
    """Return why an entry cannot be followed; "": it can."""
    if one.param:
        dim, count = _TENSOR[one.kind]
        shape = getattr(one.module, one.param).shape
        owner = one.path.removesuffix(f".{one.param}")
        if not any(e.path == owner and e.kind in (_EXPERTS, _OWN) for e in entries):
            return f"'{one.path}' is a parameter of a module that the plan does not name"
        if shape[dim if len(shape) > 1 else 0] % (count * parts):
            return f"the parts do not divide dimension {dim} of '{one.path}' {list(shape)}"
    elif one.kind in _LINEAR:
        if not _is_linear(one.module):
            return f"'{one.path}' is a {type(one.module).__name__}, not a plain nn.Linear,"
        shape, dim = one.module.weight.shape, _dim(one)
        if shape[dim] % parts:
            return f"the parts do not divide dimension {dim} of '{one.path}' {list(shape)}"
    elif one.kind in (_EXPERTS, _OWN):
        planned = {e.path for e in entries if e.param}
        for name, _ in one.module.named_parameters(recurse=False):
            if f"{one.path}.{name}" not in planned:
                return f"the plan does not divide '{one.path}.{name}'"
        if one.kind == _EXPERTS and _is_torn(one, entries):
            return f"the plan does not divide gate and value of '{one.path}' alike"
    return ""


def _is_torn(experts: _Entry, entries: list[_Entry]) -> bool:
    """Tell whether a part would hold a gate of hidden units, and the value of others."""
    if not hasattr(experts.module, "is_concatenated"):  # it does not say how they are stored
        return False
    behind = experts.module.has_gate and experts.module.is_concatenated
    kinds = [e.kind for e in entries if e.path == f"{experts.path}.gate_up_proj"]
    return any((_TENSOR[kind][1] == 2) != behind for kind in kinds)


def _trial(model: Any, entries: list[_Entry], parts: int) -> str:
    """Return why the model's code cannot run in parts; see [Note: A trial in parts]."""
    linears: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    for one in entries:
        if one.kind == _EXPERTS:
            width = model.config.get_text_config().hidden_size
            linears[one.path] = (width, width), (width, width)
        elif one.kind in _LINEAR and not one.param:
            outputs, whole = _LINEAR[one.kind]
            taken, made = one.module.weight.shape[:: 1 if _dim(one) == int(outputs) else -1]
            in_part = (taken, made // parts) if outputs else (taken // parts, made)
            linears[one.path] = (taken, made), (taken, made) if whole else in_part
    tensors = {one.path: _dim(one) for one in entries if one.param}
    summed = [one.path for one in entries if one.kind == _PER_HEAD]
    return problem_of(model, linears, tensors, summed, parts)


def divided_dims(model: Any, parts: int) -> dict[str, int]:
    """Return name of a parameter → the dimension that is divided."""
    found: dict[str, int] = {}
    for one in _entries(model, parts):
        if one.param:
            found[one.path] = _dim(one)
        elif one.kind in _LINEAR:
            found[f"{one.path}.weight"] = _dim(one)
            if _LINEAR[one.kind][0] and one.module.bias is not None:
                found[f"{one.path}.bias"] = 0
    return found


def narrowed(model: Any, parts: int) -> None:
    """Make the parameters of a model on the meta device as large as a part of them: of the sizes of
    `divide`, without any rank but this one. What is gathered, or cut, has its sizes, too."""
    for one in _entries(model, parts) if parts > 1 else ():
        if one.kind in _LINEAR and not one.param:
            stand_alone(one.module, parts, *_LINEAR[one.kind])
    for name, dim in divided_dims(model, parts).items() if parts > 1 else ():
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
    for one in list(_entries(model, mesh.size())):
        if one.param:
            _divide_tensor(one, mesh)
        elif one.kind in _LINEAR:
            outputs, whole = _LINEAR[one.kind]
            divide_linear(one.module, mesh, outputs=outputs, whole=whole)
        elif one.kind == _PER_HEAD:
            norm_each_head(one.module, mesh)
        elif one.kind == _LATENT:
            width = model.config.get_text_config().qk_rope_head_dim
            sum_last_backward(one.module, mesh, width)
        elif one.kind in (_EXPERTS, _OWN):
            run_with_parts(one.module)
        if one.kind in (_EXPERTS, _SUMMED):
            sum_over_parts(one.module, mesh, inputs=one.kind == _EXPERTS)


def _divide_tensor(one: _Entry, mesh: DeviceMesh) -> None:
    dim, count = _dim(one), _TENSOR[one.kind][1]
    rows = getattr(one.module, one.param).shape[dim] // count
    fused = {one.param: (rows,) * count} if count > 1 else {}
    setattr(one.module, FUSED_ROWS, getattr(one.module, FUSED_ROWS, {}) | fused)
    divide_parameter(one.module, one.param, mesh, dim)


def _dim(one: _Entry) -> int:
    """Return the divided dimension of a parameter, or of a linear layer's weight."""
    if one.param:
        axes = getattr(one.module, one.param).ndim
        return _TENSOR[one.kind][0] % axes if axes > 1 else 0
    return divided_dim(one.module, outputs=_LINEAR[one.kind][0])


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _brought(model: Any) -> Mapping[str, str] | None:
    """Return the plan that a model brings along."""
    plan: Mapping[str, str] | None = model.config.get_text_config().base_model_tp_plan
    return plan or None


def _entries(model: Any, parts: int) -> Iterator[_Entry]:
    """Yield what the plan says of every layer; without a plan, that each linear layer is divided by
    its outputs, where the parts divide them."""
    plan = _brought(model)
    for part in partition(model):
        for path, module in part.module.named_modules() if part.repeated else ():
            at, key = f"{part.name}.{path}", _EVERY_LAYER + re.sub(r"\b\d+\b", "*", path)
            if plan is None:
                if _is_linear(module) and not _outputs(module) % parts:
                    yield _Entry(at, module, _GATHERED)
                continue
            if plan.get(key, "replicate") not in _WHOLE:
                yield _Entry(at, module, plan[key])
            for name, _ in module.named_parameters(recurse=False):
                if plan.get(f"{key}.{name}", "replicate") not in _WHOLE:
                    yield _Entry(f"{at}.{name}", module, plan[f"{key}.{name}"], name)


def _outputs(linear: Any) -> int:
    outputs: int = linear.weight.shape[divided_dim(linear, outputs=True)]
    return outputs
