"""This rank's part of a parameter: all of it, or its local part of a DTensor.

Tensor parallelism (`parallelize_module`) replaces parameters by DTensors. Their global shape is
that of the whole matrix; a rank holds a part of it. The engine moves, sums and updates these parts
as it does whole parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from offloadtrain.runtime.tensor_parts import holds_experts, is_distributed


class LocalPart:
    """A DTensor parameter, whose `data` is what this rank holds of it."""

    __slots__ = ("param",)

    def __init__(self, param: Any) -> None:
        self.param = param

    @property
    def data(self) -> Tensor:
        local_tensor: Tensor = self.param._local_tensor
        return local_tensor

    @data.setter
    def data(self, view: Tensor) -> None:
        before = self.data._version
        # Counts writes of its own, as a parameter does whose data is set: not the engine's, into
        # the buffer that is viewed.
        self.param._local_tensor = view.data
        while self.data._version < before:
            increment_version(self.data)

    def of_gradient(self, grad: Any) -> Tensor:
        """Return this rank's part of a gradient. One that is still to be summed is summed here, in
        a collective of the mesh: its ranks run the same backward."""
        if grad.placements != self.param.placements:
            grad = grad.redistribute(placements=self.param.placements)
        local_tensor: Tensor = grad._local_tensor
        return local_tensor

    def move(self, device: torch.device, dtype: torch.dtype) -> None:
        """Make it a DTensor of this dtype on this device, the same object."""
        moved = self.data.to(device, dtype)
        made = nn.Parameter(rebuilt(self.param, moved), self.param.requires_grad)
        torch.utils.swap_tensors(self.param, made)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    local_tensor: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local_tensor


def part_as(param: Any, values: Any) -> Tensor:
    """Return this rank's part of values of a parameter's shape, divided as the parameter is; where
    they are divided otherwise, in a collective of its mesh."""
    if is_distributed(values) and values.placements != param.placements:
        values = values.redistribute(param.device_mesh, param.placements)
    return local(values)


def is_divided(tensor: Any) -> bool:
    """Tell whether ranks of tensor parallel hold parts of it: they all hold the same experts."""
    if not is_distributed(tensor) or holds_experts(tensor):
        return False
    return not all(placement.is_replicate() for placement in tensor.placements)


def rebuilt(like: Any, held: Tensor) -> Tensor:
    """Return a DTensor as `like` whose local part is `held`."""
    made: Tensor = type(like).from_local(
        held,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made
