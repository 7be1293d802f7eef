"""The only entry to the CPU kernels: native (C++, by instruction set), Numba, or plain torch.

Every backend gives the same bits, whatever the instruction set and the number of threads. All
tensors are 1-D, contiguous and on the CPU; anything else is refused before a byte is written. If
the first one is on a GPU, all are, and torch does the work (`on_device`). Start at `update` below,
then `native.py`; `selection.py` picks the backend.

[Note: The norm]
A gradient's global norm has one definition on host and ranks: the sum of squares of a parameter is
taken in fp64 (squares of fp32 and narrower are exact there) over segments of 2,048 elements counted
from the parameter's start, the last padded with zeros. Within a segment, element i is added to
element i + 1024 for i < 1024, then i + 512, down to 1; segments are added in order. Kernels of a
GPU add in an order of their own: a norm that is measured there agrees with this definition to a
relative 1e-14.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadtrain.runtime.kernels import codec, on_device, on_device_narrow
from offloadtrain.runtime.kernels.arguments import (
    check_address,
    check_alive,
    check_disjoint,
    check_operand,
    check_update,
    describe,
)
from offloadtrain.runtime.kernels.codec import to_fp32
from offloadtrain.runtime.kernels.command_capture import KernelCalls, capture, native_lane
from offloadtrain.runtime.kernels.formats import (
    Change,
    Draw,
    RegisteredFormat,
    StateCodec,
    codec_of,
    convert_by_codec,
    cut,
    register_state_format,
    set_master_by_codec,
    update_by_codec,
)
from offloadtrain.runtime.kernels.matrices import blend, subtract
from offloadtrain.runtime.kernels.on_device_narrow import compiles
from offloadtrain.runtime.kernels.scalars import (
    AdagradScalars,
    AdamScalars,
    BlendScalars,
    LionScalars,
    MomentumScalars,
    Scalars,
    SgdScalars,
)
from offloadtrain.runtime.kernels.selection import (
    Backend,
    KernelError,
    active_backend,
    available,
    backend,
    place,
    set_threads,
    start_threads,
    use,
)
from offloadtrain.runtime.kernels.state import (
    BLOCK,
    STATES,
    Fp32State,
    Int8State,
    Layout,
    Split16State,
    State,
    blocks,
    pieces,
)
from offloadtrain.step.layout.formats import StateFormat

__all__ = [
    "BLOCK",
    "STATES",
    "AdagradScalars",
    "AdamScalars",
    "Backend",
    "BlendScalars",
    "Change",
    "Draw",
    "Fp32State",
    "Int8State",
    "KernelCalls",
    "KernelError",
    "Layout",
    "LionScalars",
    "MomentumScalars",
    "RegisteredFormat",
    "Scalars",
    "SgdScalars",
    "Split16State",
    "State",
    "StateCodec",
    "accumulate",
    "accumulate_squares",
    "available",
    "backend",
    "blend",
    "blocks",
    "capture",
    "cast",
    "compiles",
    "convert_by_codec",
    "copy",
    "cut",
    "first_touch",
    "master_of",
    "native_lane",
    "pieces",
    "place",
    "read_master",
    "register_state_format",
    "set_master",
    "set_master_by_codec",
    "set_threads",
    "start_threads",
    "subtract",
    "sum_squares",
    "sum_squares_each",
    "sum_squares_many",
    "to_fp32",
    "traffic",
    "update",
    "update_by_codec",
    "use",
    "zero",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FP32 = (torch.float32,)


def update(
    state: State,
    grad: Tensor,
    scalars: Scalars,
    *,
    working: Tensor | None = None,
    layout: Layout | None = None,
    out: State | None = None,
) -> None:
    """Run one step of a rule over a bucket in one pass: that of the scalars' class.

    Order: scale the gradient, decay, moments, bias correction, update, round to the state's format.
    With Fp32State the arithmetic is that of torch's fused optimizers on the CPU, to the bit: Adam,
    AdamW, SGD, Adagrad. Lion's is that of its authors' code, with torch's fused multiply-adds. With
    the other states it is the same arithmetic between decoding and encoding.

    Args:
        state: the state to read; also written, unless `out` is given.
        grad: (n,) fp32, bf16 or fp16.
        working: with Fp32State only, (n,) fp32, bf16 or fp16: receives the new master rounded to
            nearest even, NaN kept. May be the memory of `grad` itself if their elements have the
            same size. The other states' `weight` is the working weight.
        layout: required for Split16State and Int8State, whose elements outside of it do not change.
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
    check_update(state, target, grad, working, layout, scalars)
    active_backend().update(state, target, grad, working, layout, scalars)


def _update_on_device(
    state: State, grad: Tensor, working: Tensor | None, layout: Layout | None, scalars: Scalars
) -> None:
    if isinstance(state, Fp32State):
        on_device.update(state, grad, working, scalars)
    elif isinstance(scalars, AdamScalars) and layout is not None:
        on_device_narrow.update(state, grad, layout, scalars)
    else:
        raise TypeError(f"on a GPU {type(scalars).__name__} is for Fp32State")


def accumulate(total: Tensor, grad: Tensor, first: bool) -> None:
    """total = grad (first) or total + grad, in fp32.

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
        squares: (m,) fp64; the element of each parameter's id is written.
    """
    if grad.is_cuda:
        on_device.accumulate(total, grad, first)
        on_device.sum_squares(total, layout, squares)
        return
    _check_pair(total, grad)
    _check_squares(layout, grad, squares)
    active_backend().accumulate_squares(total, grad, layout, first, squares)


