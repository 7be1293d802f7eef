"""The calls of the CPU kernels: operands are checked before a byte is written.

[Note: The norm]
The global norm of a gradient has one definition for the host and for ranks: the sum of squares of a
parameter is computed in fp64 (squares of fp32 and narrower are exact there) over segments of 2,048
elements, counted from the parameter's start, the last segment padded with zeros. Within a segment,
element i + 1024 is added to element i for i < 1024, then i + 512, down to 1; segments are added in
order. GPU kernels add in another order: a norm that is measured there agrees with this definition
to a relative 1e-14.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from offloadtrain.config.offload import PRECISIONS
from offloadtrain.runtime.kernels import on_device
from offloadtrain.runtime.kernels.formats import codec_of, cut, set_master_by_codec
from offloadtrain.runtime.kernels.scalars import AdamScalars, BlendScalars, Scalars
from offloadtrain.runtime.kernels.selection import KernelError, active_backend, backend
from offloadtrain.runtime.kernels.state import (
    STATES,
    Fp32State,
    Layout,
    Split16State,
    State,
    pieces,
)
from offloadtrain.step.layout.formats import StateFormat

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FP32 = (torch.float32,)

_BF16 = (torch.bfloat16,)
_MOMENTS = ("momentum_buffer",)

_RIGHT: set[tuple[object, ...]] = set()
"""Operands of updates that have passed the checks: each bucket's are checked once, not in every
step."""
_RIGHT_KEPT = 4096

_NO_ADAM = AdamScalars(lr=0.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, step=1)


def update(
    state: State,
    grad: Tensor,
    scalars: Scalars,
    *,
    working: Tensor | None = None,
    layout: Layout | None = None,
    out: State | None = None,
) -> None:
    """Run one step of the update rule of `scalars` over a bucket, in one pass.

    Order: scale the gradient, decay, moments, bias correction, update, round to the state's format.
    With Fp32State the arithmetic is that of torch's fused optimizers on the CPU, to the bit: Adam,
    AdamW, SGD, Adagrad. Lion follows its authors' code, with torch's fused multiply-adds. With
    other states it is the same arithmetic between decoding and encoding.

    Args:
        state: the state to read; also written, unless `out` is given.
        grad: (n,) fp32, bf16 or fp16.
        working: only with Fp32State, (n,) fp32, bf16 or fp16: receives the new master rounded to
            nearest even, NaN preserved. May be the memory of `grad` if their elements have the
            same size. In other states, `weight` is the working weight.
        layout: required for Split16State and Int8State; elements outside of it do not change.
        out: state in other memory that receives the new values by streaming stores; `state` does
            not change.

    Raises:
        TypeError, ValueError: nothing has been written.
    """
    if grad.is_cuda:
        if out is not None:
            raise TypeError("on a GPU the state is updated in place")
        _update_on_device(state, grad, working, layout, scalars)
        return
    target = state if out is None else out
    _check_update(state, target, grad, working, layout, scalars)
    active_backend().update(state, target, grad, working, layout, scalars)


def _update_on_device(
    state: State, grad: Tensor, working: Tensor | None, layout: Layout | None, scalars: Scalars
) -> None:
    if isinstance(state, Fp32State):
        on_device.update(state, grad, working, scalars)
    elif isinstance(scalars, AdamScalars) and layout is not None:
        on_device.update_narrow(state, grad, layout, scalars)
    else:
        raise TypeError(f"on a GPU {type(scalars).__name__} is for Fp32State")


def accumulate(total: Tensor, grad: Tensor, first: bool) -> None:
    """total = grad (if `first`) or total + grad, in fp32.

    Args:
        total: (n,) fp32.
        grad: (n,) fp32, bf16 or fp16.
    """
    if grad.is_cuda:
        on_device.accumulate(total, grad, first)
        return
    _check_pair(total, grad)
    active_backend().accumulate(total, grad, first)


def accumulate_squares(
    total: Tensor, grad: Tensor, first: bool, layout: Layout, squares: Tensor
) -> None:
    """`accumulate` the parameters of a layout, and compute their sums of squares in the same pass.

    Args:
        squares: (m,) fp64; the element at each parameter's id is written.
    """
    if grad.is_cuda:
        on_device.accumulate(total, grad, first)
        on_device.sum_squares(total, layout, squares)
        return
    _check_pair(total, grad)
    _check_squares(layout, grad, squares)
    active_backend().accumulate_squares(total, grad, layout, first, squares)


def cast(source: Tensor, target: Tensor) -> None:
    """target = source rounded to nearest even, NaN preserved.

    Args:
        source: (n,) fp32.
        target: (n,) fp32, bf16 or fp16.
    """
    if source.is_cuda:
        target.copy_(source)
        return
    _check_pair(source, target)
    active_backend().cast(source, target)


def sum_squares(values: Tensor) -> float:
    """Return the sum of squares of a 1-D tensor, accumulated in fp64; see [Note: The norm]. It is
    not finite if a value is not."""
    squares = torch.zeros(1, dtype=torch.float64, device="cpu")
    sum_squares_many(values, Layout.of_one(values.numel()), squares)
    return squares.item()


def sum_squares_many(flat: Tensor, layout: Layout, squares: Tensor) -> None:
    """`sum_squares` of each parameter in a flat buffer.

    Args:
        flat: (n,) fp32, bf16 or fp16.
        squares: (m,) fp64; the element at each parameter's id is written.
    """
    if flat.is_cuda:
        on_device.sum_squares(flat, layout, squares)
        return
    _check_operand("flat", flat, _FLOATS)
    _check_squares(layout, flat, squares)
    active_backend().sum_squares(flat, layout, squares)


def sum_squares_each(tensors: Sequence[tuple[int, Tensor]], squares: Tensor) -> None:
    """`sum_squares` of parameters in separate memory.

    Args:
        tensors: (id, values) for each: all fp32, bf16 or fp16, of one dtype, any dense shape,
            in the order of their memory; at least one.
        squares: (m,) fp64; the element at each id is written.
    """
    if squares.is_cuda:
        on_device.sum_squares_each(tensors, squares)
        return
    _check_operand("squares", squares, (torch.float64,))
    dtype = tensors[0][1].dtype
    for id, values in tensors:
        if values.dtype is not dtype or dtype not in _FLOATS or not values.is_cpu:
            raise TypeError(f"values must be {dtype} on the CPU: {_describe(values)}")
        if not 0 <= id < squares.numel():
            raise ValueError(f"squares has {squares.numel()} elements, none at {id}")
        _check_address("values", values)
    active_backend().sum_squares_each(tensors, squares)


def copy(source: Tensor, target: Tensor) -> None:
    """target = source, of equal dtype and size, on the kernels' threads."""
    if source.is_cuda:
        target.copy_(source)
        return
    _check_operand("source", source, (source.dtype,))
    _check_operand("target", target, (source.dtype,), source.numel())
    _check_disjoint({"source": source, "target": target})
    active_backend().copy_flat(source, target)


