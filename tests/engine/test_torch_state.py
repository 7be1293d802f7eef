"""State dicts for torch: exactly as large as the state, and those of torch's own optimizers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import offloadtrain as ot
from offloadtrain.engine import EngineError


def model(seed: int = 0) -> nn.Module:
    """Sizes of which torch's fused Adam leaves no scalar tail, whose bits are its own."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def step(net: nn.Module, optimizer: Any, seed: int) -> float:
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    loss = net(inputs.to(next(net.parameters()).dtype)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def offloaded(net: nn.Module, rule: Any = None, **options: Any) -> ot.OffloadOptimizer:
    return ot.offload(net, rule or ot.AdamW(lr=1e-2), device="cpu", **options)


def saved(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Through a file, as it is usually done."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@pytest.mark.parametrize(
    ("options", "per_param"),
    [
        ({}, 12),
        ({"grad_accum_steps": 2}, 12),
        ({"update": "speculative"}, 12),
        ({"update": "delayed"}, 12),
        ({"working": "host"}, 12),
        ({"state": "split16"}, 8),
        ({"state": "int8"}, 5 + 8 / 128),
    ],
)
def test_a_saved_state_dict_is_as_large_as_the_state(
    options: dict[str, Any], per_param: float
) -> None:
    net = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    optimizer = offloaded(net, **options)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    numel = sum(param.numel() for param in net.parameters())
    assert per_param <= len(file.getvalue()) / numel < per_param * 1.02
    optimizer.close()


FROM_TORCH: dict[str, tuple[Any, Any]] = {
    "adamw": (torch.optim.AdamW, ot.AdamW(lr=1.0)),
    "adagrad": (torch.optim.Adagrad, ot.Adagrad(lr=1.0)),
}


@pytest.mark.parametrize("model_last", [False, True])
@pytest.mark.parametrize("name", FROM_TORCH)
def test_training_goes_on_from_torch(name: str, model_last: bool) -> None:
    plain, (torchs, rule) = model(), FROM_TORCH[name]
    adam = torchs(plain.parameters(), lr=1e-2, fused=True)
    for seed in range(3):
        step(plain, adam, seed)
    weights, state = copy.deepcopy(plain.state_dict()), saved(plain, adam)
    expected = [step(plain, adam, seed) for seed in range(3, 6)]
    net = model(1)
    optimizer = offloaded(net, rule, precision="fp32")
    if not model_last:
        net.load_state_dict(weights)
    optimizer.load_state_dict(state)
    if model_last:
        net.load_state_dict(weights)
    assert set(optimizer.param_groups[0]) == {"params", *rule.defaults()}
    assert [step(net, optimizer, seed) for seed in range(3, 6)] == expected
    optimizer.synchronize()
    for param, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, other)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "weight decay"),
        (
            lambda p: torch.optim.SGD(p, momentum=0.9),
            "needs a step and exp_avg, exp_avg_sq, the state has momentum_buffer",
        ),
    ],
)
def test_states_of_other_updates_are_refused(made: Any, message: str) -> None:
    plain = model()
    other = made(plain.parameters())
    step(plain, other, 0)
    with pytest.raises(EngineError, match=message):
        offloaded(model()).load_state_dict(saved(plain, other))


def test_a_state_without_a_parameter_names_it() -> None:
    plain = model()
    adam = torch.optim.AdamW(plain.parameters())
    step(plain, adam, 0)
    state = saved(plain, adam)
    del state["state"][2]
    with pytest.raises(EngineError, match=r"nothing for '2.weight'"):
        offloaded(model()).load_state_dict(state)
