"""A module's parameters, by the parts that become blocks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from offloadtrain.config.hf_model import ParamShape, PartShape
from offloadtrain.engine.checks import keeps_fp32
from offloadtrain.engine.param_groups import hidden_matrices
from offloadtrain.engine.partition import partition


def parts_of_module(
    model: nn.Module, divided: Mapping[str, int] | None = None
) -> tuple[PartShape, ...]:
    """Return the parts of a model, also on the meta device; a parameter in the first that refers to
    it.

    Args:
        divided: name of a parameter → the dimension that parts of it divide.
    """
    dims = divided or {}
    shapes: list[PartShape] = []
    listed: set[nn.Parameter] = set()
    hidden, fp32 = hidden_matrices(model), keeps_fp32(model)
    for part in partition(model):
        new = [(name, param) for name, param in part.parameters if param not in listed]
        listed.update(param for _, param in new)
        params = (
            ParamShape(
                *(name, tuple(p.shape), p.requires_grad, p in hidden, p in fp32),
                divided=dims.get(name),
            )
            for name, p in new
        )
        tied = tuple(name or "root" for name in part.tied)
        shapes.append(PartShape(part.name or "root", tuple(params), part.repeated, part.leaf, tied))
    return tuple(shapes)