def cast(source: Tensor, target: Tensor) -> None:
    """target = source rounded to nearest even, NaN kept.

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
        squares: (m,) fp64; the element of each parameter's id is written.
    """
    if flat.is_cuda:
        on_device.sum_squares(flat, layout, squares)
        return
    check_operand("flat", flat, _FLOATS)
    _check_squares(layout, flat, squares)
    active_backend().sum_squares(flat, layout, squares)


def sum_squares_each(tensors: Sequence[tuple[int, Tensor]], squares: Tensor) -> None:
    """`sum_squares` of parameters that lie apart.

    Args:
        tensors: the id of each with its values, fp32, bf16 or fp16, all alike, of any dense shape
            and in the order of their memory; at least one.
        squares: (m,) fp64; the element of each id is written.
    """
    if squares.is_cuda:
        on_device.sum_squares_each(tensors, squares)
        return
    check_operand("squares", squares, (torch.float64,))
    dtype = tensors[0][1].dtype
    for id, values in tensors:
        if values.dtype is not dtype or dtype not in _FLOATS or not values.is_cpu:
            raise TypeError(f"values must be {dtype} on the CPU: {describe(values)}")
        if not 0 <= id < squares.numel():
            raise ValueError(f"squares has {squares.numel()} elements, none at {id}")
        check_address("values", values)
    active_backend().sum_squares_each(tensors, squares)


def copy(source: Tensor, target: Tensor) -> None:
    """target = source, of one dtype and size, on the kernels' threads."""
    if source.is_cuda:
        target.copy_(source)
        return
    check_operand("source", source, (source.dtype,))
    check_operand("target", target, (source.dtype,), source.numel())
    check_disjoint({"source": source, "target": target})
    active_backend().copy_flat(source, target)


def zero(memory: Tensor) -> None:
    """memory = 0, on the kernels' threads."""
    if memory.is_cuda:
        memory.zero_()
        return
    check_operand("memory", memory, _FLOATS)
    active_backend().zero_flat(memory)


def set_master(state: State, master: Tensor) -> None:
    """Set the master weights, rounded to nearest if the format is narrower.

    Args:
        master: (n,) fp32, of the state's device.
    """
    if isinstance(state, Fp32State) and master.is_cpu:
        copy(master, state.master)
    elif state[0].is_cpu and backend().name == "native":
        _check_master(state, master)
        active_backend().set_master(state, master)
    else:
        codec.set_master(state, master)


def master_of(state: State) -> Tensor:
    """The master weights as (n,) fp32: a view for fp32 state, new memory otherwise."""
    if isinstance(state, Fp32State) or not state[0].is_cpu:
        return codec.master_of(state)
    master = torch.empty(state[0].numel(), dtype=torch.float32, device="cpu")
    _check_master(state, master)
    active_backend().read_master(state, master)
    return master


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
        packed = kind(*state)
        _check_master(packed, target)
        active_backend().read_master(packed, target)
        return
    fields = format.fields(moments)
    # In pieces: codecs decode moments beside them.
    for lo, hi in pieces(target.numel()):
        target[lo:hi] = codec_of(format).load(cut(fields, state, lo, hi))[0]


def traffic(state: Fp32State, grad: Tensor, working: Tensor) -> None:
    """Move the 28 bytes per parameter of Adam with next to no arithmetic: the limit to compare
    with. The contents are meaningless afterwards.

    Args:
        grad, working: (n,) bf16, not the same memory.

    Raises:
        KernelError: the native kernels are not active.
    """
    check_update(state, state, grad, working, None, AdamScalars(0.0, 0.0, 0.0, 0.0, 0.0, 1))
    if grad.element_size() != 2 or working.element_size() != 2:
        raise TypeError(f"grad and working must be of 16 bits, not {grad.dtype}, {working.dtype}")
    if backend().name != "native":
        raise KernelError("the traffic loop exists only in the native kernels")
    active_backend().traffic(state, grad, working)


def first_touch(memory: Tensor) -> None:
    """Fault in the pages of a new buffer, each by the thread that will use it, which places them.

    Args:
        memory: (n,) zeros of any dtype in a fresh mapping, split as the kernels split buffers of n
            elements. Zeros after the call.
    """
    if memory.device.type != "cpu" or memory.dim() != 1 or not memory.is_contiguous():
        raise TypeError(f"memory must be 1-D, contiguous and on the CPU, not {describe(memory)}")
    check_alive("memory", memory)
    active_backend().first_touch(memory)


def _check_pair(full: Tensor, other: Tensor) -> None:
    """Check an fp32 operand and another one of as many elements."""
    check_operand("the fp32 operand", full, _FP32)
    check_operand("the other operand", other, _FLOATS, full.numel())
    check_disjoint({"the fp32 operand": full, "the other operand": other})


def _check_master(state: State, master: Tensor) -> None:
    """Check (n,) fp32 masters and the fields of narrow state that stand for them."""
    check_operand("master", master, _FP32)
    halves = {field.name: tensor for field, tensor in zip(state.format.master, state, strict=False)}
    for name, tensor in halves.items():
        check_operand(name, tensor, (tensor.dtype,), master.numel())
    check_disjoint({"master": master} | halves)


def _check_squares(layout: Layout, flat: Tensor, squares: Tensor) -> None:
    check_operand("squares", squares, (torch.float64,))
    if layout.last_id >= squares.numel():
        raise ValueError(f"squares has {squares.numel()} elements, none at {layout.last_id}")
    if layout.extent > flat.numel():
        raise ValueError(
            f"the layout ends at element {layout.extent}, beyond a buffer of {flat.numel()}"
        )
