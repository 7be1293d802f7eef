"""Checks of kernel arguments, before a byte is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from offloadtrain.config.offload import PRECISIONS
from offloadtrain.runtime.kernels.scalars import Scalars
from offloadtrain.runtime.kernels.state import Layout, State

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FP32 = (torch.float32,)

_RIGHT: set[tuple[object, ...]] = set()
"""Operands of updates that were found right: each bucket's are checked once, not in every step."""
_RIGHT_KEPT = 4096


def check_update(
    state: State,
    out: State,
    grad: Tensor,
    working: Tensor | None,
    layout: Layout | None,
    scalars: Scalars,
) -> None:
    """Raises TypeError or ValueError for operands that `kernels.update` does not take."""
    if scalars.step < 1:
        raise ValueError(f"step = {scalars.step}: optimizer steps count from 1")
    key = (type(state), type(out), out is state, working is None, len(state), scalars.moments)
    outputs = [*(() if out is state else out), *(() if working is None else (working,))]
    form = _form((*key, layout and layout.extent), [*state, grad, *outputs])
    if form in _RIGHT:
        return
    if not isinstance(state, State) or type(out) is not type(state):
        raise TypeError(f"state and out must be one kind of state, not {type(state)}, {type(out)}")
    check_operand("grad", grad, _FLOATS)
    numel = grad.numel()
    names = check_state(state, numel, scalars.moments)
    operands = dict(zip(names, state, strict=True)) | {"grad": grad}
    if out is not state:
        check_state(out, numel, scalars.moments)
        if out[0].dtype is not state[0].dtype:
            raise TypeError(f"out is of {out[0].dtype}, state of {state[0].dtype}")
        operands |= {f"out.{name}": x for name, x in zip(names, out, strict=True)}
    if working is not None:
        if state.format.holds_weight:
            raise TypeError("the weight of this state is its own working weight: pass no working")
        check_operand("working", working, _FLOATS, numel)
        operands["working"] = working
    if state.format.holds_weight:
        _check_layout(layout, numel)
    check_disjoint(operands)
    # A run has as many as it has buckets; one with more pays for the check.
    if len(_RIGHT) >= _RIGHT_KEPT:
        _RIGHT.clear()
    if form is not None:
        _RIGHT.add(form)


def _form(key: tuple[object, ...], tensors: Iterable[Tensor]) -> tuple[object, ...] | None:
    """Return all that the checks ask of tensors: what was right in this form is right again. None
    for what is no dense tensor, or none at all: the checks say what is wrong."""
    try:
        return (*key, *map(_form_of, tensors))
    except (AttributeError, RuntimeError):
        return None


def _form_of(tensor: Tensor) -> tuple[object, ...]:
    extent = tensor.data_ptr(), tensor.numel(), tensor.storage_offset()
    storage = tensor.untyped_storage().nbytes(), tensor.dtype, tensor.is_cpu
    return (*extent, *storage, tensor.dim(), tensor.is_contiguous())


def check_state(state: State, numel: int, moments: tuple[str, ...]) -> Sequence[str]:
    """Return the names of its fields.

    Raises:
        TypeError, ValueError: unless `state` is one of `numel` elements, with these moments.
    """
    wanted = _fields(type(state), moments)
    if len(wanted) != len(state):
        raise TypeError(
            f"{state.format.name} state of {', '.join(moments) or 'no moments'} has {len(wanted)} "
            f"fields, not {len(state)}"
        )
    for (name, allowed, per), tensor in zip(wanted, state, strict=True):
        check_operand(name, tensor, allowed, -(-numel // per))
    return [name for name, _, _ in wanted]


@lru_cache(maxsize=64)
def _fields(
    kind: type[State], moments: tuple[str, ...]
) -> tuple[tuple[str, tuple[torch.dtype, ...], int], ...]:
    """Each field's name, its allowed dtypes, and the elements that share a value of it.

    Raises:
        TypeError: a state of this kind does not keep these moments.
    """
    format = kind.format
    if not format.keeps_moments(moments):
        raise TypeError(f"{format.name} state cannot keep {', '.join(moments)}")
    weights = [PRECISIONS[precision] for precision in format.precisions]
    return tuple(
        (
            field.name,
            tuple(getattr(torch, name) for name in ([field.dtype] if field.dtype else weights)),
            field.per,
        )
        for field in format.fields(moments)
    )


def _check_layout(layout: Layout | None, numel: int) -> None:
    if layout is None:
        raise TypeError("this state needs a layout: which elements belong to which parameter")
    if layout.extent > numel:
        raise ValueError(f"the layout ends at element {layout.extent}, the buffers at {numel}")


def check_operand(
    name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...], numel: int | None = None
) -> None:
    """Raises TypeError or ValueError unless it is a live, 1-D, contiguous CPU tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must be {wanted}, not {tensor.dtype}")
    if not tensor.is_cpu or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-D, contiguous and on the CPU: {describe(tensor)}")
    check_alive(name, tensor)
    check_address(name, tensor)
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, {numel} are needed")


def check_address(name: str, tensor: Tensor) -> int:
    """Return where its values are.

    Raises:
        ValueError: nowhere, as those of a fake tensor.
    """
    address: int = tensor.data_ptr()
    if not address and tensor.numel():
        raise ValueError(f"{name} has no memory: it is a {type(tensor).__name__}")
    return address


def check_alive(name: str, tensor: Tensor) -> None:
    """Raises ValueError if the storage was freed under the tensor."""
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if end > tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} has been freed: its storage is smaller than it is")


def check_disjoint(operands: dict[str, Tensor]) -> None:
    """Raises ValueError if two share memory, except that working may be grad."""
    extents = sorted([(x.data_ptr(), x.nbytes, name) for name, x in operands.items()])
    before, last = (0, 0), ""
    for start, nbytes, name in extents:
        in_place = before == (start, nbytes) and {last, name} == {"grad", "working"}
        if start < sum(before) and not in_place:
            raise ValueError(f"{last} and {name} overlap in memory")
        before, last = (start, nbytes), name


def describe(tensor: Tensor) -> str:
    """Describe a tensor in one line."""
    return f"{tensor.dtype} {tuple(tensor.shape)} stride {tensor.stride()} on {tensor.device}"