def zero(memory: Tensor) -> None:
    """memory = 0, on the kernels' threads."""
    if memory.is_cuda:
        memory.zero_()
        return
    _check_operand("memory", memory, _FLOATS)
    active_backend().zero_flat(memory)


def set_master(state: State, master: Tensor) -> None:
    """Set the master weights, rounded to nearest if the format is narrower.

    Args:
        master: (n,) fp32, on the state's device.
    """
    if isinstance(state, Fp32State) and master.is_cpu:
        copy(master, state.master)
    elif state[0].is_cpu and backend().name == "native":
        _check_master(state, master)
        active_backend().set_master(state, master)
    else:
        set_master_by_codec(state.format, state, master)


def read_master(
    format: StateFormat, moments: Sequence[str], state: tuple[Tensor, ...], target: Tensor
) -> None:
    """Decode the master weights of state in any format.

    Args:
        state: the format's fields for `moments`.
        target: (n,) fp32, on the host.
    """
    kind = STATES.get(format.name)
    if kind is not None and kind is not Fp32State and state[0].is_cpu:
        packed = kind(state)
        _check_master(packed, target)
        active_backend().read_master(packed, target)
        return
    fields = format.fields(moments)
    # In pieces: codecs decode moments into memory of the same size.
    for lo, hi in pieces(target.numel()):
        target[lo:hi] = codec_of(format).load(cut(fields, state, lo, hi))[0]


def traffic(state: Fp32State, grad: Tensor, working: Tensor) -> None:
    """Move the 28 bytes per parameter of Adam with almost no arithmetic: an upper bound for its
    speed. The contents are meaningless afterwards.

    Args:
        grad, working: (n,) bf16, not the same memory.

    Raises:
        KernelError: the native kernels are not active.
    """
    _check_update(state, state, grad, working, None, _NO_ADAM)
    if grad.element_size() != 2 or working.element_size() != 2:
        raise TypeError(f"grad and working must be of 16 bits, not {grad.dtype}, {working.dtype}")
    if backend().name != "native":
        raise KernelError("the traffic loop exists only in the native kernels")
    active_backend().traffic(state, grad, working)


def first_touch(memory: Tensor) -> None:
    """Fault in the pages of a new buffer, each by the thread that will use it: this places them
    on the thread's NUMA node.

    Args:
        memory: (n,) zeros of any dtype in a fresh mapping, split as the kernels split buffers of n
            elements. Zeros after the call.
    """
    if memory.device.type != "cpu" or memory.dim() != 1 or not memory.is_contiguous():
        raise TypeError(f"memory must be 1-D, contiguous and on the CPU, not {_describe(memory)}")
    _check_alive("memory", memory)
    active_backend().first_touch(memory)


