"""A copy of a module whose tensors have shapes and no memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_mode() -> FakeTensorMode:
    """Return the mode of all that follows; tensors that the module keeps as plain attributes may
    stay real."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_model(model: nn.Module, mode: FakeTensorMode) -> Any:
    """Return a copy of a module whose parameters and buffers are fake, on the CPU. Ties stay; the
    module itself, whose tensors may be real or meta, does not change."""
    with mode:
        stands_for: dict[int, Any] = {}
        for param in model.parameters():
            fake = nn.Parameter(_like(param), requires_grad=param.requires_grad)
            stands_for[id(param)] = fake
        for buffer in model.buffers():
            stands_for[id(buffer)] = _like(buffer)
        return copy.deepcopy(model, stands_for)


def _like(tensor: Tensor) -> Tensor:
    # The data alone: a copy made inside autograd would not be a leaf.
    return torch.empty_like(tensor.detach(), device="cpu")
