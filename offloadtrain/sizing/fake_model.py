"""A copy of a module whose tensors have shapes and no memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offloadtrain.sizing.alike import Run


def fake_model(model: nn.Module, mode: FakeTensorMode, runs: Sequence[Run] = ()) -> Any:
    """Return a copy of a module whose parameters and buffers are fake, on the CPU, without the
    skipped layers of the runs. Ties stay; the module itself, whose tensors may be real or meta,
    does not change."""
    with mode:
        stands_for: dict[int, Any] = {}
        left_out = [model.get_submodule(run.names[at]) for run in runs for at in run.skipped]
        for tensor in _tensors(model, left_out):
            # The data alone: a copy made inside autograd would not be a leaf.
            fake = torch.empty_like(tensor.detach(), device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            stands_for[id(tensor)] = fake
        for name in {run.container for run in runs}:
            container = model.get_submodule(name)
            # The list without the skipped layers; the remaining ones are the same objects.
            short = copy.copy(container)
            remaining = [layer for layer in container.children() if layer not in left_out]
            short._modules = {str(at): layer for at, layer in enumerate(remaining)}
            stands_for[id(container)] = copy.deepcopy(short, stands_for)
        return copy.deepcopy(model, stands_for)


def _tensors(model: nn.Module, left_out: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield parameters and buffers of all modules except these and their submodules."""
    outside = {inner for layer in left_out for inner in layer.modules()}
    for module in model.modules():
        if module not in outside:
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)