# The host's part of a rule for matrices: the moving average of gradients, and the masters, one
# pass each. In between, the device orthogonalizes the direction.


def blend(
    state: State, grad: Tensor, target: Tensor, layout: Layout, scalars: BlendScalars
) -> None:
    """Update the moving average from a gradient, and write the direction, with torch's lerp.

    Masters and elements outside of the layout do not change.

    Args:
        state: Fp32State or Split16State with one moment; the average changes.
        grad: (n,) fp32, bf16 or fp16.
        target: (n,) bf16; may start at the address of `grad`, which is then overwritten.

    Raises:
        TypeError, ValueError: nothing has been written.
    """
    if grad.is_cuda:
        on_device.blend(state, grad, target, layout, scalars)
        return
    _check_matrices(state, layout, {"grad": grad, "target": target})
    active_backend().blend(state, grad, target, layout, scalars)


def subtract(
    state: State,
    update: Tensor,
    working: Tensor | None,
    layout: Layout,
    *,
    decay: float,
    rates: Sequence[float],
) -> None:
    """master = master * decay - update * rate, the second product not rounded.

    Args:
        state: Fp32State or Split16State with one moment; masters change.
        update: (n,) bf16. May start at the address of `working`, and is then overwritten.
        working: with Fp32State, (n,) fp32, bf16 or fp16: receives the new masters, rounded, and
            zero outside of the layout.
        rates: one per parameter of the layout.

    Raises:
        TypeError, ValueError: nothing has been written.
    """
    if len(rates) != layout.count:
        raise ValueError(f"{len(rates)} rates for {layout.count} parameters")
    if update.is_cuda:
        on_device.subtract(state, update, working, layout, decay, rates)
        return
    if working is not None and state.format.holds_weight:
        raise TypeError("the weight of this state is its own working weight: pass no working")
    operands = {"update": update} if working is None else {"working": working, "update": update}
    _check_matrices(state, layout, operands)
    active_backend().subtract(state, update, working, layout, decay, rates)


# Checks.


def _check_update(
    state: State,
    out: State,
    grad: Tensor,
    working: Tensor | None,
    layout: Layout | None,
    scalars: Scalars,
) -> None:
    """Raises TypeError or ValueError for operands that `kernels.update` does not accept."""
    if scalars.step < 1:
        raise ValueError(f"step = {scalars.step}: optimizer steps count from 1")
    key = (type(state), type(out), out is state, working is None, len(state), scalars.moments)
    outputs = [*(() if out is state else out), *(() if working is None else (working,))]
    form = _form((*key, layout and layout.extent), [*state, grad, *outputs])
    if form in _RIGHT:
        return
    if not isinstance(state, State) or type(out) is not type(state):
        raise TypeError(f"state and out must be one kind of state, not {type(state)}, {type(out)}")
    _check_operand("grad", grad, _FLOATS)
    numel = grad.numel()
    names = _check_state(state, numel, scalars.moments)
    operands = dict(zip(names, state, strict=True)) | {"grad": grad}
    if out is not state:
        _check_state(out, numel, scalars.moments)
        if out[0].dtype is not state[0].dtype:
            raise TypeError(f"out is of {out[0].dtype}, state of {state[0].dtype}")
        operands |= {f"out.{name}": x for name, x in zip(names, out, strict=True)}
    if working is not None:
        if state.format.holds_weight:
            raise TypeError("the weight of this state is its own working weight: pass no working")
        _check_operand("working", working, _FLOATS, numel)
        operands["working"] = working
    if state.format.holds_weight:
        _check_layout(layout, numel)
    _check_disjoint(operands)
    # A run has as many entries as buckets; a run with more buckets repeats the checks.
    if len(_RIGHT) >= _RIGHT_KEPT:
        _RIGHT.clear()
    if form is not None:
        _RIGHT.add(form)


def _form(key: tuple[object, ...], tensors: Iterable[Tensor]) -> tuple[object, ...] | None:
    """Return the properties of tensors that the checks read: equal properties pass again. None
    if one is not a dense tensor: the checks then describe the error."""
    try:
        return (*key, *map(_form_of, tensors))
    except (AttributeError, RuntimeError):
        return None


def _form_of(tensor: Tensor) -> tuple[object, ...]:
    extent = tensor.data_ptr(), tensor.numel(), tensor.storage_offset()
    storage = tensor.untyped_storage().nbytes(), tensor.dtype, tensor.is_cpu
    return (*extent, *storage, tensor.dim(), tensor.is_contiguous())


