"""Ctrl-C inside a forward: torch calls no hook behind it. Whatever runs next in the process, as in
a notebook, has the bits of a process where it has not happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

import offloadtrain as ot

WIDTH = 16
STREAMED = {"working": "host", "device_slots": 2}
SAVED = {"activation": "offload_saved", "offload_saved_above": 1}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.interrupted = False

    def forward(self, x: Tensor) -> Tensor:
        if self.interrupted:
            raise KeyboardInterrupt
        output: Tensor = self.norm(torch.tanh(self.up(x)))
        return output


class Net(nn.Module):
    """A loss of its own, outside of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), torch.arange(len(x)))


def offloaded(**options: Any) -> tuple[Net, ot.OffloadOptimizer]:
    torch.manual_seed(0)
    model = Net()
    options = {"precision": "fp32", **options}
    return model, ot.offload(model, ot.AdamW(lr=1e-2), device="cpu", **options)


def interrupt(model: Net, x: Tensor) -> None:
    """Ctrl-C in the third layer."""
    layer = model.layers[2]
    assert isinstance(layer, Layer)
    layer.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    layer.interrupted = False


def trained(model: Net, optimizer: ot.OffloadOptimizer) -> list[Tensor]:
    """Take two steps; return the masters."""
    for seed in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        optimizer.backward(model(x))
        optimizer.step()
    return [weights for _, weights in optimizer.master_weights()]


def same(some: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, expected, strict=True))


@pytest.mark.cover(1)
@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("activation", [{}, {"activation": "recompute"}, SAVED], ids=str)
@pytest.mark.parametrize("options", [{}, STREAMED], ids=["device", "streamed"])
def test_the_run_goes_on(
    options: dict[str, Any], activation: dict[str, Any], gives_up: bool
) -> None:
    expected = trained(*offloaded())
    model, optimizer = offloaded(**options, **activation)
    interrupt(model, torch.randn(4, WIDTH))
    if gives_up:
        optimizer.zero_grad()
    assert same(trained(model, optimizer), expected)
    interrupt(model, torch.randn(4, WIDTH))
    optimizer.close()


def test_losses_of_others_are_computed_in_their_own_dtype() -> None:
    """Those inside a 16-bit model's forward are computed in fp32."""
    model, optimizer = offloaded(precision="bf16")
    model.head.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, WIDTH))
    logits = torch.randn(4, 8, dtype=torch.bfloat16)
    assert F.cross_entropy(logits, torch.arange(4)).dtype is torch.bfloat16
    assert _get_current_function_mode() is not None
    optimizer.close()
    assert _get_current_function_mode() is None
