"""The host's part of a rule for matrices: the moving average of gradients, and the masters.

One pass each. Between the two the device orthogonalizes the direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadtrain.runtime.kernels import on_device
from offloadtrain.runtime.kernels.arguments import check_disjoint, check_operand, check_state
from offloadtrain.runtime.kernels.scalars import BlendScalars
from offloadtrain.runtime.kernels.selection import active_backend
from offloadtrain.runtime.kernels.state import Fp32State, Layout, Split16State, State

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BF16 = (torch.bfloat16,)
_MOMENTS = ("momentum_buffer",)


def blend(
    state: State, grad: Tensor, target: Tensor, layout: Layout, scalars: BlendScalars
) -> None:
    """Take a gradient into the moving average, and write the direction, with torch's lerp.

    Masters stay, and so does what is outside of the layout.

    Args:
        state: Fp32State or Split16State of one moment; the average changes.
        grad: (n,) fp32, bf16 or fp16.
        target: (n,) bf16; may begin where `grad` does, which is then consumed.

    Raises:
        TypeError, ValueError: nothing has been written.
    """
    if grad.is_cuda:
        on_device.blend(state, grad, target, layout, scalars)
        return
    _check(state, layout, {"grad": grad, "target": target})
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
        state: Fp32State or Split16State of one moment; masters change.
        update: (n,) bf16. May begin where `working` does, and is then consumed.
        working: with Fp32State, (n,) fp32, bf16 or fp16: receives the new masters, rounded, and
            zero outside of the layout.
        rates: of each parameter of the layout.

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
    _check(state, layout, operands)
    active_backend().subtract(state, update, working, layout, decay, rates)


def _check(state: State, layout: Layout, operands: dict[str, Tensor]) -> None:
    """The last operand is bf16; it may begin where the other one does."""
    if not isinstance(state, Fp32State | Split16State):
        raise TypeError(f"state must be Fp32State or Split16State, not {type(state).__name__}")
    *rest, (last, bf16) = operands.items()
    for name, tensor in rest:
        check_operand(name, tensor, _FLOATS, bf16.numel())
    check_operand(last, bf16, _BF16)
    if layout.extent > bf16.numel():
        raise ValueError(f"the layout ends at element {layout.extent}, {last} at {bf16.numel()}")
    names = check_state(state, bf16.numel(), _MOMENTS)
    apart = dict(zip(names, state, strict=True)) | operands
    if any(tensor.data_ptr() == bf16.data_ptr() for _, tensor in rest):
        del apart[last]
    check_disjoint(apart)
