"""Divides the matrices of transformers models by the tensor parallel plans of these models.

[Note: Kinds of a plan]
`colwise` divides a linear layer by its outputs, `rowwise` by its inputs (Megatron-LM,
arXiv:1909.08053); heads and hidden units between the two are divided. `colwise_gather_output` and
`rowwise_split_input` divide the same weights, but nothing between them: outputs are gathered, and
inputs are cut. They serve models whose code between two matrices needs complete tensors, such as
norms over all heads (OLMo 2), or slices of queries, keys and values (Phi-3). As gathered outputs
are right for any linear layer, models without a plan get them for each linear layer of their
layers.

Experts are three-dimensional tensors, in which each expert's matrix is divided (`moe_tp_experts`):
every part computes some hidden units of all experts. A `packed` tensor consists of two matrices,
gate and value, which are divided separately. Every rank holds embedding, head and norms in full. A
norm of queries or keys gets only the heads of its part, so its gradient is summed over the parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from offloadtrain.config.errors import ConfigError
from offloadtrain.engine.partition import partition
from offloadtrain.parallel.mesh import DeviceMesh
from offloadtrain.parallel.tensor.styles import (
    divide_linear,
    divide_parameter,
    divided_dim,
    norm_each_head,
    run_with_parts,
    shrink,
    stand_alone,
    sum_last_backward,
    sum_over_parts,
)
from offloadtrain.parallel.tensor.trial import problem_of
from offloadtrain.runtime.tensor_parts import FUSED_ROWS

_GATHERED, _CUT = "colwise_gather_output", "rowwise_split_input"
_LINEAR = {
    "colwise": (True, False),
    "rowwise": (False, False),
    _GATHERED: (True, True),
    "colwise_rep": (True, True),
    _CUT: (False, True),
    "rowwise_rep": (False, True),
}
"""Kind of a linear layer → arguments `outputs` and `whole` of `divide_linear`."""

_TENSOR = {
    "colwise": (-2, 1),
    "rowwise": (-1, 1),
    "packed_colwise": (-2, 2),
    "packed_rowwise": (-1, 2),
}
"""Kind of a parameter → its divided dimension, and the number of matrices packed in it."""

_PER_HEAD, _LATENT = "replicated_with_grad_allreduce", "mla_kv_a_proj"
_EXPERTS, _OWN, _SUMMED = "moe_tp_experts", "local_params", "all_reduce"
_MODULE = (_PER_HEAD, _LATENT, _EXPERTS, _OWN, _SUMMED)

_WHOLE = ("replicate", "embedding_rowwise", "embedding_colwise")
"""Kinds of modules with undivided inputs and outputs, which every rank may hold in full."""

_EVERY_LAYER = "layers.*."


class _Entry(NamedTuple):
    """Entry of a plan for a module of a layer, or for a parameter of that module.

    Attributes:
        param: name of the parameter in the module; "" if the entry is for the module.
    """

    path: str
    module: Any
    kind: str
    param: str = ""


def check_plan(model: Any, parts: int) -> None:
    """Raise ConfigError for a model with an unsupported plan, or with sizes that the number of
    parts does not divide."""
    setting, name = f"ranks.tensor = {parts}", type(model).__name__
    for key, kind in (_brought(model) or {}).items():
        if not _is_known(key, kind):
            known = ", ".join(dict.fromkeys((*_LINEAR, *_TENSOR, *_MODULE, *_WHOLE)))
            raise ConfigError(
                f"{setting}: the tensor parallel plan of {name} has '{key}' = '{kind}', and jobs "
                f"know {known} of its layers. Leave it out"
            )
    entries = list(_entries(model, parts))
    for entry in entries:
        if why := _problem(entry, entries, parts):
            raise ConfigError(f"{setting}: {why} in {name}. Leave it out")
    if not divided_dims(model, parts):
        raise ConfigError(
            f"{setting}: {name} has no linear layer that can be divided. Leave it out"
        )
    if why := _trial(model, entries, parts):
        raise ConfigError(f"{setting}: {name}: {why}. Leave it out")
    dropped = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
    if dropped and any(e.kind == "colwise" and not e.param for e in entries):
        raise ConfigError(
            f"{setting}: attention_dropout = {dropped} of config.json would drop the same places "
            "in the heads of all parts. Set it to 0"
        )


def _is_known(key: str, kind: str) -> bool:
    if key.startswith(_EVERY_LAYER):
        return kind in (*_LINEAR, *_TENSOR, *_MODULE, *_WHOLE)
    return kind in (*_WHOLE, _GATHERED, _CUT)  # outside of layers, where nothing needs division


def _problem(entry: _Entry, entries: list[_Entry], parts: int) -> str:
    """Return why an entry is not supported; "" if it is."""
    if entry.param:
        dim, count = _TENSOR[entry.kind]
        shape = getattr(entry.module, entry.param).shape
        owner = entry.path.removesuffix(f".{entry.param}")
        if not any(e.path == owner and e.kind in (_EXPERTS, _OWN) for e in entries):
            return f"'{entry.path}' is a parameter of a module that the plan does not name"
        if shape[dim if len(shape) > 1 else 0] % (count * parts):
            return f"the parts do not divide dimension {dim} of '{entry.path}' {list(shape)}"
    elif entry.kind in _LINEAR:
        if not _is_linear(entry.module):
            return f"'{entry.path}' is a {type(entry.module).__name__}, not a plain nn.Linear,"
        shape, dim = entry.module.weight.shape, _dim(entry)
        if shape[dim] % parts:
            return f"the parts do not divide dimension {dim} of '{entry.path}' {list(shape)}"
    elif entry.kind in (_EXPERTS, _OWN):
        planned = {e.path for e in entries if e.param}
        for name, _ in entry.module.named_parameters(recurse=False):
            if f"{entry.path}.{name}" not in planned:
                return f"the plan does not divide '{entry.path}.{name}'"
        if entry.kind == _EXPERTS and _is_torn(entry, entries):
            return f"the plan does not divide gate and value of '{entry.path}' alike"
    return ""


def _is_torn(experts: _Entry, entries: list[_Entry]) -> bool:
    """Return True if a part would hold gates and values of different hidden units."""
    if not hasattr(experts.module, "is_concatenated"):  # the order in memory is unknown
        return False
    concatenated = experts.module.has_gate and experts.module.is_concatenated
    kinds = [e.kind for e in entries if e.path == f"{experts.path}.gate_up_proj"]
    return any((_TENSOR[kind][1] == 2) != concatenated for kind in kinds)


def _trial(model: Any, entries: list[_Entry], parts: int) -> str:
    """Return why the model's code cannot run in parts; see [Note: A trial in parts]."""
    linears: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    for entry in entries:
        if entry.kind == _EXPERTS:
            width = model.config.get_text_config().hidden_size
            linears[entry.path] = (width, width), (width, width)
        elif entry.kind in _LINEAR and not entry.param:
            outputs, gathers = _LINEAR[entry.kind]
            inputs, made = entry.module.weight.shape[:: 1 if _dim(entry) == int(outputs) else -1]
            in_part = (inputs, made // parts) if outputs else (inputs // parts, made)
            linears[entry.path] = (inputs, made), (inputs, made) if gathers else in_part
    tensors = {e.path: _dim(e) for e in entries if e.param}
    summed = [e.path for e in entries if e.kind == _PER_HEAD]
    return problem_of(model, linears, tensors, summed, parts)


def divided_dims(model: Any, parts: int) -> dict[str, int]:
    """Return name of a parameter → its divided dimension."""
    dims: dict[str, int] = {}
    for entry in _entries(model, parts):
        if entry.param:
            dims[entry.path] = _dim(entry)
        elif entry.kind in _LINEAR:
            dims[f"{entry.path}.weight"] = _dim(entry)
            if _LINEAR[entry.kind][0] and entry.module.bias is not None:
                dims[f"{entry.path}.bias"] = 0
    return dims


def narrowed(model: Any, parts: int) -> None:
    """Reduce the parameters of a model on the meta device to the sizes that `divide` leaves; needs
    no other ranks. Inputs that are cut and outputs that are gathered keep their sizes."""
    for entry in _entries(model, parts) if parts > 1 else ():
        if entry.kind in _LINEAR and not entry.param:
            stand_alone(entry.module, parts, *_LINEAR[entry.kind])
    for name, dim in divided_dims(model, parts).items() if parts > 1 else ():
        path, _, key = name.rpartition(".")
        shrink(model.get_submodule(path), key, dim, parts)


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Turn the matrices of every layer into DTensors; this rank keeps its part of its own values.

    Args:
        mesh: one axis, with the ranks that hold the parts.
    """
    for entry in list(_entries(model, mesh.size())):
        if entry.param:
            _divide_tensor(entry, mesh)
        elif entry.kind in _LINEAR:
            outputs, gathers = _LINEAR[entry.kind]
            divide_linear(entry.module, mesh, outputs=outputs, whole=gathers)
        elif entry.kind == _PER_HEAD:
            norm_each_head(entry.module, mesh)
        elif entry.kind == _LATENT:
            width = model.config.get_text_config().qk_rope_head_dim
            sum_last_backward(entry.module, mesh, width)
        elif entry.kind in (_EXPERTS, _OWN):
            run_with_parts(entry.module)
        if entry.kind in (_EXPERTS, _SUMMED):
            sum_over_parts(entry.module, mesh, inputs=entry.kind == _EXPERTS)


def _divide_tensor(entry: _Entry, mesh: DeviceMesh) -> None:
    dim, count = _dim(entry), _TENSOR[entry.kind][1]
    rows = getattr(entry.module, entry.param).shape[dim] // count
    fused = {entry.param: (rows,) * count} if count > 1 else {}
    setattr(entry.module, FUSED_ROWS, getattr(entry.module, FUSED_ROWS, {}) | fused)
    divide_parameter(entry.module, entry.param, mesh, dim)


def _dim(entry: _Entry) -> int:
    """Return the divided dimension of a parameter, or of a linear layer's weight."""
    if entry.param:
        axes = getattr(entry.module, entry.param).ndim
        return _TENSOR[entry.kind][0] % axes if axes > 1 else 0
    return divided_dim(entry.module, outputs=_LINEAR[entry.kind][0])


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or type(module).__name__ == "Conv1D"


def _brought(model: Any) -> Mapping[str, str] | None:
    """Return the tensor parallel plan of a model; None without one."""
    plan: Mapping[str, str] | None = model.config.get_text_config().base_model_tp_plan
    return plan or None


def _entries(model: Any, parts: int) -> Iterator[_Entry]:
    """Yield the plan's entries for every layer. Without a plan, yield linear layers divided by
    their outputs, if the number of parts divides these."""
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
