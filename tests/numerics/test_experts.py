"""What a step does to an expert that got no tokens. Experts with tokens are among all `MODELS`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import offloadtrain as ot
from offloadtrain.model.experts import grouped_linear

LR, DECAY, STEPS = 1e-2, 0.1, 3


class Divided(nn.Module):
    """Rows are divided among the first and the last of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, rows: Tensor, ends: tuple[int, ...]) -> Tensor:
        return grouped_linear(rows, self.weight, torch.tensor(ends, dtype=torch.int32)).square()


def trained(weight_decay: float, *ends: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights before and after a step for each of `ends`, and what torch makes of them."""
    model, plain_model = Divided(), Divided()
    before = model.weight.detach().clone()
    adam = torch.optim.AdamW(plain_model.parameters(), lr=LR, weight_decay=weight_decay, fused=True)
    groups = [{"params": list(model.parameters()), "weight_decay": weight_decay}]
    rule = ot.AdamW(lr=LR, weight_decay=DECAY)
    optimizer = ot.offload(model, rule, params=groups, device="cpu", precision="fp32")
    for number, end in enumerate(ends):
        rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(number))
        optimizer.backward(model(rows, end).mean())
        optimizer.step()
        plain_model(rows, end).mean().backward()
        adam.step()
        adam.zero_grad()
    optimizer.synchronize()
    after = model.weight.detach().clone()
    optimizer.close()
    return before, after, plain_model.weight.detach()


def test_an_expert_without_tokens_only_decays() -> None:
    for weight_decay in (DECAY, 0.0):
        check_decay(weight_decay)


def check_decay(weight_decay: float) -> None:
    before, after, expected = trained(weight_decay, *[(5, 5, 12)] * STEPS)
    assert torch.equal(after, expected)
    shrunk = before[1].clone()
    for _ in range(STEPS):
        shrunk -= LR * weight_decay * shrunk
    assert torch.allclose(after[1], shrunk, rtol=1e-6, atol=0)
    assert torch.equal(after[1], before[1]) == (not weight_decay)
    for other in (0, 2):
        assert not torch.equal(after[other], before[other])


@pytest.mark.slow
def test_its_moments_still_move_an_expert_that_had_tokens_before() -> None:
    before, once, _ = trained(0.0, (4, 8, 12))
    _, twice, expected = trained(0.0, (4, 8, 12), (6, 6, 12))
    assert torch.equal(twice, expected)
    assert not torch.equal(once[1], before[1]) and not torch.equal(twice[1], once[1])
