"""Values of fake tensors that follow from values in the batch.

[Note: Known values]
Some forwards read values: is a label beyond the vocabulary, is a token padding, is a mask empty?
Fake tensors have none. But these questions usually depend only on the integers of the batch, which
are known and few. The trace therefore carries known values along: an operation whose inputs all
have values is also computed on them. A tensor that depends on a weight has no values, and a model
that reads its values cannot be traced. A random number that skips a layer (layer drop) is set to
the middle of its range: the plan is for a step in which all layers run.
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
"""Attribute of a fake tensor: a real tensor with its values."""

_MOST = 1 << 20
"""Largest number of elements for which values are computed."""


def give_values(fake: Tensor, real: Tensor) -> Tensor:
    """Attach the values of a real tensor of the same shape to a fake one, and return it."""
    setattr(fake, _VALUES, real)
    return fake


def has_values(tensor: Tensor) -> bool:
    """Return True if a batch tensor has values that a forward may read: a real integer tensor."""
    is_real = not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"
    return is_real and not tensor.is_floating_point() and tensor.numel() <= _MOST


def with_values(
    compute: Callable[[], Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the result of `compute`, the operation on fake tensors, with values if those of all
    inputs are known."""
    if func._overloadpacket is torch.ops.aten.rand and math.prod(args[0]) == 1:
        with _disable_current_modes():
            middle = torch.full(args[0], 0.5)
        return give_values(compute(), middle)
    # Test positional arguments first: flattening the rest is slow, and most operations fail here.
    is_known = all(map(_is_known, args)) and all(map(_is_known, tree_leaves((args, kwargs))))
    undefined = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name
    is_known = is_known and not undefined
    try:
        out = compute()
    except (DataDependentOutputException, DynamicOutputShapeException):
        if func is torch.ops.aten.index.Tensor:  # a boolean index: only the mask's values matter
            return func(args[0], _places(args[1]))
        if not is_known:
            raise
        return tree_map_only(Tensor, _faked, _computed(func, args, kwargs))
    if not is_known:
        return out
    made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)]
    if made and all(leaf.numel() <= _MOST for leaf in made):
        real = tree_leaves(_computed(func, args, kwargs))
        for fake, value in zip(tree_leaves(out), real, strict=True):
            if isinstance(fake, FakeTensor):
                give_values(fake, value)
    return out


def _is_known(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or value_of(leaf) is not None


def value_of(tensor: Tensor) -> Tensor | None:
    """Return a real tensor with the values of a fake one; None if they are unknown."""
    if isinstance(tensor, FakeTensor):
        values: Tensor | None = getattr(tensor, _VALUES, None)
        return values
    return tensor if has_values(tensor) else None


def numbers_of(tensor: Tensor) -> list[int] | None:
    """Return the values of a 1-D tensor; None if they are unknown."""
    known = value_of(tensor)
    if known is None:
        return None
    with _disable_current_modes():
        values: list[int] = known.tolist()
    return values


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    real_args, real_kwargs = tree_map_only(Tensor, value_of, (args, kwargs))
    with _disable_current_modes(), torch.no_grad():
        return func(*real_args, **real_kwargs)


def _faked(real: Tensor) -> Tensor:
    return give_values(torch.empty(real.shape, dtype=real.dtype, device="cpu"), real)


def _places(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the indices with known boolean masks replaced by positions."""
    resolved: list[Tensor | None] = []
    for index in indices:
        mask = None if index is None or index.dtype is not torch.bool else value_of(index)
        if mask is None:
            resolved.append(index)
        else:
            with _disable_current_modes():
                places = mask.nonzero(as_tuple=True)
            resolved += map(_faked, places)
    return resolved


CTC = torch.ops.aten._ctc_loss.Tensor
CTC_BACKWARD = torch.ops.aten._ctc_loss_backward.Tensor


def ctc_loss(
    log_probs_TBC: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """Return the losses, (B,), and the tensor that backward needs: a value per state of the
    alignment; a target of length L has 2 · L + 1 states. If the values of `lengths` are unknown,
    all targets have the largest possible length.

    Args:
        targets: (B, S), or 1-D with all targets concatenated.
        lengths: lengths of the targets, (B,).
    """
    steps, samples, _classes = log_probs_TBC.shape
    known = numbers_of(lengths)
    longest = targets.shape[-1] if known is None else max(known)
    states = log_probs_TBC.new_empty(samples, steps, 2 * longest + 1)
    return log_probs_TBC.new_empty(samples), states


def ctc_loss_backward(_: Tensor, log_probs_TBC: Tensor, *__: Any, **___: Any) -> Tensor:
    """Return the gradient of `log_probs_TBC`."""
    return torch.empty_like(log_probs_TBC)
