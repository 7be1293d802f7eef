"""Values of fake tensors that follow from those of the batch.

[Note: Known values]
Forwards ask for values: is a label beyond the vocabulary, is a token padding, is any of a mask set?
A trace has none. But what is asked about is computed from the whole numbers of the batch alone, and
those are given and few. So they are carried along: an operation whose tensors all have values is
computed on these, too. What depends on a weight has none, and whoever asks for it cannot be traced.
A number that is drawn to skip a layer (layer drop) is in the middle of its range: most layers run,
and the plan is for a step in which all do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

_VALUES = "_known_values"
"""Attribute of a fake tensor: a real one with its values."""

_MOST = 1 << 20
"""Values of a tensor that are computed."""


def give_values(fake: Tensor, real: Tensor) -> Tensor:
    """Give a fake tensor the values of a real one of its shape; returns it."""
    setattr(fake, _VALUES, real)
    return fake


def has_values(tensor: Tensor) -> bool:
    """Tell whether a tensor of a batch has values that may be asked for: real whole numbers."""
    is_real = not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"
    return is_real and not tensor.is_floating_point() and tensor.numel() <= _MOST


def with_values(
    compute: Callable[[], Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what `compute`, the operation on fake tensors, returns; with values where those of all
    its tensors are known."""
    if func._overloadpacket is torch.ops.aten.rand and math.prod(args[0]) == 1:
        with _disable_current_modes():
            middle = torch.full(args[0], 0.5)
        return give_values(compute(), middle)
    is_known = all(map(_is_known, tree_leaves((args, kwargs))))
    undefined = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name
    is_known = is_known and not undefined
    try:
        out = compute()
    except (DataDependentOutputException, DynamicOutputShapeException):
        if func is torch.ops.aten.index.Tensor:  # by a mask, whose values alone are asked for
            return func(args[0], _places(args[1]))
        if not is_known:
            raise
        return tree_map_only(Tensor, _faked, _computed(func, args, kwargs))
    if not is_known:
        return out
    made = [one for one in tree_leaves(out) if isinstance(one, FakeTensor)]
    if made and all(one.numel() <= _MOST for one in made):
        real = tree_leaves(_computed(func, args, kwargs))
        for fake, value in zip(tree_leaves(out), real, strict=True):
            if isinstance(fake, FakeTensor):
                give_values(fake, value)
    return out


def _is_known(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or value_of(leaf) is not None


def value_of(tensor: Tensor) -> Tensor | None:
    """Return a real tensor with the values of a fake one, None where they are not known."""
    if isinstance(tensor, FakeTensor):
        found: Tensor | None = getattr(tensor, _VALUES, None)
        return found
    return tensor if has_values(tensor) else None


def numbers_of(tensor: Tensor) -> list[int] | None:
    """Return the values of a 1-D tensor, None where they are not known."""
    known = value_of(tensor)
    if known is None:
        return None
    with _disable_current_modes():
        found: list[int] = known.tolist()
    return found


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    real_args, real_kwargs = tree_map_only(Tensor, value_of, (args, kwargs))
    with _disable_current_modes(), torch.no_grad():
        return func(*real_args, **real_kwargs)


def _faked(real: Tensor) -> Tensor:
    return give_values(torch.empty(real.shape, dtype=real.dtype, device="cpu"), real)


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the indices with the places of marks where masks are known."""
    found: list[Tensor | None] = []
    for index in indices:
        mask = None if index is None or index.dtype is not torch.bool else value_of(index)
        if mask is None:
            found.append(index)
        else:
            with _disable_current_modes():
                places = mask.nonzero(as_tuple=True)
            found += map(_faked, places)
    return found
