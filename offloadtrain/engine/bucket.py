"""Flat layout: how the parameters of a block lie in the buffers that move as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from offloadtrain.transfer import Buffer, Event, Range

ALIGN = 128
"""Elements: every parameter starts on 256 bytes at 16 bit. Misalignment changes a GEMV's bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Where one parameter lies in its bucket's flat buffers (the same elements in each of them).

    Attributes:
        index: position in `model.named_parameters()`: the order in which norms are added.
        shape, stride: of the parameter, so that any dense memory format is kept.
    """

    name: str
    param: nn.Parameter
    index: int
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's elements of a flat buffer, shaped as the parameter."""
        return flat[self.offset : self.offset + self.numel].as_strided(self.shape, self.stride)


@dataclass(slots=True, eq=False)
class Bucket:
    """Parameters of one block with one working dtype and one set of hyperparameters.

    Attributes:
        group: index into `param_groups`.
        numel: of each flat buffer, padding included. Padding holds zeros.
        working: device, working dtype: the weights that compute uses; parameters are views of it.
        master: host, fp32.
        state: host, fp32 each, as the update rule names them.
        grad: host, working dtype: the gradient, then the rounded new weights on their way up.
            None where microbatches are summed.
        grad_sum: host, fp32: the sum over microbatches. None where there is only one.
        grad_free_after: the event after which `grad` no longer holds weights on their way up.
        touched: a gradient of the step in progress is in `grad` or `grad_sum`.
        normed: its sums of squares for this step are launched.
    """

    name: str
    group: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    numel: int
    working: Buffer = field(init=False)
    master: Buffer = field(init=False)
    state: tuple[Buffer, ...] = field(init=False)
    grad: Buffer | None = None
    grad_sum: Buffer | None = None
    grad_free_after: Event | None = None
    touched: bool = False
    normed: bool = False

    @property
    def gradient(self) -> Range:
        """What Adam reads: the sum where there is one, else the only microbatch's gradient."""
        buffer = self.grad_sum or self.grad
        assert buffer is not None
        return buffer.whole


def pack(
    name: str,
    group: int,
    dtype: torch.dtype,
    params: Iterable[tuple[str, nn.Parameter]],
    order: Mapping[nn.Parameter, int],
) -> Bucket:
    """Lay parameters out one after the other, each aligned."""
    slots: list[Slot] = []
    offset = 0
    for full_name, param in params:
        shape, stride = tuple(param.shape), dense_stride(param)
        slots.append(Slot(full_name, param, order[param], offset, param.numel(), shape, stride))
        offset += -(-param.numel() // ALIGN) * ALIGN
    return Bucket(name, group, dtype, tuple(slots), offset)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it is dense (any memory format), else contiguous ones."""
    return tuple(
        torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
    )