def _check_state(state: State, numel: int, moments: tuple[str, ...]) -> Sequence[str]:
    """Return the names of the state's fields.

    Raises:
        TypeError, ValueError: unless `state` has `numel` elements and these moments.
    """
    wanted = _fields(type(state), moments)
    if len(wanted) != len(state):
        raise TypeError(
            f"{state.format.name} state of {', '.join(moments) or 'no moments'} has {len(wanted)} "
            f"fields, not {len(state)}"
        )
    for (name, allowed, per), tensor in zip(wanted, state, strict=True):
        _check_operand(name, tensor, allowed, -(-numel // per))
    return [name for name, _, _ in wanted]


@lru_cache(maxsize=64)
def _fields(
    kind: type[State], moments: tuple[str, ...]
) -> tuple[tuple[str, tuple[torch.dtype, ...], int], ...]:
    """Return each field's name, its allowed dtypes, and the number of elements per value.

    Raises:
        TypeError: a state of this kind cannot store these moments.
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


def _check_operand(
    name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...], numel: int | None = None
) -> None:
    """Raises TypeError or ValueError unless it is a live, 1-D, contiguous CPU tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must be {wanted}, not {tensor.dtype}")
    if not tensor.is_cpu or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-D, contiguous and on the CPU: {_describe(tensor)}")
    _check_alive(name, tensor)
    _check_address(name, tensor)
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, {numel} are needed")


def _check_address(name: str, tensor: Tensor) -> int:
    """Return the address of a tensor's values.

    Raises:
        ValueError: it has no memory, like a fake tensor.
    """
    address: int = tensor.data_ptr()
    if not address and tensor.numel():
        raise ValueError(f"{name} has no memory: it is a {type(tensor).__name__}")
    return address


def _check_alive(name: str, tensor: Tensor) -> None:
    """Raises ValueError if the tensor's storage was freed."""
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if end > tensor.untyped_storage().nbytes():
        raise ValueError(f"{name} has been freed: its storage is smaller than it is")


def _check_disjoint(operands: dict[str, Tensor]) -> None:
    """Raises ValueError if two operands share memory, except that working may be grad."""
    extents = sorted([(x.data_ptr(), x.nbytes, name) for name, x in operands.items()])
    before, last = (0, 0), ""
    for start, nbytes, name in extents:
        in_place = before == (start, nbytes) and {last, name} == {"grad", "working"}
        if start < sum(before) and not in_place:
            raise ValueError(f"{last} and {name} overlap in memory")
        before, last = (start, nbytes), name


def _describe(tensor: Tensor) -> str:
    """Describe a tensor in one line."""
    return f"{tensor.dtype} {tuple(tensor.shape)} stride {tensor.stride()} on {tensor.device}"


def _check_pair(full: Tensor, narrow: Tensor) -> None:
    """Check an fp32 operand and a second operand of equal size and any dtype."""
    _check_operand("the fp32 operand", full, _FP32)
    _check_operand("the other operand", narrow, _FLOATS, full.numel())
    _check_disjoint({"the fp32 operand": full, "the other operand": narrow})


def _check_master(state: State, master: Tensor) -> None:
    """Check (n,) fp32 masters and the fields of narrow state that encode them."""
    _check_operand("master", master, _FP32)
    halves = {field.name: tensor for field, tensor in zip(state.format.master, state, strict=False)}
    for name, tensor in halves.items():
        _check_operand(name, tensor, (tensor.dtype,), master.numel())
    _check_disjoint({"master": master} | halves)


def _check_squares(layout: Layout, flat: Tensor, squares: Tensor) -> None:
    _check_operand("squares", squares, (torch.float64,))
    if layout.last_id >= squares.numel():
        raise ValueError(f"squares has {squares.numel()} elements, none at {layout.last_id}")
    if layout.extent > flat.numel():
        raise ValueError(
            f"the layout ends at element {layout.extent}, beyond a buffer of {flat.numel()}"
        )


def _check_matrices(state: State, layout: Layout, operands: dict[str, Tensor]) -> None:
    """Check the operands of a kernel for matrices. The last contains the bf16 matrices that are
    orthogonalized, and may start at the address of another operand, the gradient."""
    if not isinstance(state, Fp32State | Split16State):
        raise TypeError(f"state must be Fp32State or Split16State, not {type(state).__name__}")
    *rest, (last, bf16) = operands.items()
    for name, tensor in rest:
        _check_operand(name, tensor, _FLOATS, bf16.numel())
    _check_operand(last, bf16, _BF16)
    if layout.extent > bf16.numel():
        raise ValueError(f"the layout ends at element {layout.extent}, {last} at {bf16.numel()}")
    names = _check_state(state, bf16.numel(), _MOMENTS)
    apart = dict(zip(names, state, strict=True)) | operands
    if any(tensor.data_ptr() == bf16.data_ptr() for _, tensor in rest):
        del apart[last]
    _check_disjoint(apart)
