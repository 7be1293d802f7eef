"""Partition of any module tree into the parts that become blocks.

Structure decides, not class names. At the first `ModuleList` or `Sequential` with at least two
children that own parameters, each child is a part, with all modules inside it. Every other module
that owns parameters directly (embeddings, final norm, head) is a part of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

_LAYERS = "_offloadtrain_layers"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A module whose forward uses its parameters together.

    Attributes:
        name: qualified name in the model; "" is the root.
        module: its forward is the span of the block.
        parameters: (qualified name, parameter) of all that it refers to, including tied ones.
        repeated: it is a child of such a list.
        leaf: it has a forward and no children, is outside of such lists, and its parent module
            has no direct parameters: a parent with parameters may read its children's without a
            call, as `nn.MultiheadAttention` does. A `ParameterList` has no forward: its parent
            reads it.
        tied: names of earlier parts that refer to some of the same parameters.
    """

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]
    repeated: bool = False
    leaf: bool = False
    tied: tuple[str, ...] = ()


def partition(model: nn.Module) -> list[Part]:
    """List all parts in registration order; several may refer to the same (tied) parameter."""
    by_module: dict[nn.Module, Part] = {}
    for part in _walk("", model):
        by_module.setdefault(part.module, part)
    first: dict[nn.Parameter, str] = {}
    parts = []
    for part in by_module.values():
        holders = [first.setdefault(param, part.name) for _, param in part.parameters]
        tied = tuple(name for name in dict.fromkeys(holders) if name != part.name)
        parts.append(replace(part, tied=tied))
    return parts


def layers_of(model: nn.Module) -> list[nn.Module]:
    """List the layers of the model's list; a cut model may have a list with a single layer."""
    names = getattr(model, _LAYERS, None)
    if names is None:
        return [part.module for part in partition(model) if part.repeated]
    return [model.get_submodule(name) for name in names]


def remember_layers(model: nn.Module, names: Sequence[str]) -> None:
    """Store the names of the layers in the model; copies of the model keep them."""
    setattr(model, _LAYERS, tuple(names))


def _walk(name: str, module: nn.Module, *, called: bool = False) -> Iterator[Part]:
    """`called`: the module's parameters can only be read by calling the module."""
    params = tuple(_named(name, module, recurse=False))
    if params:
        has_forward = type(module).forward is not nn.Module.forward
        leaf = called and has_forward and next(module.children(), None) is None
        yield Part(name, module, params, leaf=leaf)
    children = [(_join(name, key), child) for key, child in module.named_children()]
    listed = isinstance(module, nn.ModuleList | nn.Sequential)
    if listed and sum(_owns(child) for _, child in children) >= 2:
        for child_name, child in children:
            if _owns(child):
                yield Part(child_name, child, tuple(_named(child_name, child, recurse=True)), True)
        return
    for child_name, child in children:
        yield from _walk(child_name, child, called=not params)


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _named(name: str, module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, nn.Parameter]]:
    for key, param in module.named_parameters(recurse=recurse):
        yield _join(name, key), param


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
