"""`master_weights()`: names and fp32 values in every state format, memory format and placement."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.optim import register_state_format
from tests import levels
from tests.engine.test_extending import Scaled, signum
from tests.numerics.models import Chain, Frozen, batches, loss_of

EXACT = ("fp32", "split16")
LIMIT = {"int8": 2.0**-14, "scaled": 2.0**-14}
"""Of weights below 1, which bf16 keeps to 2**-9 only."""


@pytest.fixture(params=["fp32", "split16", "int8", "scaled"])
def state(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "scaled":
        with register_state_format(Scaled()):
            yield request.param
    else:
        yield request.param


class Pictures(nn.Module):
    """Strides of another order, a buffer, a weight of no elements, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        convs = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.convs = nn.ModuleList(convs).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.empty = nn.Parameter(torch.zeros(0))
        self.head = self.convs[1]

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x)
        output: Tensor = self.norm(self.head(x))
        return output


def train(optimizer: ot.OffloadOptimizer, model: nn.Module) -> None:
    for tokens in batches(2):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()


@levels.each("working", ["device", "host"])
@pytest.mark.parametrize("make", [Chain, Frozen, Pictures])
def test_the_masters_are_the_weights_as_given(make: Any, working: str, state: str) -> None:
    model = make()
    initial = copy.deepcopy(dict(model.named_parameters()))
    frozen = {name for name, param in initial.items() if not param.requires_grad}
    rule = signum() if state == "scaled" else ot.AdamW()
    optimizer = ot.offload(model, rule, device="cpu", state=state, working=working)
    actual = list(optimizer.master_weights())
    assert [name for name, _ in actual] == list(initial)
    for name, value in actual:
        expected = initial[name].detach()
        assert value.dtype == torch.float32 and value.shape == expected.shape
        if name in frozen:
            assert torch.equal(value, expected.bfloat16().float()), name
        elif state in EXACT:
            assert torch.equal(value, expected), name
        else:
            torch.testing.assert_close(value, expected, rtol=0, atol=LIMIT[state])
    optimizer.close()


@pytest.mark.parametrize("update", ["exact", "speculative", "delayed"])
def test_they_follow_the_steps_and_are_copies(update: str, state: str) -> None:
    model = Frozen()
    rule = signum() if state == "scaled" else ot.AdamW(lr=1e-2)
    optimizer = ot.offload(model, rule, device="cpu", state=state, update=update)
    before = dict(optimizer.master_weights())
    copies = {name: value.clone() for name, value in before.items()}
    train(optimizer, model)
    after = dict(optimizer.master_weights())
    named = dict(optimizer.named_state())
    for name, param in model.named_parameters():
        assert torch.equal(before[name], copies[name]), name
        differ = after[name][after[name].to(param.dtype) != param.detach()]
        # Formats that hold the weight round ties, and what they round to ties, their own way.
        assert state != "fp32" or not differ.numel(), name
        assert bool((differ.view(torch.int32) & 0xFFFF == 0x8000).all()), name
        assert torch.equal(after[name], before[name]) != param.requires_grad, name
        if state == "fp32" and param.requires_grad:
            assert torch.equal(after[name], named[name]["master"]), name
    optimizer.close()


@pytest.mark.parametrize("state", ["fp32", "split16", "int8"])
def test_the_default_dtype_of_torch_is_not_that_of_masters(state: Any) -> None:
    """Models of molecules set it to fp64."""
    results = []
    for default in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        x = torch.ones(2, 8)
        torch.set_default_dtype(default)
        try:
            optimizer = ot.offload(model, device="cpu", state=state, seed=0)
            for _ in range(2):
                optimizer.backward(model(x.bfloat16()).float().square().mean())
                optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            results.append(dict(optimizer.master_weights()))
            optimizer.close()
        finally:
            torch.set_default_dtype(torch.float32)
    for name, master in results[1].items():
        assert master.dtype is torch.float32 and torch.equal(master, results[0][name]), name
