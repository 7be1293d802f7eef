"""A copy of a module whose tensors have shapes and no memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offloadtrain.sizing.alike import Run


def fake_mode() -> FakeTensorMode:
    """Return the mode of all that follows; tensors that the module keeps as plain attributes may
    stay real."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_model(model: nn.Module, mode: FakeTensorMode, runs: Sequence[Run] = ()) -> Any:
    """Return a copy of a module whose parameters and buffers are fake, on the CPU, without the
    skipped layers of the runs. Ties stay; the module itself, whose tensors may be real or meta,
    does not change."""
    with mode:
        stands_for: dict[int, Any] = {}
        for param in model.parameters():
            fake = nn.Parameter(_like(param), requires_grad=param.requires_grad)
            stands_for[id(param)] = fake
        for buffer in model.buffers():
            stands_for[id(buffer)] = _like(buffer)
        for run in runs:
            container = model.get_submodule(run.container)
            stands_for[id(container)] = copy.deepcopy(_without(container, run), stands_for)
        return copy.deepcopy(model, stands_for)


def _without(container: nn.Module, run: Run) -> nn.Module:
    """Return a list of layers of which those are left out; those it has are the same."""
    short = copy.copy(container)
    kept = [layer for at, layer in enumerate(container.children()) if at not in run.skipped]
    short._modules = {str(at): layer for at, layer in enumerate(kept)}
    return short


def _like(tensor: Tensor) -> Tensor:
    # The data alone: a copy made inside autograd would not be a leaf.
    return torch.empty_like(tensor.detach(), device="cpu")
